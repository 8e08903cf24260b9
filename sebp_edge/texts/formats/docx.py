"""Reads Word files (.docx and its relatives): paragraphs, headings, lists, tables and notes in their order."""

import posixpath
from collections.abc import Iterator
from pathlib import Path
from struct import error as StructError
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile
from zlib import error as ZlibError

from sebp_edge.texts.documents import NotRead, Unreadable
from sebp_edge.texts.formats.docx_styles import Lists, Styles
from sebp_edge.texts.formats.docx_text import Text, joined
from sebp_edge.texts.formats.docx_xml import DAMAGED, Attributes, Deadline, Handler, attribute, feed

# The unpacked size of the parts that are read, in bytes.
MAX_XML = 64_000_000
# Other decompressors may take any memory.
COMPRESSIONS = (ZIP_STORED, ZIP_DEFLATED)
# What older and encrypted Word files begin with.
_OLE = b"\xd0\xcf\x11\xe0"


def read_docx(path: Path) -> Iterator[str | NotRead]:
    """Yields the text of a Word file, and what of it was not read.

    Raises:
        Unreadable: it is damaged, encrypted or too large.
    """
    with path.open("rb") as file:
        if file.read(4) == _OLE:
            raise Unreadable("encrypted, or in Word's old format; save it as .docx without a password to use it")
    try:
        with path.open("rb") as file, ZipFile(file) as archive:
            yield from _Package(archive).contents()
    except (BadZipFile, ZlibError, StructError, ValueError, RuntimeError, EOFError) as error:
        raise Unreadable(DAMAGED) from error


class _Package:
    """The parts of a Word file, and how they refer to each other."""

    def __init__(self, archive: ZipFile):
        self._archive = archive
        self._parts = {info.filename.lower(): info for info in archive.infolist()}
        self._deadline = Deadline()
        self._size = 0

    def contents(self) -> Iterator[str | NotRead]:
        """Yields the text, and what was not read."""
        main = self._related("").get("officeDocument", "word/document.xml")
        if main not in self._parts:
            raise Unreadable(DAMAGED)
        related = self._related(main)
        styles, lists = Styles(), Lists()
        self._read(related.get("styles"), styles)
        self._read(related.get("numbering"), lists)
        text = Text(styles, lists, self._deadline)
        self._read(main, text)
        if not text.has_body:
            raise Unreadable(DAMAGED)
        blocks = text.blocks()
        notes = {}
        for kind in {kind for kind, _ in text.references}:
            part = Text(styles, lists, self._deadline)
            self._read(related.get(f"{kind}s"), part)
            notes |= {(kind, id): blocks for id, blocks in part.notes.items()}
        for key, number in text.references.items():
            if note := joined(notes.get(key, [])).strip():
                blocks.append((f"[^{number}]: {note}", True))
        yield joined(blocks)
        if text.num_inserted:
            yield NotRead(f"inserted files, which are read once you save this one in Word: {text.num_inserted:,}")
        if text.num_diagrams:
            yield NotRead(f"diagrams and charts: {text.num_diagrams:,}")

    def _read(self, name: str | None, handler: Handler) -> None:
        """Reads a part, if there is one.

        Raises:
            Unreadable: it is damaged, or all parts are too large.
        """
        info = self._parts.get(name)
        if info is None:
            return
        if info.compress_type not in COMPRESSIONS:
            raise Unreadable(DAMAGED)
        # Python never unpacks more of a part than the archive says.
        self._size += info.file_size
        if self._size > MAX_XML:
            raise Unreadable("too large once unpacked; split it to use it")
        with self._archive.open(info) as file:
            feed(file, handler, self._deadline)

    def _related(self, name: str) -> dict[str, str]:
        """Returns the parts that a part refers to, by the kind of the reference; "" is the whole file."""
        folder, base = posixpath.split(name)
        found = _References(folder)
        self._read(posixpath.join(folder, "_rels", f"{base}.rels"), found)
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
