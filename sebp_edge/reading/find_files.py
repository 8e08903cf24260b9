"""Finds the files of a folder that are to be read; says why others are left out, and why a folder holds no notes."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress, islice
from pathlib import Path
from typing import NamedTuple

from pathspec import GitIgnoreSpec

from sebp_edge.basics.files import downloads_folder
from sebp_edge.basics.units import plural
from sebp_edge.errors import TextsError
from sebp_edge.reading.exports import BY_ENDING
from sebp_edge.reading.formats import FORMATS
from sebp_edge.reading.not_theirs import LICENCE, is_licence_name, reason_against_folder
from sebp_edge.reading.vaults import Vault, find_by_marks, find_vault, vault_around
from sebp_edge.values.documents import LeftOut, Unreadable, printable
from sebp_edge.values.folder import Folder, is_valid_pattern

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
    """Reads the ignore files in a folder; as git does, does not follow links."""
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
        lines = data.decode(errors="replace").removeprefix("\ufeff").splitlines()
        is_valid = [is_valid_pattern(line) for line in lines]
        invalid = [number for number, valid in enumerate(is_valid, start=1) if not valid]
        found.append(IgnoreFile(folder, name, GitIgnoreSpec.from_lines(compress(lines, is_valid)), invalid))
    return found


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


@dataclass(frozen=True)
class Found:
    """A file to be read.

    Attributes:
        name: its name relative to the given folder.
        vault: the vault that it is in, if any.
    """

    path: Path
    name: str
    vault: Vault | None


def find_files(folder: Folder, left_out: list[LeftOut]) -> Iterator[Found]:
    """Yields the files of a folder, sorted, or the given file; adds what it skips to `left_out`."""
    path = given_path(folder)
    if path.is_dir():
        yield from _Walk(path, folder, left_out).files()
    else:
        yield Found(path, printable(path.name), vault_around(path.parent))


def given_path(folder: Folder) -> Path:
    """Returns the path of a folder or file; refuses one that cannot be opened."""
    path = expand_user(Path(folder.path))
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise TextsError(f"There is no file or folder {str(path)!r}; check the path.") from error
    except OSError as error:
        raise TextsError(f"{str(path)!r} cannot be opened: {error.strerror}.") from error
    return path


def expand_user(path: Path) -> Path:
    """Expands `~`; returns the path unchanged if there is no such user."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path


