"""Finds vaults of Obsidian and Logseq and exports of Joplin, and knows which of their folders hold no notes."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

from sebp_edge.basics.files import read_json
from sebp_edge.reading.not_theirs import reason_against_folder

# In bytes.
MAX_SETTINGS = 1_000_000
# Without settings, a folder is Obsidian's if this share of its notes have marks that nothing else writes: so many notes
# or one with so many; or if so many have them and .gitignore names the settings: kernels/bench/which-files-are-read.md.
SHARE, MIN_NOTES, MIN_MARKS = 0.06, 2, 3
# How many notes of a folder are searched, and how much of each one, in bytes.
MAX_NOTES, SEARCHED = 2_000, 50_000
_FILES = r"png|jpe?g|gif|svg|webp|bmp|avif|pdf|mp[34]|m4a|ogg|wav|mov|webm|canvas|base|excalidraw(?:\.md)?"
_MARK = re.compile(
    rf"""
      (?P<file>!\[\[[^\[\]\n|\#]{{1,200}}\.(?:{_FILES})(?:[|\#][^\[\]\n]*)?\]\])
    | (?P<plugin>\A---[ \t]*\n(?:(?!---)[^\n]*\n){{0,100}}?[\w-]{{1,40}}-plugin:)
    | (?P<callout>^(?:[ ]{{0,3}}>)+[ ]\[![\w-]{{1,40}}\][+-])
    | (?P<comment>%%[^%\n]+%%)
    | (?P<link>(?<!!)\[\[[^\[\]\n]+\]\])
    """,
    re.VERBOSE | re.MULTILINE | re.IGNORECASE,
)
_FENCE, _CODE = re.compile(r"```|~~~"), re.compile(r"`[^`\n]*`")
_IGNORED = re.compile(r"^[/*]*\.obsidian(?:/|\s*$)", re.MULTILINE)
# A file of Joplin's RAW export has an id as its name.
_JOPLINS = "[0-9a-f]" * 32 + ".md"
# A journal of Logseq, beside its pages, has a day as its name.
_JOURNAL = "[12]???_[01]?_[0-3]?.*"


class Vault(NamedTuple):
    """A folder of notes that a program keeps or exported.

    Attributes:
        app: the program whose syntax the notes have.
        not_notes: folders without notes, as absolute paths, each with the reason to leave it out.
        evidence: what shows that it is one, if it has no settings.
    """

    app: Literal["Obsidian", "Logseq", "Joplin"]
    not_notes: dict[Path, str]
    evidence: str = ""


def find_vault(folder: Path, evidence: str = "") -> Vault | None:
    """Returns the vault that the folder is, or None; with evidence, one of Obsidian."""
    folder = folder.absolute()
    try:
        if evidence or (folder / ".obsidian").is_dir():
            names = {"Templates", "templates", *_obsidian_templates(folder / ".obsidian")}
            return Vault("Obsidian", {folder / name: "Obsidian's templates" for name in names}, evidence)
        has_journals = (folder / "pages").is_dir() and next((folder / "journals").glob(_JOURNAL), None)
        if has_journals or (folder / "logseq" / "config.edn").is_file():
            return Vault("Logseq", {folder / "logseq": "Logseq's settings and backups"})
        if (folder / "resources").is_dir() and next(folder.glob(_JOPLINS), None):
            return Vault("Joplin", {folder / "resources": "Joplin's attachments"})
    except OSError:
        pass  # The folder cannot be opened, which its own reader reports.
    return None


def vault_around(folder: Path) -> Vault | None:
    """Returns the innermost vault that the folder is or is in, or None."""
    folder = folder.absolute()
    return next((vault for outer in (folder, *folder.parents) if (vault := find_vault(outer))), None)


def find_by_marks(folder: Path) -> Vault | None:
    """Returns the vault of Obsidian that a folder without settings is by the marks in its notes, or None."""
    num_notes = num_marked = num_marks = 0
    for text in islice(_notes(folder), MAX_NOTES):
        prose, *code = _FENCE.split(text)
        marks = {mark.lastgroup for mark in _MARK.finditer(_CODE.sub("", "".join([prose, *code[1::2]])))}
        marks |= {"query" for block in code[::2] if block.startswith(("dataview", "tasks"))}
        is_marked = bool(marks & {"file", "plugin"}) or len(marks - {"link"}) > 1
        num_notes, num_marked, num_marks = num_notes + 1, num_marked + is_marked, num_marks + is_marked * len(marks)
    has_enough = num_marked >= MIN_NOTES or num_marks >= MIN_MARKS
    is_ignored = num_marked >= MIN_NOTES and _IGNORED.search(_beginning(folder / ".gitignore"))
    if is_ignored or (has_enough and num_marked >= SHARE * num_notes):
        return find_vault(folder, f", by the marks in {num_marked:,}, since there is no .obsidian")
    return None


def _notes(folder: Path) -> Iterator[str]:
    """Yields the beginnings of the Markdown files in a folder that are in no vault."""
    for name, folders, files in os.walk(folder):
        others = {each for each in folders if find_vault(Path(name, each)) or reason_against_folder(Path(name, each))}
        folders[:] = sorted(each for each in set(folders) - others if each[0] != ".")
        yield from (_beginning(Path(name, each)) for each in sorted(files) if each.endswith(".md") and each[0] != ".")


def _beginning(file: Path) -> str:
    try:
        if not file.is_file():
            return ""
        with file.open("rb") as opened:
            return opened.read(SEARCHED).decode(errors="replace").replace("\r\n", "\n").removeprefix("\ufeff")
    except OSError:
        return ""  # Its own reader reports it.


def _obsidian_templates(settings: Path) -> set[str]:
    """Returns the folders of templates, as set in Obsidian and in its plugin Templater."""
    places = {"templates.json": "folder", "plugins/templater-obsidian/data.json": "templates_folder"}
    found = set()
    for file, key in places.items():
        with suppress(OSError, ValueError):
            name = read_json(settings / file, MAX_SETTINGS).get(key)
            if isinstance(name, str) and "\0" not in name:
                found.add(name.strip("/"))
    return found - {""}
