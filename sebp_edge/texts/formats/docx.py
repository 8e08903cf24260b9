"""Reads Word files (.docx) with python-docx: paragraphs, headings and tables in their order."""

from collections.abc import Iterator
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from sebp_edge.texts.documents import Unreadable

# The unpacked size that a file may have, in bytes: of its XML, which takes ten times that while it is read, and of all.
MAX_XML, MAX_UNPACKED = 32_000_000, 256_000_000
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
        blocks = docx.Document(str(path)).iter_inner_content()
        return "\n\n".join(text for block in blocks if (text := "\n".join(_lines(block))).strip())
    except OSError:
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


def _lines(block) -> Iterator[str]:
    """Yields the lines of a paragraph or table."""
    if not hasattr(block, "rows"):
        style = (block.style.name if block.style is not None else "") or ""
        level = style.removeprefix("Heading ")
        yield f"{'#' * int(level)} {block.text}" if level != style and level.isdecimal() else block.text
        return
    for row in block.rows:
        # A merged cell stands for several.
        cells = dict.fromkeys(cell._tc for cell in row.cells)
        texts = {cell._tc: " ".join(cell.text.split()) for cell in row.cells}
        yield " | ".join(texts[cell] for cell in cells)
