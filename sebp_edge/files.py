"""Files are written whole or not at all, readable by their owner only; a disk that refuses is told in one sentence."""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs
from safetensors import SafetensorError

from sebp_edge.errors import StorageError

_FIRST_BYTES = 500


def cache_folder() -> Path:
    """Where what was measured on this machine is kept; it may be deleted at any time."""
    return platformdirs.user_cache_path("sebp-edge", appauthor=False)


def refuse_other_files(path: Path, mark: bytes, kind: str) -> None:
    """Finds out before any work is done whether a file can be written.

    Args:
        mark: what an earlier `kind` of ours, which may be overwritten, has within its first bytes.

    Raises:
        StorageError: it cannot, or something else is there.
    """
    path = path.expanduser()
    with storage_errors("Nothing can be written into", path):
        if not path.parent.is_dir():
            raise StorageError(f"There is no folder {str(path.parent)!r} to write into; make it, or choose another.")
        if path.exists() and not _has(mark, path):
            raise StorageError(
                f"{str(path)!r} exists already and is no {kind}; choose another file, so that nothing is overwritten."
            )
        with tempfile.TemporaryFile(dir=path.parent):
            pass


def _has(mark: bytes, path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return mark in file.read(_FIRST_BYTES)


def write_whole(path: Path, text: str) -> None:
    """Writes a text in UTF-8 in one stroke, in place of any file of that name."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        temporary.touch(mode=0o600)
        temporary.write_text(text, encoding="utf-8")
        flush(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    flush(path.parent)


def flush(path: Path) -> None:
    """Waits until a file or folder is on the disk. Windows has no such call for folders."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() or os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def storage_errors(what: str, path: Path, advice: str = "; make room or choose another place") -> Iterator[None]:
    """Turns what the system says about a file or folder into a StorageError: `what`, its path, why, and `advice`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors wraps the system's error in its own, with the number in its text only.
        number = re.search(r"(?:os error|Errno) (\d+)", str(error))
        reason = os.strerror(int(number[1])) if number else "the disk does not take it"
        raise StorageError(f"{what} {str(path)!r}: {reason}{advice}.") from error
