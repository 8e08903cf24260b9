"""The file `active` of an adapter: the number of the active version; below it, those that were active before."""

from collections.abc import Sequence
from pathlib import Path

from sebp_edge.basics.files import flush, read_text, write_atomically
from sebp_edge.errors import StorageError
from sebp_edge.store.folders import NUMBER

_FILE = "active"
# How many earlier versions a rollback can go back to.
_MAX_VERSIONS = 1000


def read_activated(folder: Path) -> list[int]:
    """Returns the versions that have been active and are still there: the active one, then the one before it..."""
    path = folder / _FILE
    try:
        text = read_text(path)
    except PermissionError as error:
        raise StorageError(f"Cannot read the active version from {str(path)!r}: {error.strerror}.") from error
    except (OSError, ValueError):
        return []
    numbers = text.split("\n")
    if not all(NUMBER.fullmatch(number) for number in numbers):
        return []
    return [int(number) for number in numbers if (folder / number).is_dir()]


def write_activated(folder: Path, versions: Sequence[int]) -> None:
    """Writes which versions have been active; deletes the file if none has."""
    path = folder / _FILE
    if versions:
        write_atomically(path, "\n".join(map(str, versions[:_MAX_VERSIONS])))
    else:
        path.unlink()
        flush(folder)
