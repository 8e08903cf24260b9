"""PyInstaller's hook: what it must collect for an app that embeds this package.

Internal: import from `sebp_edge` or `sebp_edge.research`.
"""

from pathlib import Path


def hook_folders() -> list[str]:
    """Returns the folder of the hook; called by PyInstaller through the entry point `pyinstaller40`."""
    return [str(Path(__file__).parent)]
