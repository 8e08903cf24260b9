"""What PyInstaller brings along into an app that embeds this package; it looks for it here by itself.

Internal: import from `sebp_edge` or `sebp_edge.research`.
"""

from pathlib import Path


def hook_folders() -> list[str]:
    """Where PyInstaller finds the hook: told by the entry point `pyinstaller40`."""
    return [str(Path(__file__).parent)]
