"""Patterns of files in the syntax of .gitignore: those of `Folder`, .gitignore and .sebpignore."""

from itertools import compress
from pathlib import Path
from typing import NamedTuple

from pathspec import GitIgnoreSpec

from sebp_edge.values.documents import Unreadable
from sebp_edge.values.folder import is_valid_pattern

# In order: the later one has the last word.
IGNORE_FILES = (".gitignore", ".sebpignore")
# In bytes.
MAX_IGNORE_FILE = 1_000_000


class IgnoreFile(NamedTuple):
    """The patterns of an ignore file, which hold for the folder that it is in and those below.

    Attributes:
        invalid_lines: the numbers of the lines that are no valid patterns.
    """

    folder: Path
    name: str
    patterns: GitIgnoreSpec
    invalid_lines: list[int]


def read_ignore_files(folder: Path) -> list[IgnoreFile]:
    """Reads the ignore files in a folder; as git does, does not follow links.

    Raises:
        Unreadable: one of them cannot be read, so nobody knows what it ignores.
    """
    found = []
    for name in IGNORE_FILES:
        path = folder / name
        if path.is_symlink() or not path.is_file():
            continue
        try:
            with path.open("rb") as file:
                data = file.read(MAX_IGNORE_FILE + 1)
        except OSError as error:
            raise Unreadable(f"its {name} cannot be read: {error.strerror}") from error
        if b"\0" in data or len(data) > MAX_IGNORE_FILE:
            raise Unreadable(f"its {name} is not a list of patterns")
        found.append(_parse(folder, name, data.decode(errors="replace").removeprefix("\ufeff").splitlines()))
    return found


def _parse(folder: Path, name: str, lines: list[str]) -> IgnoreFile:
    is_valid = [is_valid_pattern(line) for line in lines]
    invalid = [number for number, valid in enumerate(is_valid, start=1) if not valid]
    return IgnoreFile(folder, name, GitIgnoreSpec.from_lines(compress(lines, is_valid)), invalid)


def ignored_by(path: Path, files: list[IgnoreFile], *, is_folder: bool) -> str | None:
    """Returns the name of the ignore file that ignores `path`, or None; the last file that names it decides."""
    for file in reversed(files):
        ignored = file.patterns.check_file(relative_name(path, file.folder, is_folder=is_folder)).include
        if ignored is not None:
            return file.name if ignored else None
    return None


def relative_name(path: Path, root: Path, *, is_folder: bool = False) -> str:
    """Returns the name that patterns are compared with; that of a folder ends in a slash."""
    return path.relative_to(root).as_posix() + "/" * is_folder
