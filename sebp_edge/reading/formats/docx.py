"""Reads Word files (.docx and its relatives): paragraphs, headings, lists, tables and notes in their order."""

import posixpath
from collections.abc import Iterator
from pathlib import Path

from sebp_edge.reading.formats.docx_styles import Lists, Styles
from sebp_edge.reading.formats.docx_text import Text
from sebp_edge.reading.formats.layout import joined
from sebp_edge.reading.formats.xml_parts import Attributes, Handler, Package, attribute, open_package
from sebp_edge.values.documents import NotRead, Unreadable

_DAMAGED = "damaged, or not a Word file"
# What older and encrypted Word files begin with.
_OLE = b"\xd0\xcf\x11\xe0"


def read_docx(path: Path) -> Iterator[str | NotRead]:
    """Yields the text of a Word file, and what of it was not read."""
    with path.open("rb") as file:
        if file.read(4) == _OLE:
            raise Unreadable("encrypted, or in Word's old format; save it as .docx without a password to use it")
    with open_package(path, _DAMAGED) as package:
        yield from _contents(package)


def _contents(package: Package) -> Iterator[str | NotRead]:
    """Yields the text, and what was not read."""
    main = _related(package, "").get("officeDocument", "word/document.xml")
    related = _related(package, main)
    styles, lists = Styles(), Lists()
    package.read(related.get("styles", ""), styles)
    package.read(related.get("numbering", ""), lists)
    text = Text(styles, lists, package.deadline)
    package.read(main, text)
    if not text.has_body:
        raise Unreadable(_DAMAGED)
    blocks = text.blocks()
    notes = {}
    for kind in {kind for kind, _ in text.references}:
        part = Text(styles, lists, package.deadline)
        package.read(related.get(f"{kind}s", ""), part)
        text.left_out += part.left_out
        notes |= {(kind, id): blocks for id, blocks in part.notes.items()}
    for key, number in text.references.items():
        if note := joined(notes.get(key, [])).strip():
            blocks.append((f"[^{number}]: {note}", True))
    yield joined(blocks)
    yield from (NotRead(f"{kind}: {number:,}") for kind, number in sorted(text.left_out.items()))


def _related(package: Package, name: str) -> dict[str, str]:
    """Returns the parts that a part refers to, by the kind of the reference; "" is the whole file."""
    folder, base = posixpath.split(name)
    found = _References(folder)
    package.read(posixpath.join(folder, "_rels", f"{base}.rels"), found)
    return found.targets


class _References(Handler):
    """Handles a part that says where others are."""

    def __init__(self, folder: str):
        self.targets: dict[str, str] = {}
        self._folder = folder

    def start(self, name: str, attributes: Attributes) -> None:
        if name == "Relationship" and attribute(attributes, "TargetMode") != "External":
            target = posixpath.join("/", self._folder, attribute(attributes, "Target").lower())
            kind = attribute(attributes, "Type").rpartition("/")[2]
            self.targets.setdefault(kind, posixpath.normpath(target).lstrip("/"))
