"""Reads small files, writes files atomically and readable by their owner only, and reports disk errors."""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import types
import typing
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import platformdirs
from safetensors import SafetensorError

from sebp_edge.basics.units import sizes_apart
from sebp_edge.errors import OptionError, SebpEdgeError, StorageError

_FIRST_BYTES = 500
# Size limit of a small file, in bytes.
_MAX_BYTES = 2**24
_MAX_FLOAT = 1e30
_CHECKSUM = "crc32"

Kind = TypeVar("Kind")


class NewerFormat(ValueError):
    """A file has the format of a newer sebp-edge, which is the error's argument."""


def cache_folder() -> Path:
    """Returns the folder of measurements made on this machine; it may be deleted at any time."""
    return platformdirs.user_cache_path("sebp-edge", appauthor=False)


def write_cache(name: str, text: str) -> None:
    """Writes a file in the cache folder, by its path there, whole or not at all; does not wait for the disk.

    Whoever reads it ignores what a power cut has left of it.

    Raises:
        OSError: it could not be written.
    """
    path = cache_folder() / name
    for folder in dict.fromkeys((cache_folder(), path.parent)):
        make_private(folder, flushes=False)
    write_atomically(path, text, flushes=False)


def read_kept(kind: str, key: dict) -> object:
    """Returns the value that `keep` has kept under a key; None if there is none, or its file is damaged."""
    try:
        values = read_checked_json(cache_folder() / _name_of_kept(kind, key))
    except (OSError, ValueError):
        return None
    value = values.pop(kind, None)
    return value if values == key else None


def keep(kind: str, key: dict, value: object) -> None:
    """Keeps a value in the cache folder under a key, all that it depends on; a disk that refuses it costs only time."""
    with suppress(OSError):
        write_cache(_name_of_kept(kind, key), _checked(key | {kind: value}))


def _name_of_kept(kind: str, key: dict) -> str:
    return f"{kind}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]}.json"


def downloads_folder() -> Path:
    """Returns the folder that browsers save into."""
    return platformdirs.user_downloads_path()


def expand_user(path: str | Path) -> Path:
    """Expands "~" in a path to write to."""
    try:
        path = Path(path).expanduser()
    except RuntimeError as error:
        raise OptionError(f"The path {str(path)!r} names an unknown user; give the full path.") from error
    if "\0" in str(path):
        raise OptionError(f"{str(path)!r} is not a path: it contains a null byte.")
    return path


