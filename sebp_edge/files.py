"""Files are written whole or not at all, readable by their owner only; a disk that refuses is told in one sentence."""

import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs
from safetensors import SafetensorError

from sebp_edge.errors import StorageError

_FIRST_BYTES = 500
# What is read as a small file, in bytes.
_MOST = 2**24


def cache_folder() -> Path:
    """Where what was measured on this machine is kept; it may be deleted at any time."""
    return platformdirs.user_cache_path("sebp-edge", appauthor=False)


def expanded(path: str | Path) -> Path:
    """A path to write to, with the home folder in place of "~".

    Raises:
        StorageError: there is no such user, or it is no path.
    """
    try:
        path = Path(path).expanduser()
    except RuntimeError as error:
        raise StorageError(
            f"{str(path)!r} names a user whom this machine does not know; write the whole path."
        ) from error
    if "\0" in str(path):
        raise StorageError(f"{str(path)!r} is no path: it holds a null byte.")
    return path


def refuse_other_files(path: Path, mark: bytes, kind: str) -> None:
    """Finds out before any work is done whether a file can be written.

    Args:
        mark: what an earlier `kind` of ours, which may be overwritten, has within its first bytes.

    Raises:
        StorageError: it cannot, or something else is there.
    """
    path = expanded(path)
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


def read_text(path: Path) -> str:
    """The text of a small file, which others may have written.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no file, too large, or not in UTF-8.
    """
    # A FIFO is opened without waiting for who writes.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is no file")
        content = file.read(_MOST + 1)
    if len(content) > _MOST:
        raise ValueError("it is too large")
    return content.decode()


def read_json(path: Path) -> dict:
    """The object in a small JSON file, which others may have written.

    Raises:
        OSError: it cannot be read.
        ValueError: as `read_text`, or it is no JSON object.
    """
    try:
        values = json.loads(read_text(path))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError("it is no object")
    return values


def write_whole(path: Path, text: str) -> None:
    """Writes a text in UTF-8 in one stroke, in place of any file of that name."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    temporary = Path(name)
    try:
        os.close(descriptor)
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
