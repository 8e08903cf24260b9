"""Adapters on disk: named, versioned, written atomically, readable by their owner only.

    <data folder>/adapters/<name>/active        the number of the active version
    <data folder>/adapters/<name>/<version>/    adapter_model.safetensors, adapter_config.json (PEFT's layout),
                                                sebp_edge.json (the record), README.md,
                                                documents.json (salted hashes of the documents, and their splits),
                                                judged/<number>/ (the states that the gate judged, if the version was
                                                trained on all documents afterwards)
    <data folder>/adapters/.salt                the salt of the hashes in documents.json

A version is written into a temporary folder beside the adapters' folders, flushed to the disk, and renamed. It
contains none of the user's texts or paths.
"""

import dataclasses
import errno
import json
import os
import re
import secrets
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import platformdirs

from sebp_edge.adapters.record import RECORD, AdapterRecord
from sebp_edge.errors import AdapterError, OptionError, StorageError, suggest
from sebp_edge.files import flush, read_text, storage_errors, write_atomically
from sebp_edge.units import gigabytes

_ACTIVE = "active"
_NUMBER = re.compile(r"[1-9][0-9]{0,17}")
_SALT = ".salt"
_SALT_TEXT = re.compile("[0-9a-f]{32}")
JUDGED = "judged"
_SAVING_PREFIX = ".saving-"
# Temporary files that have not changed for this long belong to killed processes.
_STALE_SECONDS = 3600
# Upper bound of the size of all files except the weights, in bytes; 2 MB of it for documents.json.
_MAX_OTHER_BYTES = 2**21
# Windows reserves some names for devices, whatever follows their first dot.
_NAME = re.compile(r"(?!(?i:con|prn|aux|nul|com\d|lpt\d)(\.|$))[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Saveable(Protocol):
    """Something that writes its files into an existing folder."""

    def save(self, folder: Path) -> None:
        """Writes the files."""


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter on disk. `name` and `version` are None for one saved outside the store."""

    path: Path
    record: AdapterRecord
    name: str | None = None
    version: int | None = None
    active: bool = False


class AdapterStore:
    """The adapters in one folder, by default this program's folder in the user's data folder."""

    def __init__(self, folder: str | Path | None = None):
        self.folder = Path(folder or platformdirs.user_data_path("sebp-edge", appauthor=False)) / "adapters"

    def names(self) -> list[str]:
        """Returns the sorted names of all adapters, including those whose folders cannot be read.

        Raises:
            StorageError: the store's folder cannot be read.
        """
        with storage_errors("Cannot read the adapters in", self.folder, ""):
            if not self.folder.is_dir():
                return []
            return sorted(
                path.name for path in self.folder.iterdir() if _NAME.fullmatch(path.name) and _is_adapter(path)
            )

    def versions(self, name: str) -> list[int]:
        """Returns the numbers of all versions of an adapter, oldest first.

        Raises:
            AdapterError: there is no adapter of that name.
            StorageError: its folder cannot be read.
        """
        folder = self._existing_folder(name)
        with storage_errors("Cannot read the adapter in", folder, ""):
            return _versions(folder)

    def active_version(self, name: str) -> int | None:
        """Returns the number of the active version, or None if no version is active.

        Raises:
            AdapterError: the name is not valid.
            StorageError: this user may not read the file.
        """
        path = self.folder / check_name(name) / _ACTIVE
        try:
            number = read_text(path)
        except PermissionError as error:
            raise StorageError(f"Cannot read the active version from {str(path)!r}: {error.strerror}.") from error
        except (OSError, ValueError):
            return None
        return int(number) if _NUMBER.fullmatch(number) else None

    def open(self, name: str, version: int | None = None) -> SavedAdapter:
        """Opens one version of an adapter, by default the active one.

        Raises:
            AdapterError: there is no such name or version, no version is active, or its record is damaged.
            StorageError: its folder cannot be read.
        """
        self._existing_folder(name)
        active = self.active_version(name)
        version = active if version is None else version
        if version is None:
            raise AdapterError(f"No version of the adapter {name!r} is active; choose one of {self.versions(name)}.")
        path = self._version_folder(name, version)
        return SavedAdapter(path, AdapterRecord.read(path), name, version, version == active)

    def find(self, adapter: str | Path, version: int | None = None) -> tuple[Path, AdapterRecord]:
        """Returns the folder and the record of an adapter.

        Args:
            adapter: its name in this store, or its folder: a Path, or a string with a slash or backslash.
            version: a version of the named adapter; None for the active one.

        Raises:
            AdapterError: there is no such adapter.
        """
        if isinstance(adapter, str) and not re.search(r"[/\\]", adapter):
            saved = self.open(adapter, version)
            return saved.path, saved.record
        try:
            folder = Path(adapter).expanduser()
            exists = folder.is_dir()
        except (OSError, RuntimeError):
            exists = False
        if not exists:
            raise AdapterError(f"There is no adapter folder {str(adapter)!r}; check the path.")
        return folder, AdapterRecord.read(folder)

    def check_writable(self, name: str, out: Path | None) -> None:
        """Checks before any work is done that an adapter can be saved.

        Args:
            out: a new folder outside the store; None to save into the store.

        Raises:
            AdapterError: the name is not valid.
            OptionError: `out` already exists.
            StorageError: the folder cannot be written to.
        """
        check_name(name)
        if out is not None:
            # lstat also finds broken links, and fails on names that are too long.
            with storage_errors("Cannot save to", out, "; choose another location"), suppress(FileNotFoundError):
                out.lstat()
                raise OptionError(f"{str(out)!r} already exists; choose a new folder, so that nothing is overwritten.")
        parent = self._parent(out)
        with storage_errors("Cannot save to", parent):
            _make_private(parent)
            own = self.folder / name
            parent = own if out is None and own.exists() else parent
        with storage_errors("Cannot save to", parent):
            shutil.rmtree(tempfile.mkdtemp(prefix=".check-", dir=parent))

    def check_disk_space(self, size: int, out: Path | None) -> None:
        """Checks before any work is done that an adapter fits on the disk.

        Args:
            size: the size of its weights in bytes.
            out: a new folder outside the store; None to save into the store.

        Raises:
            StorageError: there is not enough space.
        """
        parent = self._parent(out)
        with storage_errors("Cannot save to", parent):
            free = shutil.disk_usage(parent).free
        if size + _MAX_OTHER_BYTES > free:
            raise StorageError(
                f"The adapter needs {gigabytes(size + _MAX_OTHER_BYTES)}, but only {gigabytes(free)} are free in "
                f"{str(parent)!r}; free space or choose another location."
            )

    def salt(self) -> bytes:
        """Returns the salt of this store, which is made at the first call.

        Raises:
            StorageError: it cannot be read or written, or is damaged.
        """
        path = self.folder / _SALT
        with storage_errors("Cannot write to", path), suppress(ValueError):
            _make_private(self.folder)
            if not path.exists():
                write_atomically(path, secrets.token_hex(16), replace=False)
            if _SALT_TEXT.fullmatch(salt := read_text(path)):
                return salt.encode()
        raise StorageError(
            f"{str(path)!r} is damaged, so the documents of earlier versions cannot be recognised; restore the file, "
            "or delete it to draw new splits."
        )

    def judged_states(self, saved: SavedAdapter) -> list[Path]:
        """Returns the folders of the states that the gate judged; the version's own if it was not trained again.

        Raises:
            AdapterError: one of them is missing.
        """
        folder = saved.path / JUDGED
        numbers = _versions(folder)
        if numbers != list(range(1, len(numbers) + 1)):
            raise AdapterError(f"A judged state is missing in {str(folder)!r}, which has {numbers}.")
        return [folder / str(number) for number in numbers] or [saved.path]

    def save(self, adaptation: Saveable, record: AdapterRecord, name: str, *, activate: bool) -> SavedAdapter:
        """Saves a new version of the adapter `name`, and makes it the active one if `activate` is set.

        Raises:
            AdapterError: the name is not valid.
            StorageError: nothing was saved, or the version was saved but not activated; the message says which.
        """
        folder = self.folder / check_name(name)
        with storage_errors("Cannot save to", folder):
            _make_private(self.folder)
            _make_private(folder)
            _delete_stale(self.folder)
            _delete_stale(folder)
            version = 1 + max(_versions(folder), default=0)
            # If another process takes this number first, the next number is tried.
            while not _write_atomically(adaptation, record, folder / str(version), self.folder):
                version += 1
        saved = SavedAdapter(folder / str(version), record, name, version)
        return self.activate(saved) if activate else saved

    def activate(self, saved: SavedAdapter) -> SavedAdapter:
        """Makes a version the active one.

        Raises:
            StorageError: the active version could not be changed.
        """
        what = f"Version {saved.version} of the adapter {saved.name!r} was saved but not activated: cannot write to"
        with storage_errors(what, saved.path.parent):
            write_atomically(saved.path.parent / _ACTIVE, str(saved.version))
        return dataclasses.replace(saved, active=True)

    def save_to(self, adaptation: Saveable, record: AdapterRecord, out: Path) -> SavedAdapter:
        """Saves an adapter into a new folder outside the store.

        Raises:
            StorageError: `out` already exists, or nothing could be saved.
        """
        out = out.absolute()
        with storage_errors("Cannot save to", out):
            if not _write_atomically(adaptation, record, out, out.parent):
                raise StorageError(f"{str(out)!r} already exists; nothing was overwritten.")
        return SavedAdapter(out, record)

    def remove(self, name: str, version: int | None = None) -> None:
        """Deletes one version of an adapter, or all of it if `version` is None.

        Raises:
            AdapterError: there is no such name or version.
            StorageError: nothing was deleted, or some files remain; the message says which.
        """
        folder = self._existing_folder(name)
        path = folder if version is None else self._version_folder(name, version)
        # Renamed first, so that an interruption never leaves half an adapter under its name; renamed within its parent
        # folder, because a full disk has no space for another folder.
        renamed = path.with_name(f".removed-{path.name}")
        with storage_errors("Cannot delete", path, ""):
            if version is not None and version == self.active_version(name):
                (folder / _ACTIVE).unlink()
            shutil.rmtree(renamed, ignore_errors=True)
            path.rename(renamed)
        with storage_errors("The adapter was removed, but some of its files remain in", renamed, "; delete them"):
            shutil.rmtree(renamed)
            _delete_stale(self.folder)
            if version is not None and not _versions(folder):
                shutil.rmtree(folder)

    def _parent(self, out: Path | None) -> Path:
        """Returns the folder that a new adapter is saved in."""
        return out.absolute().parent if out else self.folder

    def _existing_folder(self, name: str) -> Path:
        check_name(name)
        if name not in self.names():
            known = f"; {suggest(name, self.names())}" if self.names() else "; the store is empty."
            raise AdapterError(f"There is no adapter {name!r}{known}")
        return self.folder / name

    def _version_folder(self, name: str, version: int) -> Path:
        if version not in (versions := self.versions(name)):
            raise AdapterError(f"The adapter {name!r} has no version {version}; it has {versions}.")
        return self.folder / name / str(version)


def is_name(name: str) -> bool:
    """Whether this can be an adapter's name."""
    return bool(_NAME.fullmatch(name)) and ".." not in name and not name.endswith(".")


def check_name(name: str) -> str:
    """Returns `name` if it is a valid adapter name; raises an AdapterError otherwise."""
    if not is_name(name):
        raise AdapterError(
            f"Invalid adapter name {name!r}; use up to 64 letters, digits, '.', '_' and '-', starting with a letter or "
            "digit, and no name that Windows reserves for devices, such as con or nul."
        )
    return name


def _is_adapter(folder: Path) -> bool:
    """Whether a folder is an adapter: it has versions, or this user may not read it."""
    try:
        return bool(_versions(folder))
    except OSError:
        return True


def _versions(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if _NUMBER.fullmatch(path.name) and path.is_dir())


# ------------------------------------------------------------------------------------------------------------ writing


def _delete_stale(folder: Path) -> None:
    """Deletes temporary files of killed processes once they are too old to belong to a running one."""
    for path in folder.glob(".*-*"):
        with suppress(OSError):
            if max(each.stat().st_mtime for each in (path, *path.rglob("*"))) < time.time() - _STALE_SECONDS:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _write_atomically(adaptation: Saveable, record: AdapterRecord, target: Path, temporary_parent: Path) -> bool:
    """Writes an adapter's folder atomically; returns False if `target` already exists.

    Args:
        temporary_parent: the folder to write the temporary folder into, on the same disk as `target`.
    """
    temporary = Path(tempfile.mkdtemp(prefix=_SAVING_PREFIX, dir=temporary_parent))
    try:
        adaptation.save(temporary)
        (temporary / RECORD).write_text(json.dumps(dataclasses.asdict(record), indent=2) + "\n", encoding="utf-8")
        # The name of a model's folder may not be valid UTF-8.
        (temporary / "README.md").write_text(record.model_card(), encoding="utf-8", errors="backslashreplace")
        for path in temporary.rglob("*"):
            path.chmod(0o700 if path.is_dir() else 0o600)
            flush(path)
        flush(temporary)
        if os.path.lexists(target):
            return False
        try:
            _move(temporary, target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        flush(target.parent)
        return True
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _move(folder: Path, target: Path) -> None:
    """Renames a folder; creates the target's parent again if another process removes it meanwhile."""
    while True:
        _make_private(target.parent)
        try:
            folder.rename(target)
            return
        except FileNotFoundError:
            if target.parent.is_dir():
                raise


def _make_private(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
