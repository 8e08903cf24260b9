"""One version of an adapter in one file, to move it to another machine: a plain tar file, without compression.

Its first member, `archive.json`, lists all others with their sizes and SHA-256 sums; these follow in that order. Any
program for tar files opens it. When it is read, only regular files at safe relative paths count, blocks are read one by
one, and nothing is believed that the list does not say: no links, no devices, no other names, no growth.
"""

import hashlib
import io
import json
import os
import re
import stat
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from sebp_edge.basics.files import flush, parse_dataclass, storage_errors, walk
from sebp_edge.errors import AdapterError, OptionError
from sebp_edge.store.record import AdapterRecord

_LIST = "archive.json"
_FORMAT = 1
_MAX_LIST_BYTES = 2**20
_MAX_FILES = 1000
_CHUNK = 2**20
# The name of a member: up to four parts, none hidden, none that ends in a dot or is a Windows device with an ending.
_PART = r"(?!(?i:con|prn|aux|nul|com\d|lpt\d)(?:\.|/|$))[A-Za-z0-9_][A-Za-z0-9._-]*(?<!\.)"
_PATH = re.compile(rf"(?=.{{1,100}}$){_PART}(?:/{_PART}){{0,3}}")
_SUM = re.compile("[0-9a-f]{64}")


def write(folder: Path, name: str, to: Path, replaced: Mapping[str, bytes | None]) -> None:
    """Writes a version's folder into a new file, which only its owner can read.

    Args:
        replaced: contents that are written in place of those of some files, by their names; None leaves a file out.
    """
    with storage_errors("Cannot read the version in", folder, "; nothing was written"):
        files = _files_of(folder, replaced)
    with storage_errors("Cannot write to", to):
        if os.path.lexists(to):
            raise _taken(to)
        descriptor, temporary = tempfile.mkstemp(prefix=".sebp-edge-", dir=to.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                _write(files, name, file, replaced)
            flush(Path(temporary))
            _name(temporary, to)
            flush(to.parent)
        finally:
            Path(temporary).unlink(missing_ok=True)


def _name(temporary: str, to: Path) -> None:
    """Gives a written file its name, which no other file has."""
    try:
        os.link(temporary, to)
    except FileExistsError as error:
        raise _taken(to) from error
    except OSError:  # a disk without links, such as FAT
        if os.path.lexists(to):
            raise _taken(to) from None
        Path(temporary).rename(to)


def _taken(to: Path) -> OptionError:
    return OptionError(f"{str(to)!r} already exists; choose a new file, so that nothing is overwritten.")


def _files_of(folder: Path, replaced: Mapping[str, bytes | None]) -> dict[str, Path]:
    """Returns the files to write, by their names in the archive."""
    paths = sorted(path for path in walk(folder) if path.is_symlink() or not path.is_dir())
    files = {path.relative_to(folder).as_posix(): path for path in paths}
    files = {name: path for name, path in files.items() if replaced.get(name, b"") is not None}
    are_regular = all(stat.S_ISREG(path.lstat().st_mode) for path in files.values())
    if len(files) > _MAX_FILES or not are_regular or not all(map(_PATH.fullmatch, files)):
        raise AdapterError(f"{str(folder)!r} has files that sebp-edge did not write; move them elsewhere.")
    return files


def _write(files: Mapping[str, Path], name: str, archive: BinaryIO, replaced: Mapping[str, bytes | None]) -> None:
    listed = []
    for path, source in files.items():
        with _opened(path, source, replaced) as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
            listed.append(_File(path, content.seek(0, os.SEEK_END), digest))
    contents = json.dumps({"format": _FORMAT, "name": name, "files": [*map(asdict, listed)]}, indent=1).encode()
    _write_member(_LIST, len(contents), io.BytesIO(contents), archive)
    for file in listed:
        with _opened(file.path, files[file.path], replaced) as content:
            _write_member(file.path, file.size, content, archive)
    archive.write(bytes(2 * tarfile.BLOCKSIZE))


def _opened(path: str, source: Path, replaced: Mapping[str, bytes | None]) -> BinaryIO:
    return io.BytesIO(replaced[path]) if path in replaced else source.open("rb")


def _write_member(path: str, size: int, content: BinaryIO, archive: BinaryIO) -> None:
    header = tarfile.TarInfo(path)
    header.size, header.mode = size, 0o600
    archive.write(header.tobuf(tarfile.GNU_FORMAT))
    for chunk in iter(lambda: content.read(_CHUNK), b""):
        archive.write(chunk)
    archive.write(bytes(-size % tarfile.BLOCKSIZE))


# ------------------------------------------------------------------------------------------------------------ reading


class _Damaged(Exception):
    """The archive is not as it must be; the message is the reason."""


@dataclass(frozen=True)
class _File:
    path: str
    size: int
    sha256: str

    @property
    def is_valid(self) -> bool:
        return self.size < 2**53 and bool(_PATH.fullmatch(self.path)) and bool(_SUM.fullmatch(self.sha256))


@dataclass(frozen=True)
class Contents:
    """What an archive says of itself: the adapter's name, and its files in their order."""

    name: str
    files: tuple[_File, ...]
    format: int = _FORMAT

    @property
    def size(self) -> int:
        """The size of all files, in bytes."""
        return sum(file.size for file in self.files)

    def unpack(self, archive: BinaryIO, folder: Path) -> None:
        """Writes all files into an empty folder; may be called once."""
        for listed in self.files:
            if _read_header(archive) != (listed.path, listed.size):
                raise _Damaged(f"the file {listed.path!r} is missing")
            target = folder / listed.path
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            found = hashlib.sha256()
            with target.open("xb") as file:
                for chunk in _chunks(archive, listed.size):
                    found.update(chunk)
                    file.write(chunk)
            if found.hexdigest() != listed.sha256:
                raise _Damaged(f"the file {listed.path!r} has changed")


def read_record(folder: Path, path: Path) -> AdapterRecord:
    """Reads the record in the unpacked folder of the archive `path`, which errors name."""
    try:
        return AdapterRecord.read(folder)
    except AdapterError as error:
        raise AdapterError(str(error).replace(str(folder), str(path))) from error


def refuse_strange_weights(folder: Path, path: Path) -> None:
    """Refuses weights in the unpacked folder of the archive `path`: see `refuse_strangers`."""
    from sebp_edge.basics.weights import refuse_strangers  # which has torch

    try:
        refuse_strangers(folder)
    except AdapterError as error:
        why = "its weights have NaN or infinity, or another rank than its adapter_config.json says"
        raise AdapterError(f"{str(path)!r} is not imported: {why}.") from error


@contextmanager
def reading(path: Path) -> Iterator[tuple[Contents, BinaryIO]]:
    """Context with the contents of an archive, and the opened archive to unpack; damage is an AdapterError."""
    try:
        # O_NONBLOCK: opening a FIFO must not wait for a writer.
        archive = open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))  # noqa: SIM115
    except OSError as error:
        raise AdapterError(f"Cannot read {str(path)!r}: {error.strerror}; check the path.") from error
    with archive:
        try:
            if not stat.S_ISREG(os.fstat(archive.fileno()).st_mode):
                raise _Damaged("it is not a regular file")
            yield _read_list(archive), archive
        except _Damaged as reason:
            raise AdapterError(
                f"{str(path)!r} is not a whole archive of an adapter: {reason}; export the adapter again."
            ) from reason


