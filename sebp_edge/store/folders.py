"""Folders of a store: found by adapters' names, written whole, readable by their owner only, deleted in one step."""

import dataclasses
import json
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from sebp_edge.basics.files import flush, storage_errors, walk, write_atomically
from sebp_edge.store.names import folder_of, name_of
from sebp_edge.store.record import RECORD, AdapterRecord

NUMBERS = ".numbers"
JOBS = ".jobs"
NUMBER = re.compile(r"[1-9][0-9]{0,17}")
_REMOVED = ".removed-"
# Temporary files that have not changed for this long belong to killed processes.
_STALE_SECONDS = 3600


class Saveable(Protocol):
    """Something that writes its files into an existing folder."""

    def save(self, folder: Path) -> None:
        """Writes the files."""


def version_numbers(folder: Path) -> list[int]:
    """Returns the numbers of the versions in an adapter's folder, in order."""
    try:
        return sorted(int(path.name) for path in folder.iterdir() if NUMBER.fullmatch(path.name) and path.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def adapter_names(store: Path) -> list[str]:
    """Returns the sorted names of all adapters, including those whose folders cannot be read."""
    with storage_errors("Cannot read the adapters in", store, ""):
        return sorted(name_of(folder.name) for folder in _named_folders(store) if is_adapter(folder))


def is_adapter(folder: Path) -> bool:
    """Whether a folder is an adapter: it has versions, or this user may not read it."""
    try:
        return bool(version_numbers(folder))
    except OSError:
        return True


def all_versions(store: Path) -> list[Path]:
    """Returns the folders of all versions of all adapters."""
    folders = [store / folder_of(name) for name in adapter_names(store)]
    return [folder / str(number) for folder in folders for number in version_numbers(folder)]


def _named_folders(store: Path) -> list[Path]:
    """Returns the folders that have the name of an adapter's."""
    return [path for path in store.iterdir() if path.is_dir() and name_of(path.name)] if store.is_dir() else []


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Context with a new folder for a version that is being written; deletes it at the end if it is still there."""
    folder = Path(tempfile.mkdtemp(prefix=".saving-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_version(adaptation: Saveable, record: AdapterRecord, folder: Path) -> None:
    """Writes a version's files into an empty folder, and flushes them."""
    adaptation.save(folder)
    write_record(folder, record)
    flush_all(folder)


def write_record(folder: Path, record: AdapterRecord) -> None:
    """Writes a version's record and its model card."""
    # The name of a model's folder may not be valid UTF-8.
    write_atomically(folder / "README.md", record.model_card().encode(errors="backslashreplace").decode())
    write_atomically(folder / RECORD, json.dumps(dataclasses.asdict(record), indent=2) + "\n")


def flush_all(folder: Path) -> None:
    """Makes all files in a folder readable by their owner only, and flushes them and the folder."""
    for path in walk(folder):
        path.chmod(0o700 if path.is_dir() else 0o600)
        flush(path)
    flush(folder)


def put_aside(path: Path) -> Path:
    """Renames a version or an adapter so that it is gone at once; returns the new path, which is to be deleted.

    It stays in its parent folder, since a full disk may have no space in another one.
    """
    renamed = path.with_name(_REMOVED + path.name)
    if os.path.lexists(renamed):
        renamed = path.with_name(f"{_REMOVED}{path.name}-{secrets.token_hex(4)}")
    path.rename(renamed)
    flush(path.parent)
    return renamed


def sweep(store: Path) -> None:
    """Deletes what killed processes have left in a store; only for the holder of its lock."""
    for path in leftovers(store):
        delete(path)


def leftovers(store: Path) -> list[Path]:
    """Returns what killed processes have left in a store; only for the holder of its lock.

    Removed folders are deleted under the lock, so that those that are there belong to no running process. Other
    temporary files do not once they have not changed for an hour.
    """
    folders = _named_folders(store)
    others = (store / NUMBERS, store / JOBS)
    found = [path for folder in (store, *others, *folders) for path in _leftovers_in(folder)]
    return found + [folder for folder in folders if not is_adapter(folder) and not any(folder.iterdir())]


def _leftovers_in(folder: Path) -> list[Path]:
    try:
        found = [path for path in folder.iterdir() if path.match(".*-*")]
    except (FileNotFoundError, PermissionError):  # nothing in it can be deleted
        return []
    return [path for path in found if path.name.startswith(_REMOVED) or _changed(path) < time.time() - _STALE_SECONDS]


def delete(path: Path) -> None:
    """Deletes a file or folder if possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def size_of(path: Path) -> int:
    """Returns the size of a file, or of all files in a folder, in bytes."""
    total = 0
    for each in _tree(path):
        with suppress(FileNotFoundError):
            total += 0 if each.is_dir() else each.lstat().st_size
    return total


def _tree(path: Path) -> Iterator[Path]:
    """Yields a path and, if it is a folder, all that is in it; raises an OSError if a folder cannot be listed."""
    yield path
    if path.is_dir() and not path.is_symlink():
        yield from walk(path)


def _changed(path: Path) -> float:
    """Returns when a file, or one in a folder, last changed; now if that cannot be told."""
    try:
        return max(each.lstat().st_mtime for each in _tree(path))
    except OSError:
        return time.time()
