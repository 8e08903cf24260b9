"""One adapter of a store: its versions, which of them is active, and what they say of themselves.

    <store>/<folder>/active       the number of the active version; below it, those active before
    <store>/<folder>/<version>/   a version (see `sebp_edge.store.saved`)
    <store>/<folder>/where.json   the files and folders that each version was made from; it has paths, and stays here
    <store>/<folder>/forgotten-<number>.json    receipts of `forget`

A version is written into a temporary folder beside the adapters' folders, flushed to the disk, and renamed under the
store's lock. Reading takes no lock.
"""

import dataclasses
import os
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from sebp_edge.basics.files import expand_user, flush, make_private, storage_errors, write_atomically
from sebp_edge.errors import AdapterError, StorageError, suggest
from sebp_edge.store import archive, folders, model_paths, where
from sebp_edge.store.activation import read_activated, write_activated
from sebp_edge.store.difference import Difference, compare_versions
from sebp_edge.store.folders import Saveable
from sebp_edge.store.lock import locked
from sebp_edge.store.names import check_name, folder_of
from sebp_edge.store.record import AdapterRecord
from sebp_edge.store.salt import read_number, read_salt, write_number
from sebp_edge.store.saved import DOCUMENTS, SavedAdapter
from sebp_edge.store.stored_jobs import Job, Jobs
from sebp_edge.store.training_report import SAMPLES
from sebp_edge.store.version_documents import read_history, to_text
from sebp_edge.store.version_report import VersionReport
from sebp_edge.store.where import Where
from sebp_edge.values.remembered import KnownDocument, SplitHistory