def _read_list(archive: BinaryIO) -> Contents:
    path, size = _read_header(archive)
    if path != _LIST or size > _MAX_LIST_BYTES:
        raise _Damaged(f"it does not begin with {_LIST}")
    text = b"".join(_chunks(archive, size))
    try:
        values = json.loads(text.decode())
        if values["format"] != _FORMAT:
            raise _Damaged(f"its format is {str(values['format'])[:20]!r}, and this sebp-edge reads {_FORMAT}")
        contents = parse_dataclass(values, Contents)
        if len(contents.files) > _MAX_FILES or not all(file.is_valid for file in contents.files):
            raise ValueError
    except (ValueError, LookupError, TypeError, RecursionError):
        raise _Damaged(f"its {_LIST} is damaged") from None
    paths = [file.path.lower() for file in contents.files]
    folders = {"/".join(path.split("/")[:depth]) for path in paths for depth in range(1, path.count("/") + 1)}
    if len(set(paths)) < len(paths) or folders & set(paths):
        raise _Damaged("it has two files of one name")
    return contents


def _read_header(archive: BinaryIO) -> tuple[str, int]:
    """Returns the path and size of the next member, which must be a regular file."""
    block = archive.read(tarfile.BLOCKSIZE)
    try:
        header = tarfile.TarInfo.frombuf(block, "ascii", "strict")
    except (tarfile.HeaderError, ValueError):
        raise _Damaged("it is cut short or no archive") from None
    if header.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or header.size < 0:
        raise _Damaged("it contains something other than files")
    return header.name, header.size


def _chunks(archive: BinaryIO, size: int) -> Iterator[bytes]:
    """Yields the content of the member whose header was read."""
    left = size
    while left:
        chunk = archive.read(min(left, _CHUNK))
        if not chunk:
            raise _Damaged("it is cut short")
        left -= len(chunk)
        yield chunk
    if len(archive.read(-size % tarfile.BLOCKSIZE)) < -size % tarfile.BLOCKSIZE:
        raise _Damaged("it is cut short")
