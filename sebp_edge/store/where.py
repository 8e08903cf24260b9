"""The file where.json of an adapter: where on this machine each of its versions was made.

It is beside the versions, not in them, so that no archive, export or copied version has a path of the owner's. Nothing
depends on it: if it is lost or damaged, the owner is asked for what it says.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from sebp_edge.basics.files import parse_dataclass, read_json, write_atomically
from sebp_edge.errors import OptionError
from sebp_edge.values.folder import Folder

_FILE = "where.json"
_FORMAT = 1


@dataclass(frozen=True)
class Where:
    """Where a version was made.

    Attributes:
        texts: the files and folders that its adaptation was given, with absolute paths; then, if it knows documents
            that were not among these, those that earlier adaptations were given, the latest first.
    """

    texts: tuple[tuple[Folder, ...], ...] = ()

    @property
    def paths(self) -> list[Path]:
        """All files and folders."""
        return [Path(folder.path) for group in self.texts for folder in group]

    def earlier_than(self, given: Collection[Folder]) -> tuple[tuple[Folder, ...], ...]:
        """Returns the groups of `texts` without the files and folders that are given again."""
        again = {str(folder.path) for folder in given}
        groups = (tuple(folder for folder in group if str(folder.path) not in again) for group in self.texts)
        return tuple(filter(None, groups))


def read(folder: Path) -> dict[int, Where]:
    """Returns where the versions of an adapter were made, by number; nothing of those of which it is not known."""
    try:
        values = read_json(folder / _FILE)
        if values["format"] != _FORMAT:
            return {}
        return {int(version): parse_dataclass(each, Where) for version, each in values["versions"].items()}
    except (OSError, LookupError, TypeError, ValueError, AttributeError, OptionError):
        return {}


def write(folder: Path, versions: Mapping[int, Where]) -> None:
    """Writes where the versions of an adapter were made."""
    values = {str(version): asdict(one) for version, one in versions.items()}
    text = json.dumps({"format": _FORMAT, "versions": values}, indent=1, default=str)
    write_atomically(folder / _FILE, text + "\n")


def forget(folder: Path, removed: Collection[int]) -> None:
    """Forgets where versions were made that are removed; on a full disk, where any was made."""
    known = read(folder)
    if known.keys().isdisjoint(removed):
        return
    try:
        write(folder, {version: one for version, one in known.items() if version not in removed})
    except OSError:
        (folder / _FILE).unlink()
