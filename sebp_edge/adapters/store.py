"""Adapters on disk: named, versioned, written atomically, readable by their owner only.

    <data folder>/adapters/<folder>/active      the number of the active version; below it, those active before
    <data folder>/adapters/<folder>/<version>/  adapter_model.safetensors, adapter_config.json (PEFT's layout),
                                                sebp_edge.json (the record), README.md,
                                                documents.json (names, salted hashes and splits of the documents),
                                                known_texts.json (salted hashes of the texts),
                                                report.json (how it was trained and tested),
                                                samples.json (words and names of the user's, only if asked for),
                                                judged/<number>/ (the states that the gate judged, if the version was
                                                trained on all documents afterwards)
    <data folder>/adapters/<folder>/forgotten-<number>.json     receipts of `forget`
    <data folder>/adapters/<folder>/where.json  the files and folders that each version was made from
    <data folder>/adapters/.lock                the lock for all changes
    <data folder>/adapters/.numbers/<hash>      the highest version number that an adapter's name has had
    <data folder>/adapters/.salt                the salt of the hashes of names
    <data folder>/adapters/.models              where the base models are that were given as a folder or a file
    <data folder>/adapters/.questions/          questions that models wrote about documents, by the documents' hashes

`sebp_edge.adapters.names` says which folder has which adapter. A version is written into a temporary folder beside the
adapters' folders, flushed to the disk, and renamed under the lock. Reading takes no lock. A version contains none of
the user's texts or paths, apart from samples.json and the names of documents. where.json has paths, and stays here.
The questions are the user's text; `forget`, and removing an adapter, delete all of them.
"""

import dataclasses
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from sebp_edge.adapters import archive, model_paths
from sebp_edge.adapters.folders import (
    NUMBER,
    Saveable,
    delete,
    flush_all,
    leftovers,
    put_aside,
    size_of,
    temporary_folder,
    version_numbers,
    write_version,
)
from sebp_edge.adapters.garbage import KEPT_VERSIONS, Garbage, find_versions
from sebp_edge.adapters.lock import locked
from sebp_edge.adapters.names import check_name, folder_of, name_of
from sebp_edge.adapters.record import AdapterRecord
from sebp_edge.errors import AdapterError, OptionError, SebpEdgeError, StorageError, suggest
from sebp_edge.files import expand_user, flush, make_private, read_text, storage_errors, write_atomically
from sebp_edge.units import sizes_apart

if TYPE_CHECKING:
    from sebp_edge.adapters.difference import Difference
    from sebp_edge.adapters.documents import KnownDocument
    from sebp_edge.adapters.version_report import VersionReport
    from sebp_edge.adapters.where import Where

