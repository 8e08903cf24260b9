"""Reads notes that programs export in one file.

Evernote    .enex, a file of XML with the HTML of each note in it
Joplin      .jex, an archive (tar) of the files that its RAW export has
"""

import re
import tarfile
from collections import Counter
from collections.abc import Iterator
from typing import BinaryIO

from sebp_edge.reading import formats
from sebp_edge.reading.formats.encodings import decode_bytes
from sebp_edge.reading.formats.html import html_text
from sebp_edge.reading.formats.joplin_notes import ENCRYPTED, NO_NOTE
from sebp_edge.reading.formats.notes import joplin_note
from sebp_edge.reading.formats.xml_parts import Attributes, Deadline, Handler, feed, xml_faults
from sebp_edge.values.documents import NotRead, Unreadable, unix_newlines

_DAMAGED_ENEX = "damaged, or not an Evernote export"
# The parts of a note that are kept, by their place below it; web clippings have their own kind of source.
_KEPT = {"title", "content", "note-attributes/source"}
_COUNTED_ENEX = {"resource": "attachments", "task": "tasks"}
_ENCRYPTED = re.compile(r"<en-crypt\b[^<>]*>[^<>]*</en-crypt\s*>|<en-crypt\b[^<>]*/>", re.IGNORECASE)
# Boxes to tick, and the tags that begin before the text after them.
_CHECKBOX = re.compile(
    r"(?:<en-todo\b(?P<todo>[^<>]*)>(?:\s*</en-todo\s*>)?|(?P<item><li\b[^<>]*--en-checked:[^<>]*>))"
    r"(?P<tags>(?:\s*<(?:div|p|span|b|i|u|font|strong|em)\b[^<>]*>)*)",
    re.IGNORECASE,
)
_IS_CHECKED = re.compile(r"checked\s*[=:]\s*[\"']?true", re.IGNORECASE)
# What Evernote writes for older programs in place of tasks.
_TASKS = re.compile(r"<div\b[^<>]*--en-task-group:\s*true[^<>]*>(?:\s*<div\b[^<>]*>[^<>]*</div\s*>)*\s*</div\s*>", re.I)


def read_evernote(file: BinaryIO) -> Iterator[str | Unreadable | NotRead]:
    """Yields the text of each note below its title, and what was not read."""
    export, fault = _Export(), None
    try:
        with xml_faults(_DAMAGED_ENEX):
            feed(file, export, Deadline())
    except Unreadable as reason:
        if not export.notes:
            raise
        fault = reason.with_traceback(None)
    for number, (title, content) in enumerate(export.notes):
        export.notes[number] = ("", "")  # A large export is not kept beside its text.
        content, num_encrypted = _ENCRYPTED.subn("", _TASKS.sub("", content))
        export.left_out["encrypted passages"] += num_encrypted
        try:
            if text := html_text(_CHECKBOX.sub(_with_box, content)):
                yield f"{' '.join(title.split())}\n\n{text}"
            else:
                export.left_out["notes without text"] += 1
        except Unreadable as reason:
            yield reason.with_traceback(None)
    if fault:
        yield Unreadable(f"damaged after {len(export.notes):,} notes")
    reasons = [f"{kind}: {count:,}" for kind, count in sorted(export.left_out.items()) if count]
    if not (export.notes or fault):
        raise Unreadable("; ".join(reasons) if export.is_one else _DAMAGED_ENEX)
    yield from map(NotRead, reasons)


def _with_box(found: re.Match) -> str:
    is_checked = _IS_CHECKED.search(found["todo"] or found["item"] or "")
    return f"{found['item'] or ''}{found['tags']}{'[x]' if is_checked else '[ ]'} "


class _Export(Handler):
    """Handles an export.

    Attributes:
        is_one: whether this is an export at all.
        notes: the title and the HTML of each note.
        left_out: how many of each kind were not read.
    """

    def __init__(self):
        self.is_one = False
        self.notes: list[tuple[str, str]] = []
        self.left_out: Counter[str] = Counter()
        self._path: list[str] = []
        self._parts: dict[str, list[str]] = {}
        self._kept: list[str] | None = None
        self._is_encrypted = False

    def start(self, name: str, attributes: Attributes) -> None:
        self.is_one |= not self._path and name == "en-export"
        self._path.append(name)
        place = "/".join(self._path[2:])
        if name == "note":
            self._parts, self._is_encrypted = {}, False
        elif place in _COUNTED_ENEX:
            self.left_out[_COUNTED_ENEX[place]] += 1
        elif place in _KEPT:
            self._kept = self._parts.setdefault(place, [])
            self._is_encrypted |= attributes.get("encoding", "").endswith("aes")

    def end(self, name: str) -> None:
        self._kept = None
        self._path.pop()
        if name != "note":
            return
        parts = {place: "".join(pieces) for place, pieces in self._parts.items()}
        if self._is_encrypted:
            self.left_out["encrypted notes"] += 1
        elif parts.get("note-attributes/source", "").startswith("web.clip"):
            self.left_out["clippings of web pages, which others wrote"] += 1
        elif parts.get("content", "").strip():
            self.notes.append((parts.get("title", ""), parts["content"]))

    def text(self, text: str) -> None:
        if self._kept is not None:
            self._kept.append(text)


# ------------------------------------------------------------------------------------------- Joplin

_DAMAGED_JEX = "damaged, or not a Joplin export"
_COUNTED_JEX = {
    NO_NOTE: "notebooks, tags and what else Joplin keeps beside notes",
    ENCRYPTED: "notes that Joplin has encrypted; export them again with encryption off",
}


def read_jex(file: BinaryIO) -> Iterator[str | Unreadable | NotRead]:
    """Yields the text of each note, and what was not read. Nothing after a fault is read."""
    left_out: Counter[str] = Counter()
    num_notes = 0
    try:
        for name, data in _files(file):
            if data is None or not name.endswith(".md") or "/" in name:
                left_out["attachments and other files"] += 1
                continue
            try:
                content, *not_read = joplin_note(unix_newlines(decode_bytes(data)))
            except Unreadable as reason:
                if reason.reason in _COUNTED_JEX:
                    left_out[_COUNTED_JEX[reason.reason]] += 1
                    continue
                content, not_read = reason.with_traceback(None), []
            num_notes += 1
            for part in not_read:
                kind, _, number = part.reason.rpartition(": ")
                left_out[kind or part.reason] += int(number.replace(",", "")) if kind else 1
            yield content
    except (tarfile.TarError, ValueError, EOFError) as error:
        if not num_notes:
            raise Unreadable(_DAMAGED_JEX) from error
        yield Unreadable(f"damaged after {num_notes:,} notes")
    yield from (NotRead(f"{kind}: {number:,}") for kind, number in sorted(left_out.items()))


def _files(file: BinaryIO) -> Iterator[tuple[str, bytes | None]]:
    """Yields the name and content of each file; None instead of a content that is too large, a link or the like."""
    with tarfile.open(fileobj=file, mode="r:") as archive:
        at = -1
        while member := archive.next():
            if archive.offset <= at:
                raise ValueError  # It would go round in circles.
            at = archive.offset
            archive.members.clear()  # Else it keeps what it knows of each file.
            if member.isdir():
                continue
            is_file = member.isreg() and not member.issparse() and member.size <= formats.MAX_FILE_SIZE
            is_note = is_file and member.name.endswith(".md")
            data = archive.extractfile(member).read() if is_note else None
            if is_note and len(data) < member.size:
                raise EOFError
            yield member.name, data
