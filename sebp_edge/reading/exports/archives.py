"""Looks into .zip archives. Nothing is unpacked onto the disk, and no link and no archive within one is followed."""

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from os import stat_result
from pathlib import Path, PurePosixPath
from typing import IO
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo
from zlib import error as ZlibError

from sebp_edge.values.documents import LeftOut, Unreadable, printable

# Number of files in an archive; and the unpacked size in bytes of all that are read, but for mailboxes.
MAX_FILES, MAX_UNPACKED = 100_000, 4_000_000_000
_ENCRYPTED = 1


class Member:
    """A file in an archive, with what readers use of a `Path`.

    Attributes:
        path: its path in the archive.
    """

    def __init__(self, archive: ZipFile, info: ZipInfo):
        self.archive, self.info, self.path = archive, info, PurePosixPath(info.filename)

    def __getattr__(self, name: str):
        return getattr(self.path, name)  # such as its suffix

    def is_file(self) -> bool:
        """See `Path`."""
        return True

    def stat(self) -> stat_result:
        """See `Path`; only the size is known."""
        return stat_result((0,) * 6 + (self.info.file_size,) + (0,) * 3)

    def open(self, mode: str = "rb") -> IO[bytes]:
        """See `Path`. Never gives more bytes than the archive says that the file has."""
        return self.archive.open(self.info, mode[:1])

    def read_bytes(self) -> bytes:
        """See `Path`."""
        return self.archive.read(self.info)


def is_archive(path: Path) -> bool:
    """Returns whether this is a .zip file."""
    return path.suffix.lower() == ".zip" and path.is_file()


def find_members(path: Path, left_out: list[LeftOut]) -> Iterator[Member]:
    """Yields the files of an archive, sorted by name; adds what it skips to `left_out`."""
    try:
        archive = ZipFile(path)
    except (BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise Unreadable("no .zip archive, a damaged one, or one of a version that cannot be read") from error
    infos = archive.infolist()
    if len(infos) > MAX_FILES:
        raise Unreadable(f"more than {MAX_FILES:,} files; unpack it, and give the folder")
    unpacked = 0
    for info in sorted(infos, key=lambda info: info.filename):
        if info.is_dir():
            continue
        member = Member(archive, info)
        if reason := _reason_against(member):
            left_out.append(LeftOut(printable(info.filename), reason))
            continue
        unpacked += info.file_size if member.suffix.lower() != ".mbox" else 0
        if unpacked > MAX_UNPACKED:
            raise Unreadable(f"more than {MAX_UNPACKED // 10**9} GB once unpacked; unpack it, and give the folder")
        yield member


@contextmanager
def archive_faults() -> Iterator[None]:
    """Context in which the faults of a file in an archive become an Unreadable."""
    try:
        yield
    except (BadZipFile, ZlibError, EOFError, OSError, RuntimeError) as error:
        raise Unreadable("damaged in the archive") from error


def _reason_against(member: Member) -> str | None:
    if member.path.is_absolute() or ".." in member.path.parts or "\\" in member.info.filename:
        return "a path that leads out of the archive"
    if any(part.startswith(".") or part == "__MACOSX" for part in member.path.parts):
        return "hidden file"
    if stat.S_ISLNK(member.info.external_attr >> 16):
        return "link"
    if member.info.flag_bits & _ENCRYPTED:
        return "encrypted; unpack the archive with its password, and give the folder"
    if member.info.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
        return "packed by a method that is not read; unpack the archive, and give the folder"
    return None