class Adapter:
    """An adapter of a store, which need not exist yet: `AdapterStore.adapter` returns it.

    Attributes:
        name: its name, in Unicode's form NFC.
        folder: the folder of its versions.

    Raises:
        AdapterError: the name is not valid.
    """

    def __init__(self, store: Path, name: str):
        self.name = check_name(name)
        self.folder = store / folder_of(self.name)
        self._store = store

    def exists(self) -> bool:
        """Whether it has a version, or a folder that cannot be read.

        Raises:
            StorageError: the store's folder cannot be read.
        """
        with storage_errors("Cannot read the adapters in", self._store, ""):
            # Listed, since disks that ignore case find the folder of a similar name.
            return self._store.is_dir() and self.folder in self._store.iterdir() and folders.is_adapter(self.folder)

    def versions(self) -> list[int]:
        """Returns the numbers of all versions, oldest first.

        Raises:
            AdapterError: there is no such adapter.
            StorageError: its folder cannot be read.
        """
        self._require()
        with storage_errors("Cannot read the adapter in", self.folder, ""):
            return folders.version_numbers(self.folder)

    def version_folder(self, version: int) -> Path:
        """Returns the folder of a version; raises an AdapterError if there is none."""
        if version not in (versions := self.versions()):
            raise AdapterError(f"The adapter {self.name!r} has no version {version}; it has {versions}.")
        return self.folder / str(version)

    def active(self) -> int | None:
        """Returns the number of the active version, or None if no version is active.

        Raises:
            StorageError: this user may not read the file.
        """
        return next(iter(read_activated(self.folder)), None)

    def open(self, version: int | None = None) -> SavedAdapter:
        """Opens one version, by default the active one.

        Raises:
            AdapterError: there is no such adapter or version, no version is active, or its record is damaged.
            StorageError: its folder cannot be read.
        """
        self._require()
        now = self.active()
        chosen = now if version is None else version
        if chosen is None:
            raise AdapterError(f"No version of the adapter {self.name!r} is active; choose one of {self.versions()}.")
        try:
            path = self.version_folder(chosen)
            return SavedAdapter(path, AdapterRecord.read(path), self.name, chosen, chosen == now)
        except AdapterError:
            if version is None and self.active() != now:
                return self.open()  # another process has removed the version meanwhile
            raise

    def active_for(self, base_model: str | None) -> SavedAdapter | None:
        """Returns the version for a base model, or for any, that was made active last and can be read, if any."""
        for version in read_activated(self.folder):
            with suppress(AdapterError):
                saved = self.open(version)
                if base_model in (None, saved.record.base_model):
                    return saved
        return None

    # ------------------------------------------------------------------------------------------------------- questions

    @property
    def jobs(self) -> list[Job]:
        """Its trainings that run, are paused or were interrupted."""
        return Jobs(self._store).list(self.name)

    def documents(self, version: int) -> list[KnownDocument]:
        """Returns the documents of a version, without their texts; none if it was saved before they were recorded.

        Raises:
            AdapterError: there is no such version, or its list of documents is damaged.
        """
        listed = read_history(self.version_folder(version))
        return list(listed.own) if listed else []

    def document_list(self, version: int) -> SplitHistory | None:
        """Returns the list of documents of a version, with those of earlier ones; None if it has none."""
        return read_history(self.version_folder(version), read_salt(self._store))

    def diff(self, old: int | None = None, new: int | None = None) -> Difference:
        """Returns which documents came, went and changed from one version to another one.

        Args:
            old: a version; by default the one before `new`.
            new: a version; by default the newest one.

        Raises:
            AdapterError: there is no such version, it was saved before sebp-edge recorded documents, or one of the two
                came from another store.
        """
        versions = self.versions()
        new = max(versions) if new is None else new
        if old is None:
            before = [version for version in versions if version < new]
            if not before:
                raise AdapterError(
                    f"The adapter {self.name!r} has no version before version {new} to compare it with; it has "
                    f"{versions}."
                )
            old = before[-1]
        return compare_versions(self.open(old), self.open(new), read_salt(self._store))

    def report(self, version: int | None = None, *, with_samples: bool = False) -> VersionReport:
        """Returns how a version was made and tested: see `SavedAdapter.report`.

        Args:
            version: by default the active one.

        Raises:
            AdapterError: there is no such version, or a file of it is damaged.
        """
        return self.open(version).report(with_samples=with_samples)

    def export_archive(self, to: str | Path, version: int | None = None, *, with_names: bool = False) -> SavedAdapter:
        """Writes a version, by default the active one, with its record into a new file; returns the version.

        Args:
            with_names: whether the file has the names of the documents, and the version's samples, if it has kept any;
                neither names nor text otherwise.

        Raises:
            AdapterError: there is no such version, no version is active, or its list of documents is damaged.
            OptionError: the file already exists.
            StorageError: the file could not be written.
        """
        saved, replaced = self.open(version), {}
        if not with_names:
            replaced[SAMPLES] = None
            if (listed := self.document_list(saved.version)) is not None:
                replaced[DOCUMENTS] = to_text(listed.without_names()).encode()
        archive.write(saved.path, self.name, expand_user(to), replaced)
        return saved

    def wheres(self) -> dict[int, Where]:
        """Returns where on this machine the versions were made, by number, as far as it is known."""
        return where.read(self.folder)

    # --------------------------------------------------------------------------------------------------------- changes

    def save(
        self, adaptation: Saveable, record: AdapterRecord, *, activate: bool, where: Where | None = None
    ) -> SavedAdapter:
        """Saves a new version, and makes it the active one if `activate` is set.

        Args:
            where: where it was made, which is remembered beside the version.

        Raises:
            StorageError: nothing was saved, or the version was saved but not activated; the message says which.
        """
        with storage_errors("Cannot save to", self.folder):
            make_private(self._store)
            with folders.temporary_folder(self._store) as temporary:
                folders.write_version(adaptation, record, temporary)
                return self.add(temporary, record, activate=activate, where=where)

    def add(
        self, written: Path, record: AdapterRecord, *, activate: bool = False, where: Where | None = None
    ) -> SavedAdapter:
        """Makes a written folder the next version; see `save`."""
        with locked(self._store):
            folders.sweep(self._store)
            make_private(self.folder)
            version = 1 + max(folders.version_numbers(self.folder), default=0)
            version = max(version, 1 + self._last_number())
            while os.path.lexists(self.folder / str(version)):  # not a folder, so not a version
                version += 1
            # Written first, so that a number is lost rather than used twice.
            write_number(self._store, self.name, version)
            path = written.rename(self.folder / str(version))
            flush(self.folder)
            if where is not None:
                with suppress(OSError):  # the version is saved; `forget` asks for its texts then
                    self._remember_where(version, where)
            with suppress(StorageError):  # they are of no use any more; a later change tries it again
                Jobs(self._store).remove_older(self.name, version)
            saved = SavedAdapter(path, record, self.name, version)
            if not activate:
                return saved
            with self._activation_errors(version):
                return self._activate(saved)

    def activate(self, version: int) -> SavedAdapter:
        """Makes a version the active one.

        Raises:
            AdapterError: there is no such version, or its record is damaged.
            StorageError: the active version could not be changed.
        """
        saved = self.open(version)
        with self._activation_errors(version), locked(self._store):
            self.version_folder(version)  # not removed meanwhile
            return self._activate(saved)

    def activate_after(self, version: int, before: int | None) -> tuple[SavedAdapter, int | None]:
        """Makes a version the active one unless one is active that is not `before`; returns it, and what is active.

        Args:
            before: the version that it was compared with; None if none was active.
        """
        saved = self.open(version)
        with self._activation_errors(version), locked(self._store):
            self.version_folder(version)
            now = self.active()
            if now not in (None, before):
                return saved, now
            return self._activate(saved), version

    def rollback(self) -> SavedAdapter:
        """Makes the version active again that was active before the active one; returns it.

        Raises:
            AdapterError: no other version was active before, or it is damaged.
            StorageError: the active version could not be changed.
        """
        self._require()
        with storage_errors("Cannot change the active version in", self.folder), locked(self._store):
            now, *earlier = read_activated(self.folder) or [None]
            if not earlier:
                before = "" if now is None else f" before version {now}"
                raise AdapterError(
                    f"No version of the adapter {self.name!r} was active{before}; activate one of {self.versions()}."
                )
            path = self.folder / str(earlier[0])
            saved = SavedAdapter(path, AdapterRecord.read(path), self.name, earlier[0], active=True)
            write_activated(self.folder, earlier)
        return saved

    def rename(self, new_name: str) -> "Adapter":
        """Gives it another name, and returns it under that; its versions keep their numbers.

        Raises:
            AdapterError: there is no such adapter, the new name is not valid, or another adapter has it.
            StorageError: it could not be renamed.
        """
        renamed = Adapter(self._store, new_name)
        self._require()
        with storage_errors("Cannot rename", self.folder), locked(self._store):
            self._require()
            if renamed.exists():
                raise AdapterError(
                    f"There already is an adapter {renamed.name!r}; choose another name, or remove that adapter first."
                )
            if os.path.lexists(renamed.folder):  # a killed process left it
                folders.delete(folders.put_aside(renamed.folder))
            number = max(self._last_number(), renamed._last_number())
            write_number(self._store, renamed.name, number)
            self.folder.rename(renamed.folder)
            flush(self._store)
            Jobs(self._store).rename(self.name, renamed.name)
        return renamed

    def remove(self, version: int | None = None) -> int | None:
        """Deletes one version, or the whole adapter if `version` is None; returns the active version after that.

        If the version was active, the one that was active before it becomes active; none does if there is none. The
        numbers of removed versions are not used again.

        Raises:
            AdapterError: there is no such adapter or version.
            StorageError: nothing was deleted, or some files remain; the message says which.
        """
        self._require()
        path = self.folder if version is None else self.folder / str(version)
        with storage_errors("Cannot delete", path, ""), locked(self._store):
            self.delete_versions(self.versions() if version is None else [version])
            folders.sweep(self._store)
        return self.active()

    def erase(self, versions: list[int], lists: Mapping[int, str], keys: Mapping[bytes, set[int]]) -> None:
        """Deletes versions, not all of them, and jobs that know documents; writes the lists of other versions anew.

        Args:
            keys: the hashes of the documents, by salt.
        """
        with storage_errors("Cannot delete all versions in", self.folder, "; run this again"), locked(self._store):
            Jobs(self._store).remove_knowing(self.name, keys)
            if versions:
                self.delete_versions(versions)
            for version, text in lists.items():
                write_atomically(self.folder / str(version) / DOCUMENTS, text)
            folders.sweep(self._store)

    def remember_where(self, version: int, where: Where) -> None:
        """Remembers where a version was made, in place of what is known of that; a disk that refuses it is no error."""
        with suppress(OSError), locked(self._store):
            self._remember_where(version, where)

    # ------------------------------------------------------------------------------------- for the holder of the lock

    def delete_versions(self, versions: list[int]) -> None:
        """Deletes versions; the whole adapter if no version remains."""
        paths = [self.version_folder(version) for version in versions]
        fingerprints = model_paths.fingerprints_of(paths)
        remaining = set(self.versions()) - set(versions)
        Jobs(self._store).remove_begun_at(self.name, versions if remaining else None)
        activated = read_activated(self.folder)
        if not remaining:
            paths = [self.folder]
        else:
            where.forget(self.folder, versions)
        if remaining and activated and activated[0] in versions:
            # Changed first, so that no process finds a version active that is not there.
            write_activated(self.folder, [version for version in activated if version in remaining])
        for renamed in [folders.put_aside(path) for path in paths]:
            with storage_errors("The adapter was removed, but some of its files remain in", renamed, "; delete them"):
                shutil.rmtree(renamed)
        model_paths.forget_unused(self._store, fingerprints)

    def _remember_where(self, version: int, one: Where) -> None:
        versions = folders.version_numbers(self.folder)
        known = {number: each for number, each in where.read(self.folder).items() if number in versions}
        where.write(self.folder, known | {version: one})

    def _activate(self, saved: SavedAdapter) -> SavedAdapter:
        others = [version for version in read_activated(self.folder) if version != saved.version]
        write_activated(self.folder, [saved.version, *others])
        return dataclasses.replace(saved, active=True)

    def _last_number(self) -> int:
        return read_number(self._store, self.name) or max(folders.version_numbers(self.folder), default=0)

    def _activation_errors(self, version: int) -> AbstractContextManager:
        what = f"Version {version} of the adapter {self.name!r} was saved but not activated: cannot write to"
        return storage_errors(what, self.folder)

    def _require(self) -> None:
        """Raises an AdapterError if there is no such adapter."""
        if not self.exists():
            names = folders.adapter_names(self._store)
            known = f"; {suggest(self.name, names)}" if names else "; the store is empty."
            raise AdapterError(f"There is no adapter {self.name!r}{known}")
