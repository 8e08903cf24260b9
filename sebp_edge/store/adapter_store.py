"""The adapters in one folder: named, versioned, written atomically, readable by their owner only.

    <data folder>/adapters/<folder>/            an adapter (see `sebp_edge.store.adapter`)
    <data folder>/adapters/.lock                the lock for all changes
    <data folder>/adapters/.numbers/<hash>      the highest version number that an adapter's name has had
    <data folder>/adapters/.salt                the salt of the hashes of names
    <data folder>/adapters/.models              where the base models are that were given as a folder or a file
    <data folder>/adapters/.jobs/               trainings that can be resumed (see `sebp_edge.store.stored_jobs`)

`sebp_edge.store.names` says which folder has which adapter.
"""

import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import platformdirs

from sebp_edge.basics.files import check_free_space, expand_user, make_private, storage_errors
from sebp_edge.errors import AdapterError, OptionError, SebpEdgeError
from sebp_edge.store import archive, model_paths
from sebp_edge.store.adapter import Adapter
from sebp_edge.store.folders import adapter_names, delete, flush_all, leftovers, size_of, temporary_folder
from sebp_edge.store.garbage import KEPT_VERSIONS, Garbage, old_versions
from sebp_edge.store.lock import locked
from sebp_edge.store.new_folder import check_new, check_space
from sebp_edge.store.record import AdapterRecord
from sebp_edge.store.salt import read_salt
from sebp_edge.store.saved import SavedAdapter
from sebp_edge.store.stored_jobs import Jobs

# Room for all files except the weights, in bytes; most of it is for documents.json, of 2,000 long documents.
_MAX_OTHER_BYTES = 2**21
_CANNOT = "Cannot save to"


class AdapterStore:
    """The adapters in one folder, by default this program's folder in the user's data folder."""

    def __init__(self, folder: str | Path | None = None):
        self.folder = Path(folder or platformdirs.user_data_path("sebp-edge", appauthor=False)) / "adapters"

    @property
    def jobs(self) -> Jobs:
        """The trainings that run, are paused or were interrupted."""
        return Jobs(self.folder)

    def names(self) -> list[str]:
        """Returns the sorted names of all adapters, including those whose folders cannot be read.

        Raises:
            StorageError: the store's folder cannot be read.
        """
        return adapter_names(self.folder)

    def adapter(self, name: str) -> Adapter:
        """Returns the adapter of a name, which need not exist yet.

        Raises:
            AdapterError: the name is not valid.
        """
        return Adapter(self.folder, name)

    def find(self, adapter: str | Path, version: int | None = None) -> SavedAdapter:
        """Opens an adapter of this store or outside of it.

        Args:
            adapter: its name in this store, or its folder: a Path, or a string with a slash or backslash.
            version: a version of the named adapter; None for the active one.

        Raises:
            AdapterError: there is no such adapter.
        """
        if isinstance(adapter, str) and not re.search(r"[/\\]", adapter):
            return self.adapter(adapter).open(version)
        try:
            folder = Path(adapter).expanduser()
            exists = folder.is_dir()
        except (OSError, RuntimeError):
            exists = False
        if not exists:
            raise AdapterError(f"There is no adapter folder {str(adapter)!r}; check the path.")
        return SavedAdapter(folder, AdapterRecord.read(folder))

    def check_writable(self, name: str, out: Path | None) -> None:
        """Checks before any work is done that an adapter can be saved into the store, or a new folder outside of it."""
        own = self.adapter(name).folder
        if out is not None:
            check_new(out, _CANNOT)
            return
        with storage_errors(_CANNOT, self.folder):
            make_private(self.folder)
        parent = own if own.exists() else self.folder
        with storage_errors(_CANNOT, parent):
            shutil.rmtree(tempfile.mkdtemp(prefix=".check-", dir=parent))

    def check_disk_space(self, size: int, out: Path | None) -> None:
        """Checks before any work is done that an adapter fits on the disk, with weights of `size` bytes."""
        check_space("The adapter", size + _MAX_OTHER_BYTES, out or self.folder / "new", _CANNOT)

    def import_archive(self, file: str | Path, name: str | None = None) -> SavedAdapter:
        """Adds the version in a file of `Adapter.export_archive` as a new version, which is not active; returns it.

        Args:
            name: the adapter's name; by default the one in the file.

        Raises:
            AdapterError: the file is damaged or no such file, its weights have NaN, infinity or another rank than it
                says, or a name is not valid.
            StorageError: it could not be saved.
        """
        file = expand_user(file)
        with archive.reading(file) as (contents, opened):
            adapter = self.adapter(contents.name if name is None else name)
            with storage_errors(_CANNOT, adapter.folder):
                make_private(self.folder)
                check_free_space("The adapter", contents.size, self.folder)
                with temporary_folder(self.folder) as temporary:
                    contents.unpack(opened, temporary)
                    record = archive.read_record(temporary, file)
                    archive.refuse_strange_weights(temporary, file)
                    flush_all(temporary)
                    return adapter.add(temporary, record)

    def garbage(self, keep: int = KEPT_VERSIONS) -> Garbage:
        """Returns what `gc` would delete: see `sebp_edge.store.garbage`.

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
        with storage_errors("Cannot read the adapters in", self.folder, ""), locked(self.folder):
            return self._garbage(keep)

    def gc(self, garbage: Garbage) -> Garbage:
        """Deletes what `garbage()` returned, apart from what has been activated or deleted since; returns what it was.

        Raises:
            StorageError: not all of it could be deleted.
        """
        if not self.folder.is_dir():
            return Garbage(garbage.keep)
        with storage_errors("Cannot delete in", self.folder, ""), locked(self.folder):
            found = self._garbage(garbage.keep).only(garbage)
            for name in sorted({one.name for one in found.versions}):
                self.adapter(name).delete_versions([one.version for one in found.versions if one.name == name])
            for path in found.leftovers:
                delete(path)
        return found

    def salt(self) -> bytes:
        """Returns the salt of this store, which is made at the first call."""
        return read_salt(self.folder)

    def model_path(self, record: AdapterRecord) -> Path | None:
        """Returns where an adapter's base model was last; None if it was not given as a folder or a file."""
        return model_paths.path_of(self.folder, record.fingerprint)

    def remember_model(self, fingerprint: str, path: Path) -> None:
        """Remembers where a base model is, for its adapters; no record or archive contains the path."""
        path = path.expanduser().absolute()
        if model_paths.path_of(self.folder, fingerprint) == path:
            return
        with storage_errors("Cannot write to", self.folder):
            make_private(self.folder)
            with locked(self.folder):
                model_paths.remember(self.folder, fingerprint, path)

    def _garbage(self, keep: int) -> Garbage:
        versions = []
        for name in self.names():
            with suppress(SebpEdgeError, OSError):  # one that cannot be read is kept
                versions += old_versions(self.adapter(name), keep)
        sizes = {}
        for path in leftovers(self.folder):
            with suppress(OSError):  # what cannot be listed cannot be deleted either
                sizes[path] = size_of(path)
        return Garbage(keep, tuple(versions), sizes)
