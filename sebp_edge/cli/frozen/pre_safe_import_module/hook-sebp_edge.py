"""Refuses an editable install before PyInstaller looks for the package, which it would not find there."""

from importlib.util import find_spec
from pathlib import Path


def pre_safe_import_module(api) -> None:
    """Called by PyInstaller before it searches for `sebp_edge`; `api` is unused.

    Raises:
        SystemExit: the parts of the package are in different folders, as in an editable install.
    """
    package, ops = (Path(find_spec(name).origin).parent for name in ("sebp_edge", "sebp_edge.ops"))
    if ops.parent != package:
        raise SystemExit(
            f"PyInstaller cannot collect sebp-edge from {str(package)!r}, since that is an editable install. "
            "Install a wheel: pip install 'PATH/TO/sebp-edge', without -e."
        )