def check_is_utf8(path: Path, kind: type[SebpEdgeError]) -> None:
    """Checks that libraries which read weights can open a path; raises an error of this kind."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        message = (
            f"The path {str(path)!r} is not in UTF-8, so libraries cannot open it; rename it or choose another one."
        )
        raise kind(message) from error


def check_output_file(path: Path, mark: bytes, kind: str) -> None:
    """Checks before any work is done that a file can be written.

    Args:
        mark: bytes near the beginning of files of this `kind`, which may be overwritten.
    """
    path = expand_user(path)
    with storage_errors("Cannot write to", path):
        if not path.parent.is_dir():
            raise StorageError(f"The folder {str(path.parent)!r} does not exist; create it or choose another one.")
        if path.exists() and not _has_mark(mark, path):
            raise OptionError(
                f"{str(path)!r} already exists and is not an earlier {kind}; choose another file, so that nothing is "
                "overwritten."
            )
        with tempfile.TemporaryFile(dir=path.parent):
            pass


def _has_mark(mark: bytes, path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return mark in file.read(_FIRST_BYTES)


def read_text(path: Path, max_bytes: int = _MAX_BYTES) -> str:
    """Reads a text file of at most `max_bytes`, which others may have written; raises an OSError or ValueError."""
    # O_NONBLOCK: opening a FIFO must not wait for a writer.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is not a regular file")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError("it is too large")
    return content.decode()


def read_json(path: Path, max_bytes: int = _MAX_BYTES) -> dict:
    """Reads the object in a JSON file of at most `max_bytes`; raises an OSError or ValueError."""
    return _object(read_text(path, max_bytes))


def _object(text: str) -> dict:
    try:
        values = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError("it is not a JSON object")
    return values


def read_checked_json(path: Path, max_bytes: int = _MAX_BYTES) -> dict:
    """Reads what `write_checked_json` has written; raises an OSError, or a ValueError if a bit of it has changed."""
    text = read_text(path, max_bytes)
    values = _object(text)
    values.pop(_CHECKSUM, None)
    if text != _checked(values):
        raise ValueError("its checksum is wrong")
    return values


def write_checked_json(path: Path, values: dict) -> None:
    """Writes a JSON file atomically, with a checksum."""
    write_atomically(path, _checked(json.loads(json.dumps(values, default=str))))


def _checked(values: dict) -> str:
    return json.dumps(values | {_CHECKSUM: zlib.crc32(json.dumps(values).encode())}) + "\n"


def parse_dataclass(values: dict, kind: type[Kind]) -> Kind:
    """Returns values of JSON as a dataclass; ignores other values, and leaves missing ones at their defaults.

    Its fields may be `str`, `bool`, `int` (a count), `float` (finite), `dict` (any object), `dict[str, KIND]`,
    `tuple[KIND, ...]`, other dataclasses, or one of these `| None`.

    Raises:
        NewerFormat: `values["format"]` is a higher number than the default of the field `format`.
        ValueError: a value is missing or has another type.
    """
    newest = getattr(kind, "format", None)
    if newest is not None and type(found := values.get("format")) is int and found > newest:
        raise NewerFormat(found)
    return _parse(values, kind)


def _parse(value, kind):
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None and types.NoneType in arguments else _parse(value, arguments[0])
    if origin is tuple and isinstance(value, list):
        return tuple(_parse(each, arguments[0]) for each in value)
    if origin is dict and isinstance(value, dict):
        return {key: _parse(each, arguments[1]) for key, each in value.items()}
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        fields = dataclasses.fields(kind)
        if lacking := [each.name for each in fields if each.default is dataclasses.MISSING and each.name not in value]:
            raise ValueError(f"it lacks {lacking[0]!r}")
        return kind(**{each.name: _parse(value[each.name], each.type) for each in fields if each.name in value})
    if kind is float and type(value) in (int, float) and abs(value) < _MAX_FLOAT:
        return float(value)
    if kind is int and type(value) is int and 0 <= value < 2**63:
        return value
    if kind in (bool, str, dict) and type(value) is kind:
        return value
    raise ValueError(f"{type(value).__name__} is not {kind}")


def write_atomically(path: Path, text: str, *, replace: bool = True, flushes: bool = True) -> None:
    """Writes a text file in UTF-8 atomically.

    Args:
        replace: whether to replace a file of that name; if not, it stays, even if another process has just written it.
        flushes: whether to wait until it is on the disk.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    temporary = Path(name)
    try:
        os.close(descriptor)
        temporary.write_text(text, encoding="utf-8")
        if flushes:
            flush(temporary)
        if replace or not link(temporary, path):
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if flushes:
        flush(path.parent)


def link(temporary: Path, path: Path) -> bool:
    """Gives a file a second name unless that exists; returns False if the disk has no such links."""
    try:
        os.link(temporary, path)
    except OSError:
        return path.exists()
    return True


def walk(folder: Path) -> Iterator[Path]:
    """Yields all files and folders below a folder; does not follow links to folders.

    Raises:
        OSError: a folder cannot be listed. `Path.rglob` would leave out what is in it.
    """
    for name, folders, files in os.walk(folder, onerror=_raise):
        yield from (Path(name, each) for each in (*folders, *files))


def _raise(error: OSError) -> None:
    raise error


def make_private(folder: Path, *, flushes: bool = True) -> None:
    """Makes a folder that only its owner can open, with its parents, and flushes what is new, unless told not to.

    Parents that exist stay as they are; the folder itself is made private if it is not.
    """
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(new):
        each.mkdir(exist_ok=True, mode=0o700)
        if flushes:
            flush(each.parent)
    with suppress(OSError):
        if os.name != "nt" and folder.stat().st_mode & 0o077:
            folder.chmod(0o700)


def check_free_space(what: str, size: int, folder: Path) -> None:
    """Raises a StorageError if a folder's disk has less than the `size` in bytes that `what` needs."""
    free = shutil.disk_usage(folder).free
    if size > free:
        needed, left = sizes_apart(size, free)
        raise StorageError(
            f"{what} needs {needed}, but only {left} are free in {str(folder)!r}; free space or choose another "
            "location."
        )


def flush(path: Path) -> None:
    """Waits until a file or folder is on the disk. Does nothing for folders on Windows, which has no such call."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() or os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def storage_errors(what: str, path: Path, advice: str = "; free space or choose another location") -> Iterator[None]:
    """Turns the system's errors into a StorageError with the message "`what` `path`: reason`advice`."."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors raises its own error, which has the system's error number only in its text.
        number = re.search(r"(?:os error|Errno) (\d+)", str(error))
        reason = os.strerror(int(number[1])) if number else "the disk refuses it"
        raise StorageError(f"{what} {str(path)!r}: {reason}{advice}.") from error
