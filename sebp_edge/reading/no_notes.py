"""Recognises folders that nobody would call notes, which the command asks about before it learns anything in them."""

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from sebp_edge.basics.files import downloads_folder
from sebp_edge.basics.units import plural
from sebp_edge.reading.exports import BY_ENDING
from sebp_edge.reading.formats import FORMATS
from sebp_edge.reading.vaults import vault_around

# Files that are looked at, and what may be left out of notes: they have pictures beside them.
MAX_FILES = 10_000
MAX_OTHERS_PER_TEXT = 4
# Records may be notes or data, so they say nothing.
_RECORDS = {".json", ".jsonl", ".csv", ".tsv"}
_TEXTS = FORMATS.keys() - _RECORDS | BY_ENDING.keys()
_CODE = {".git", "pyproject.toml", "setup.py", "package.json", "cargo.toml", "go.mod", "cmakelists.txt", "makefile"}


def reason_against_notes(folder: Path) -> str | None:
    """Returns what a folder is if it holds no notes, as after "This is"; None if it may, or is a file."""
    folder = Path(os.path.realpath(folder))
    if not folder.is_dir() or vault_around(folder):
        return None
    home = Path.home()
    if home.is_relative_to(folder):
        return "your home folder" if folder == home else "the folder around your home folder"
    if folder == Path(os.path.realpath(downloads_folder())):
        return "the folder of your downloads"
    found = list(islice(_endings(folder), MAX_FILES))
    texts = sum(ending in _TEXTS for ending in found)
    others = sum(ending not in _TEXTS | _RECORDS for ending in found)
    try:
        is_code = any(entry.name.lower() in _CODE for entry in folder.iterdir())
    except OSError:
        return None  # its own reader reports that it cannot be opened
    if others > texts and is_code:
        return "a folder of code"
    if others > MAX_OTHERS_PER_TEXT * texts > 0:
        return f"a folder with {plural(texts, 'text')} among {len(found):,} files"
    return None


def _endings(folder: Path) -> Iterator[str]:
    for _, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(name).suffix.lower() for name in files if not name.startswith("."))