class _Walk:
    """A walk through a folder."""

    def __init__(self, root: Path, folder: Folder, left_out: list[LeftOut]):
        self._root = root
        self._real_root = os.path.realpath(root)
        self._include, self._exclude = (
            GitIgnoreSpec.from_lines(patterns) for patterns in (folder.include, folder.exclude)
        )
        self._includes_all = not folder.include
        self._left_out = left_out
        self._ignore_files: dict[Path, list[IgnoreFile]] = {}
        self._vaults: dict[Path, Vault | None] = {}

    def files(self) -> Iterator[Found]:
        for name, folders, files in os.walk(self._root, onerror=self._failed):
            folder = Path(name)
            folders.sort()
            try:
                self._enter(folder)
            except Unreadable as reason:
                self._leave_out_path(folder, str(reason), is_folder=True)
                folders.clear()
                continue
            for name in folders.copy():
                if reason := self._reason_against_folder(folder / name):
                    self._leave_out_path(folder / name, reason, is_folder=True)
                    folders.remove(name)
            for name in sorted(set(files) - set(IGNORE_FILES)):
                path = folder / name
                if reason := self._reason_against_file(path):
                    self._leave_out_path(path, reason)
                else:
                    yield Found(path, self._name(path), self._vaults[folder])

    def _enter(self, folder: Path) -> None:
        """Reads the ignore files of a folder, and looks whether it is a vault."""
        outermost = folder == self._root
        above = [] if outermost else self._ignore_files[folder.parent]
        around = (vault_around(folder) or find_by_marks(folder)) if outermost else self._vaults[folder.parent]
        own = read_ignore_files(folder)
        for file in own:
            for number in file.invalid_lines:
                self._leave_out_path(folder / file.name, f"line {number} is not a valid pattern, and is not applied")
        self._ignore_files[folder], self._vaults[folder] = above + own, find_vault(folder) or around

    def _reason_against_folder(self, path: Path) -> str | None:
        if path.name.startswith("."):
            return "hidden folder"
        if path.is_symlink():
            # Following the link could loop, or leave the given folder.
            return "link to a folder; give the folder itself"
        vault = self._vaults[path.parent]
        reason = self._reason_of_patterns(path, is_folder=True) or (vault and vault.not_notes.get(path.absolute()))
        return reason or reason_against_folder(path)

    def _reason_against_file(self, path: Path) -> str | None:
        if path.name.startswith("."):
            return "hidden file"
        if not Path(os.path.realpath(path)).is_relative_to(self._real_root):
            return "link to outside the folder; give the file itself"
        if reason := self._reason_of_patterns(path):
            return reason
        if not (self._includes_all or self._include.match_file(relative_name(path, self._root))):
            return "matches no pattern to include"
        return LICENCE if is_licence_name(path) else None

    def _reason_of_patterns(self, path: Path, *, is_folder: bool = False) -> str | None:
        if self._exclude.match_file(relative_name(path, self._root, is_folder=is_folder)):
            return "excluded"
        name = ignored_by(path, self._ignore_files[path.parent], is_folder=is_folder)
        return name and f"ignored by {name}"

    def _failed(self, error: OSError) -> None:
        self._leave_out_path(Path(error.filename), f"cannot be opened: {error.strerror}", is_folder=True)

    def _leave_out_path(self, path: Path, reason: str, *, is_folder: bool = False) -> None:
        self._left_out.append(LeftOut(self._name(path) + "/" * is_folder, reason))

    def _name(self, path: Path) -> str:
        return printable(relative_name(path, self._root))


# Files that are looked at, and what may be left out of notes: they have pictures beside them.
MAX_FILES = 10_000
MAX_OTHERS_PER_TEXT = 4
# Records may be notes or data, so they say nothing.
_RECORDS = {".json", ".jsonl", ".csv", ".tsv"}
_TEXTS = FORMATS.keys() - _RECORDS | BY_ENDING.keys()
_CODE = {".git", "pyproject.toml", "setup.py", "package.json", "cargo.toml", "go.mod", "cmakelists.txt", "makefile"}


def reason_against_notes(folder: Path) -> str | None:
    """Returns a sentence, without its full stop, why a folder holds no notes; None if it may, or is a file."""
    given, folder = folder, Path(os.path.realpath(folder))
    if not folder.is_dir() or vault_around(folder):
        return None

    def is_(what: str) -> str:
        return f"{printable(str(given))!r} is {what}, not of notes"

    home = Path.home()
    if home.is_relative_to(folder):
        return is_("your home folder" if folder == home else "the folder around your home folder")
    if folder == Path(os.path.realpath(downloads_folder())):
        return is_("the folder of your downloads")
    found = list(islice(_endings(folder), MAX_FILES))
    texts = sum(ending in _TEXTS for ending in found)
    others = sum(ending not in _TEXTS | _RECORDS for ending in found)
    try:
        is_code = any(entry.name.lower() in _CODE for entry in folder.iterdir())
    except OSError:
        return None  # its own reader reports that it cannot be opened
    if others > texts and is_code:
        return is_("a folder of code")
    if others > MAX_OTHERS_PER_TEXT * texts > 0:
        return is_(f"a folder with {plural(texts, 'text')} among {len(found):,} files")
    return None


def _endings(folder: Path) -> Iterator[str]:
    for _, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(name).suffix.lower() for name in files if not name.startswith("."))
