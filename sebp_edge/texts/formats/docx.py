"""Reads Word files (.docx) with python-docx: paragraphs, headings and tables in their order."""

import time
from collections.abc import Iterator
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from sebp_edge.texts.documents import Unreadable

# The unpacked size that a file may have, in bytes: of its XML, and of all.
MAX_XML, MAX_UNPACKED = 8_000_000, 256_000_000
MAX_SECONDS = 20
# What older and encrypted Word files begin with.
_OLE = b"\xd0\xcf\x11\xe0"


def read_docx(path: Path) -> str:
    """Returns the text of a Word file.

    Raises:
        Unreadable: it is damaged, encrypted or too large, or python-docx is not installed.
    """
    try:
        import docx
    except ImportError as error:
        raise Unreadable("needs python-docx; install it with: pip install 'sebp-edge[docx]'") from error
    _refuse_unsafe(path)
    try:
        return "\n\n".join(_texts(docx.Document(str(path))))
    except (OSError, Unreadable):
        raise
    except Exception as error:  # python-docx raises errors of many kinds for what it does not expect.
        raise Unreadable("damaged, or not a Word file") from error


def _refuse_unsafe(path: Path) -> None:
    """Checks the archive before it is unpacked.

    Raises:
        Unreadable: it is no archive, or would grow too large.
    """
    with path.open("rb") as file:
        if file.read(4) == _OLE:
            raise Unreadable("encrypted, or in Word's old format; save it as .docx without a password to use it")
    try:
        with ZipFile(path) as archive:
            sizes = {info.filename: info.file_size for info in archive.infolist()}
    except (BadZipFile, ValueError, NotImplementedError, EOFError) as error:
        raise Unreadable("damaged, or not a Word file") from error
    # Python never unpacks more of a part than the archive says.
    xml = sum(size for name, size in sizes.items() if name.lower().endswith((".xml", ".rels")))
    if xml > MAX_XML or sum(sizes.values()) > MAX_UNPACKED:
        raise Unreadable("too large once unpacked; split it to use it")


def _texts(document) -> Iterator[str]:
    started = time.monotonic()
    # Looking up a paragraph's style takes python-docx long.
    names = {style.style_id: style.name or "" for style in document.styles}
    levels = {style: name.removeprefix("Heading ") for style, name in names.items() if name.startswith("Heading ")}
    for block in document.iter_inner_content():
        if time.monotonic() - started > MAX_SECONDS:
            raise Unreadable(f"its text takes longer than {MAX_SECONDS} seconds to read; split it to use it")
        text = "\n".join(_rows(block)) if hasattr(block, "rows") else block.text
        if not text.strip():
            continue
        level = "" if hasattr(block, "rows") else levels.get(block._p.style, "")
        yield f"{'#' * int(level)} {text}" if level in tuple("123456789") else text


def _rows(table) -> Iterator[str]:
    for row in table.rows:
        # A merged cell stands for several.
        texts = {cell._tc: " ".join(cell.text.split()) for cell in row.cells}
        yield " | ".join(texts.values())
