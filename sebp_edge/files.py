"""Files are written whole or not at all, readable by their owner only; a disk that refuses is told in one sentence."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs
from safetensors import SafetensorError

from sebp_edge.errors import StorageError


def cache_folder() -> Path:
    """Where what was measured on this machine is kept; it may be deleted at any time."""
    return platformdirs.user_cache_path("sebp-edge", appauthor=False)


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
