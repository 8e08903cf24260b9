"""Makes a new folder outside the store, written whole or not at all: an export, or an adapter."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import lock_descriptor

from sebp_edge.basics.files import check_free_space, check_is_utf8, expand_user, flush, storage_errors
from sebp_edge.errors import OptionError, StorageError
from sebp_edge.store.folders import flush_all

# Temporary folders are beside the target. A lock file beside each is locked for as long as its process runs.
_TEMPORARY, _LOCK = ".making-", ".lock"


def check_new(to: str | Path, cannot: str) -> Path:
    """Returns the folder to make, with those around it, after checking before any work is done that it can be made.

    Args:
        cannot: the beginning of an error's message, such as "Cannot export to".
    """
    if not str(to):
        raise OptionError("The new folder has no name; give one.")
    target = expand_user(to).absolute()
    around = next(folder for folder in target.parents if os.path.lexists(folder))
    if not around.is_dir():
        raise StorageError(f"{str(around)!r} is not a folder, so nothing can be written into it; choose another one.")
    with storage_errors(cannot, target, "; choose another location"), _folders_around(target) as made:
        with suppress(FileNotFoundError):  # all other errors show that no folder can have this name
            target.lstat()
            raise OptionError(f"{str(target)!r} already exists; choose a new folder, so that nothing is overwritten.")
        with _temporary_folder(target.parent):
            pass
        _delete_empty(made)
    return target


@contextmanager
def _folders_around(target: Path) -> Iterator[list[Path]]:
    """Context with the folders around a target, which are made; on an error, deletes those again that it has made."""
    made = [folder for folder in target.parents if not os.path.lexists(folder)]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield made
    except BaseException:
        _delete_empty(made)
        raise


def _delete_empty(folders: list[Path]) -> None:
    """Deletes folders, the innermost first, unless there is something in them by now."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def check_space(what: str, size: int, target: Path, cannot: str) -> None:
    """Checks that the `size` in bytes of `what` fits on the disk, and can be read there."""
    check_is_utf8(target, StorageError)
    with storage_errors(cannot, target):
        check_free_space(what, size, next(folder for folder in target.parents if folder.exists()))


@contextmanager
def new_folder(target: Path, cannot: str) -> Iterator[Path]:
    """Yields a temporary folder beside `target`, which becomes `target` at the end; deletes it on any error.

    Makes the folders around it too. First deletes the temporary folders of processes that were killed.
    """
    with storage_errors(cannot, target), _folders_around(target) as made:
        _delete_leftovers(target.parent)
        with _temporary_folder(target.parent) as temporary:
            yield temporary
            flush_all(temporary)
            if os.path.lexists(target):
                raise StorageError(f"{str(target)!r} already exists; nothing was overwritten.")
            temporary.rename(target)
            for folder in (target, *made):
                flush(folder.parent)


@contextmanager
def _temporary_folder(parent: Path) -> Iterator[Path]:
    """Yields a new folder, whose lock file is locked meanwhile; deletes it unless it was renamed."""
    while True:
        descriptor, name = tempfile.mkstemp(prefix=_TEMPORARY, suffix=_LOCK, dir=parent)
        temporary = Path(name.removesuffix(_LOCK))
        try:
            is_locked = True
            # On a disk without locks no leftover can be told from a folder in use, so none is deleted.
            with suppress(OSError):
                is_locked = lock_descriptor(descriptor, blocking=False)
            # Another process may have locked and deleted the file first.
            if is_locked and os.path.lexists(name):
                temporary.mkdir(0o700)
                try:
                    yield temporary
                    return
                finally:
                    shutil.rmtree(temporary, ignore_errors=True)
        finally:
            os.close(descriptor)
            Path(name).unlink(missing_ok=True)


def _delete_leftovers(parent: Path) -> None:
    """Deletes the temporary folders whose processes have ended, if possible."""
    for lock in parent.glob(f"{_TEMPORARY}*{_LOCK}"):
        with suppress(OSError):
            descriptor = os.open(lock, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
            try:
                if is_left := lock_descriptor(descriptor, blocking=False):
                    shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
            finally:
                os.close(descriptor)
            if is_left:
                lock.unlink(missing_ok=True)