JUDGED = "judged"
DOCUMENTS = "documents.json"
_ACTIVE = "active"
_LOCK = ".lock"
_NUMBERS = ".numbers"
_SALT = ".salt"
_QUESTIONS = ".questions"
_SALT_TEXT = re.compile("[0-9a-f]{32}")
# How many earlier versions a rollback can go back to.
_MAX_ACTIVATED = 1000
# Upper bound of the size of all files except the weights, in bytes; 2 MB of it for documents.json.
_MAX_OTHER_BYTES = 2**21


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
            found = ((name_of(path.name), path) for path in self.folder.iterdir())
            return sorted(name for name, path in found if name is not None and _is_adapter(path))

    def versions(self, name: str) -> list[int]:
        """Returns the numbers of all versions of an adapter, oldest first.

        Raises:
            AdapterError: there is no adapter of that name.
            StorageError: its folder cannot be read.
        """
        folder = self._existing_folder(name)
        with storage_errors("Cannot read the adapter in", folder, ""):
            return version_numbers(folder)

    def version_folder(self, name: str, version: int) -> Path:
        """Returns the folder of a version.

        Raises:
            AdapterError: there is no such name or version.
            StorageError: its folder cannot be read.
        """
        if version not in (versions := self.versions(name)):
            raise AdapterError(f"The adapter {name!r} has no version {version}; it has {versions}.")
        return self._folder(name) / str(version)

    def active_version(self, name: str) -> int | None:
        """Returns the number of the active version, or None if no version is active.

        Raises:
            AdapterError: the name is not valid.
            StorageError: this user may not read the file.
        """
        return next(iter(self._activated(name)), None)

    def open(self, name: str, version: int | None = None) -> SavedAdapter:
        """Opens one version of an adapter, by default the active one.

        Raises:
            AdapterError: there is no such name or version, no version is active, or its record is damaged.
            StorageError: its folder cannot be read.
        """
        name = check_name(name)
        self._existing_folder(name)
        active = self.active_version(name)
        chosen = active if version is None else version
        if chosen is None:
            raise AdapterError(f"No version of the adapter {name!r} is active; choose one of {self.versions(name)}.")
        try:
            path = self.version_folder(name, chosen)
            return SavedAdapter(path, AdapterRecord.read(path), name, chosen, chosen == active)
        except AdapterError:
            if version is None and self.active_version(name) != active:
                return self.open(name)  # another process has removed the version meanwhile
            raise

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
        own = self._folder(name)
        if out is not None:
            # lstat also finds broken links, and fails on names that are too long.
            with storage_errors("Cannot save to", out, "; choose another location"), suppress(FileNotFoundError):
                out.lstat()
                raise OptionError(f"{str(out)!r} already exists; choose a new folder, so that nothing is overwritten.")
        parent = self._parent(out)
        with storage_errors("Cannot save to", parent):
            make_private(parent) if out is None else parent.mkdir(parents=True, exist_ok=True, mode=0o700)
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
        self._check_free_space(size + _MAX_OTHER_BYTES, self._parent(out))

    def salt(self) -> bytes:
        """Returns the salt of this store, which is made at the first call.

        Raises:
            StorageError: it cannot be read or written, or is damaged.
        """
        path = self.folder / _SALT
        with storage_errors("Cannot write to", path), suppress(ValueError):
            make_private(self.folder)
            if not path.exists():
                write_atomically(path, secrets.token_hex(16), replace=False)
            if _SALT_TEXT.fullmatch(salt := read_text(path)):
                return salt.encode()
        raise StorageError(
            f"{str(path)!r} is damaged, so the numbers of removed versions are not known; restore the file, or delete "
            "it to count anew."
        )

    def model_path(self, record: AdapterRecord) -> Path | None:
        """Returns where an adapter's base model was last; None if it was not given as a folder or a file."""
        return model_paths.path_of(self.folder, record.fingerprint)

    def remember_model(self, fingerprint: str, path: Path) -> None:
        """Remembers where a base model is, for its adapters; no record or archive contains the path.

        Raises:
            StorageError: it cannot be written.
        """
        path = path.expanduser().absolute()
        if model_paths.path_of(self.folder, fingerprint) == path:
            return
        with storage_errors("Cannot write to", self.folder):
            make_private(self.folder)
            with self._locked():
                model_paths.remember(self.folder, fingerprint, path)

    @property
    def questions_folder(self) -> Path:
        """The folder of the questions that models wrote; it may be deleted at any time, and they are written anew."""
        return self.folder / _QUESTIONS

    def delete_questions(self) -> None:
        """Deletes the questions that models wrote.

        Raises:
            StorageError: they cannot be deleted.
        """
        with storage_errors("Cannot delete", self.questions_folder, ""), suppress(FileNotFoundError):
            shutil.rmtree(self.questions_folder)

    def judged_states(self, saved: SavedAdapter) -> list[Path]:
        """Returns the folders of the states that the gate judged; the version's own if it was not trained again.

        Raises:
            AdapterError: one of them is missing.
        """
        folder = saved.path / JUDGED
        numbers = version_numbers(folder)
        if numbers != list(range(1, len(numbers) + 1)):
            raise AdapterError(f"A judged state is missing in {str(folder)!r}, which has {numbers}.")
        return [folder / str(number) for number in numbers] or [saved.path]

    def save(
        self,
        adaptation: Saveable,
        record: AdapterRecord,
        name: str,
        *,
        activate: bool,
        where: "Where | None" = None,
    ) -> SavedAdapter:
        """Saves a new version of the adapter `name`, and makes it the active one if `activate` is set.

        Args:
            where: where it was made, which is remembered beside the version.

        Raises:
            AdapterError: the name is not valid.
            StorageError: nothing was saved, or the version was saved but not activated; the message says which.
        """
        name = check_name(name)
        with storage_errors("Cannot save to", self._folder(name)):
            make_private(self.folder)
            with temporary_folder(self.folder) as temporary:
                write_version(adaptation, record, temporary)
                return self._add(temporary, record, name, activate=activate, where=where)

    def save_to(self, adaptation: Saveable, record: AdapterRecord, out: Path) -> SavedAdapter:
        """Saves an adapter into a new folder outside the store.

        Raises:
            StorageError: `out` already exists, or nothing could be saved.
        """
        out = out.absolute()
        with storage_errors("Cannot save to", out), temporary_folder(out.parent) as temporary:
            write_version(adaptation, record, temporary)
            taken = os.path.lexists(out)
            with suppress(FileExistsError):  # made meanwhile
                if not taken:
                    temporary.rename(out)
            if temporary.exists():
                raise StorageError(f"{str(out)!r} already exists; nothing was overwritten.")
            flush(out.parent)
        return SavedAdapter(out, record)

    def activate(self, saved: SavedAdapter) -> SavedAdapter:
        """Makes a version the active one.

        Raises:
            AdapterError: it has been removed.
            StorageError: the active version could not be changed.
        """
        with _activation_errors(saved), self._locked():
            self.version_folder(saved.name, saved.version)
            return self._activate(saved)

    def activate_after(self, saved: SavedAdapter, before: int | None) -> tuple[SavedAdapter, int | None]:
        """Makes a version the active one unless one is active that is not `before`; returns it, and what is active.

        Args:
            before: the version that it was compared with; None if none was active.

        Raises:
            AdapterError: it has been removed.
            StorageError: the active version could not be changed.
        """
        with _activation_errors(saved), self._locked():
            self.version_folder(saved.name, saved.version)
            active = self.active_version(saved.name)
            if active not in (None, before):
                return saved, active
            return self._activate(saved), saved.version

    def wheres(self, name: str) -> dict[int, "Where"]:
        """Returns where on this machine the versions of an adapter were made, by number, as far as it is known.

        Raises:
            AdapterError: the name is not valid.
        """
        # Imported here, since the other methods need no patterns of files.
        from sebp_edge.adapters import where

        return where.read(self._folder(name))

    def remember_where(self, saved: SavedAdapter, where: "Where") -> None:
        """Remembers where a version was made, in place of what is known of that; a disk that refuses it is no error."""
        with suppress(OSError), self._locked():
            self._remember_where(saved, where)

    def rollback(self, name: str) -> SavedAdapter:
        """Makes the version active again that was active before the active one; returns it.

        Raises:
            AdapterError: no other version was active before, or it is damaged.
            StorageError: the active version could not be changed.
        """
        name = check_name(name)
        folder = self._existing_folder(name)
        with storage_errors("Cannot change the active version in", folder), self._locked():
            active, *earlier = self._activated(name) or [None]
            if not earlier:
                before = "" if active is None else f" before version {active}"
                raise AdapterError(
                    f"No version of the adapter {name!r} was active{before}; activate one of {self.versions(name)}."
                )
            path = folder / str(earlier[0])
            saved = SavedAdapter(path, AdapterRecord.read(path), name, earlier[0], active=True)
            self._write_activated(name, earlier)
        return saved

    def rename(self, name: str, new_name: str) -> None:
        """Gives an adapter another name; its versions keep their numbers.

        Raises:
            AdapterError: there is no such adapter, the new name is not valid, or another adapter has it.
            StorageError: it could not be renamed.
        """
        name, new_name = check_name(name), check_name(new_name)
        with storage_errors("Cannot rename", self._existing_folder(name)), self._locked():
            folder, target = self._existing_folder(name), self._folder(new_name)
            if new_name in self.names():
                raise AdapterError(
                    f"There already is an adapter {new_name!r}; choose another name, or remove that adapter first."
                )
            if os.path.lexists(target):  # a killed process left it
                delete(put_aside(target))
            self._write_last_number(new_name, max(self._last_number(name), self._last_number(new_name)))
            folder.rename(target)
            flush(self.folder)

    def remove(self, name: str, version: int | None = None) -> int | None:
        """Deletes one version of an adapter, or all of it if `version` is None; returns the active version after that.

        If the version was active, the one that was active before it becomes active; none does if there is none. The
        numbers of removed versions are not used again.

        Raises:
            AdapterError: there is no such name or version.
            StorageError: nothing was deleted, or some files remain; the message says which.
        """
        name = check_name(name)
        folder = self._existing_folder(name)
        with storage_errors("Cannot delete", folder if version is None else folder / str(version), ""), self._locked():
            self._existing_folder(name)
            versions = self.versions(name) if version is None else [version]
            self._remove(name, versions)
            if version is None:
                delete(self.questions_folder)
            self._sweep()
        return self.active_version(name)

    def erase(self, name: str, versions: list[int], lists: Mapping[int, str]) -> None:
        """Deletes versions of an adapter, not all of them, and writes lists of documents anew.

        Args:
            lists: the content of documents.json, by version.

        Raises:
            StorageError: not all of it could be deleted.
        """
        folder = self._existing_folder(name)
        with storage_errors("Cannot delete all versions in", folder, "; run this again"), self._locked():
            if versions:
                self._remove(check_name(name), versions)
            for version, text in lists.items():
                write_atomically(folder / str(version) / DOCUMENTS, text)
            self._sweep()

    def garbage(self, keep: int = KEPT_VERSIONS) -> Garbage:
        """Returns what `gc` would delete: see `sebp_edge.adapters.garbage`.

        Args:
            keep: how many of the newest versions of each adapter are kept; 1 or more.

        Raises:
            OptionError: `keep` is less than 1.
            StorageError: the store cannot be read.
        """
        if keep < 1:
            raise OptionError(f"keep is {keep}; it must be 1 or more, so that no adapter loses its newest version.")
        if not self.folder.is_dir():
            return Garbage(keep)
        with storage_errors("Cannot read the adapters in", self.folder, ""), self._locked():
            return self._garbage(keep)

    def gc(self, garbage: Garbage) -> Garbage:
        """Deletes what `garbage()` returned, apart from what has been activated or deleted since; returns what it was.

        Raises:
            StorageError: not all of it could be deleted.
        """
        if not self.folder.is_dir():
            return Garbage(garbage.keep)
        with storage_errors("Cannot delete in", self.folder, ""), self._locked():
            found = self._garbage(garbage.keep).only(garbage)
            for name in sorted({one.name for one in found.versions}):
                self._remove(name, [one.version for one in found.versions if one.name == name])
            for path in found.leftovers:
                delete(path)
        return found

    def diff(self, name: str, old: int | None = None, new: int | None = None) -> "Difference":
        """Returns which documents came, went and changed from one version of an adapter to another one.

        Args:
            old: a version; by default the one before `new`.
            new: a version; by default the newest one.

        Raises:
            AdapterError: there is no such version, it was saved before sebp-edge recorded documents, or one of the two
                came from another store.
        """
        versions = self.versions(name)
        new = max(versions) if new is None else new
        if old is None:
            before = [version for version in versions if version < new]
            if not before:
                raise AdapterError(
                    f"The adapter {name!r} has no version before version {new} to compare it with; it has {versions}."
                )
            old = before[-1]
        # Imported here, since the other methods need no numpy.
        from sebp_edge.adapters.difference import compare_versions

        return compare_versions(self.open(name, old), self.open(name, new), self.salt())

    def documents(self, name: str, version: int) -> list["KnownDocument"]:
        """Returns the documents of a version, without their texts; none if it was saved before they were recorded.

        Raises:
            AdapterError: there is no such version, or its list of documents is damaged.
        """
        from sebp_edge.adapters.documents import read_manifest

        manifest = read_manifest(self.version_folder(name, version))
        return list(manifest.documents) if manifest else []

    def report(self, adapter: str | Path, version: int | None = None, *, with_samples: bool = False) -> "VersionReport":
        """Returns how a version was made and tested, with `to_html()`, a page in one file, and `to_dict()`.

        Args:
            adapter, version: as for `find`.
            with_samples: whether it has the samples and names of documents, if the version was made with
                `keep_samples`. Without them it contains no text of the user's.

        Raises:
            AdapterError: there is no such adapter, or a file of it is damaged.
        """
        from sebp_edge.adapters.version_report import VersionReport

        if isinstance(adapter, str) and not re.search(r"[/\\]", adapter):
            saved = self.open(adapter, version)
        else:
            saved = SavedAdapter(*self.find(adapter))
        return VersionReport.read(saved, with_samples=with_samples)

    def export_archive(
        self, name: str, to: str | Path, version: int | None = None, *, with_names: bool = False
    ) -> SavedAdapter:
        """Writes a version, by default the active one, with its record into a new file; returns the version.

        Args:
            with_names: whether the file has the names of the documents, and the version's samples, if it has kept any;
                neither names nor text otherwise.

        Raises:
            AdapterError: there is no such name or version, no version is active, or its list of documents is damaged.
            OptionError: the file already exists.
            StorageError: the file could not be written.
        """
        from sebp_edge.adapters.documents import without_names
        from sebp_edge.adapters.training_report import SAMPLES

        saved, replaced = self.open(name, version), {}
        if not with_names:
            documents = without_names(saved.path, self.salt())
            replaced = {SAMPLES: None} | ({} if documents is None else {DOCUMENTS: documents.encode()})
        archive.write(saved.path, saved.name, expand_user(to), replaced)
        return saved

    def import_archive(self, file: str | Path, name: str | None = None) -> SavedAdapter:
        """Adds the version in a file of `export_archive` as a new version, which is not active; returns it.

        Args:
            name: the adapter's name; by default the one in the file.

        Raises:
            AdapterError: the file is damaged or no such file, or a name is not valid.
            StorageError: it could not be saved.
        """
        file = expand_user(file)
        with archive.reading(file) as contents:
            name = check_name(contents.name if name is None else name)
            with storage_errors("Cannot save to", self._folder(name)):
                make_private(self.folder)
                self._check_free_space(contents.size, self.folder)
                with temporary_folder(self.folder) as temporary:
                    contents.unpack(temporary)
                    record = archive.read_record(temporary, file)
                    flush_all(temporary)
                    return self._add(temporary, record, name, activate=False)

    # -------------------------------------------------------------------------------------------------------- private

    def _locked(self) -> AbstractContextManager[None]:
        """Context in which no other process or thread changes the store."""
        return locked(self.folder / _LOCK)

    def _add(
        self, written: Path, record: AdapterRecord, name: str, *, activate: bool, where: "Where | None" = None
    ) -> SavedAdapter:
        """Makes a written folder the next version of an adapter."""
        with self._locked():
            self._sweep()
            folder = self._folder(name)
            make_private(folder)
            version = 1 + max(version_numbers(folder), default=0)
            version = max(version, 1 + self._last_number(name))
            while os.path.lexists(folder / str(version)):  # not a folder, so not a version
                version += 1
            # Written first, so that a number is lost rather than used twice.
            self._write_last_number(name, version)
            path = written.rename(folder / str(version))
            flush(folder)
            saved = SavedAdapter(path, record, name, version)
            if where is not None:
                with suppress(OSError):  # the version is saved; `forget` asks for its texts then
                    self._remember_where(saved, where)
            if not activate:
                return saved
            with _activation_errors(saved):
                return self._activate(saved)

    def _remove(self, name: str, versions: list[int]) -> None:
        """Deletes versions of an adapter; all of it if no version remains."""
        from sebp_edge.adapters import where

        folder = self._folder(name)
        paths = [self.version_folder(name, version) for version in versions]
        fingerprints = _fingerprints(paths)
        remaining = set(self.versions(name)) - set(versions)
        activated = self._activated(name)
        if not remaining:
            paths = [folder]
        else:
            where.forget(folder, versions)
        if remaining and activated and activated[0] in versions:
            # Changed first, so that no process finds a version active that is not there.
            self._write_activated(name, [version for version in activated if version in remaining])
        for renamed in [put_aside(path) for path in paths]:
            advice = "; delete them"
            with storage_errors("The adapter was removed, but some of its files remain in", renamed, advice):
                shutil.rmtree(renamed)
        self._forget_models(fingerprints)

    def _forget_models(self, fingerprints: set[str]) -> None:
        """Forgets where base models are that no version was made for any more."""
        if any(model_paths.path_of(self.folder, fingerprint) for fingerprint in fingerprints):
            folders = [self._folder(name) / str(version) for name in self.names() for version in self.versions(name)]
            model_paths.forget(self.folder, fingerprints - _fingerprints(folders))

    def _remember_where(self, saved: SavedAdapter, one: "Where") -> None:
        from sebp_edge.adapters import where

        folder = saved.path.parent
        versions = version_numbers(folder)
        known = {version: each for version, each in where.read(folder).items() if version in versions}
        where.write(folder, known | {saved.version: one})

    def _garbage(self, keep: int) -> Garbage:
        versions = []
        for name in self.names():
            with suppress(SebpEdgeError, OSError):  # one that cannot be read is kept
                recorded = {}
                for version in self.versions(name):
                    with suppress(AdapterError):
                        recorded[version] = AdapterRecord.read(self._folder(name) / str(version))
                versions += find_versions(name, self._folder(name), recorded, self._activated(name)[:2], keep)
        sizes = {}
        for path in self._leftovers():
            with suppress(OSError):  # what cannot be listed cannot be deleted either
                sizes[path] = size_of(path)
        return Garbage(keep, tuple(versions), sizes)

    def _sweep(self) -> None:
        """Deletes what killed processes have left."""
        for path in self._leftovers():
            delete(path)

    def _leftovers(self) -> list[Path]:
        folders = [path for path in self.folder.iterdir() if path.is_dir() and name_of(path.name)]
        found = [path for folder in (self.folder, self.folder / _NUMBERS, *folders) for path in leftovers(folder)]
        return found + [folder for folder in folders if not _is_adapter(folder) and not any(folder.iterdir())]

    def _activated(self, name: str) -> list[int]:
        """Returns the versions that have been active and are still there: the active one, then the one before it...

        Raises:
            StorageError: this user may not read the file.
        """
        path = self._folder(name) / _ACTIVE
        try:
            text = read_text(path)
        except PermissionError as error:
            raise StorageError(f"Cannot read the active version from {str(path)!r}: {error.strerror}.") from error
        except (OSError, ValueError):
            return []
        numbers = text.split("\n")
        if not all(NUMBER.fullmatch(number) for number in numbers):
            return []
        return [int(number) for number in numbers if (path.parent / number).is_dir()]

    def _activate(self, saved: SavedAdapter) -> SavedAdapter:
        others = [version for version in self._activated(saved.name) if version != saved.version]
        self._write_activated(saved.name, [saved.version, *others[: _MAX_ACTIVATED - 1]])
        return dataclasses.replace(saved, active=True)

    def _write_activated(self, name: str, versions: list[int]) -> None:
        path = self._folder(name) / _ACTIVE
        if versions:
            write_atomically(path, "\n".join(map(str, versions)))
        else:
            path.unlink()
            flush(path.parent)

    def _last_number(self, name: str) -> int:
        """Returns the highest number that a version of this name has had; 0 if none is known."""
        with suppress(OSError, ValueError):
            if NUMBER.fullmatch(number := read_text(self._last_number_file(name))):
                return int(number)
        return max(version_numbers(self._folder(name)), default=0)

    def _write_last_number(self, name: str, number: int) -> None:
        path = self._last_number_file(name)
        make_private(path.parent)
        write_atomically(path, str(number))

    def _last_number_file(self, name: str) -> Path:
        # Hashed, so that the names of removed adapters are not kept.
        return self.folder / _NUMBERS / blake2b(name.encode(), digest_size=16, key=self.salt()).hexdigest()

    def _check_free_space(self, size: int, parent: Path) -> None:
        with storage_errors("Cannot save to", parent):
            free = shutil.disk_usage(parent).free
        if size > free:
            needed, left = sizes_apart(size, free)
            raise StorageError(
                f"The adapter needs {needed}, but only {left} are free in {str(parent)!r}; free space or choose "
                "another location."
            )

    def _folder(self, name: str) -> Path:
        return self.folder / folder_of(name)

    def _parent(self, out: Path | None) -> Path:
        """Returns the folder that a new adapter is saved in."""
        return out.absolute().parent if out else self.folder

    def _existing_folder(self, name: str) -> Path:
        name = check_name(name)
        if name not in self.names():
            known = f"; {suggest(name, self.names())}" if self.names() else "; the store is empty."
            raise AdapterError(f"There is no adapter {name!r}{known}")
        return self._folder(name)


def _activation_errors(saved: SavedAdapter) -> AbstractContextManager[None]:
    what = f"Version {saved.version} of the adapter {saved.name!r} was saved but not activated: cannot write to"
    return storage_errors(what, saved.path.parent)


def _fingerprints(folders: list[Path]) -> set[str]:
    """Returns the fingerprints of the base models of versions whose records can be read."""
    found = set()
    for folder in folders:
        with suppress(AdapterError):
            found.add(AdapterRecord.read(folder).fingerprint)
    return found


def _is_adapter(folder: Path) -> bool:
    """Whether a folder is an adapter: it has versions, or this user may not read it."""
    try:
        return bool(version_numbers(folder))
    except OSError:
        return True
