"""Reads files in the formats given by their endings.

Internal: import from `sebp_edge` or `sebp_edge.research`.

encodings                bytes -> text
coverage                 how many words of a file its reader has not read
notes                    Markdown: front_matter finds what is not text, obsidian, logseq, joplin and notion read marks
mdx                      Markdown with components
markdown                 where a Markdown text has code and comments
org, rst                 Org and reStructuredText files
html, notebook           web pages, Jupyter notebooks; `layout` lays out the text of pages
docx                     Word files: docx_text their text, docx_story what is open in it, docx_styles headings and lists
odt                      OpenDocument texts; `xml_parts` reads XML for these and for Word files
rtf                      Rich Text files
signs                    the signs of the fonts Symbol, Wingdings and Webdings in Unicode
pdf                      PDF files, with a library that is an extra
records                  .json, .jsonl, .csv and .tsv

To add a format, add its ending to `FORMATS` with a function from a path to the contents found in it. It raises
`Unreadable`, with the reason, for a file that is left out.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from sebp_edge.reading.foreign import reason_against_name
from sebp_edge.reading.formats.coverage import COUNTED, with_coverage
from sebp_edge.reading.formats.docx import read_docx
from sebp_edge.reading.formats.encodings import decode
from sebp_edge.reading.formats.html import read_html
from sebp_edge.reading.formats.mdx import read_mdx
from sebp_edge.reading.formats.notebook import read_notebook
from sebp_edge.reading.formats.notes import read_note
from sebp_edge.reading.formats.odt import read_odt
from sebp_edge.reading.formats.org import read_org
from sebp_edge.reading.formats.pdf import read_pdf
from sebp_edge.reading.formats.record_files import Read, read_csv, read_json
from sebp_edge.reading.formats.rst import read_rst
from sebp_edge.reading.formats.rtf import read_rtf
from sebp_edge.reading.vaults import Vault
from sebp_edge.values.documents import Unreadable, printable

# Size limit of a file, in bytes. The text of the largest file takes 1 to 2 GB of memory once it is tokenised.
MAX_FILE_SIZE = 64_000_000

# Those of formats that hold one document return its text.
Reader = Callable[[Path], str | Iterable[Read]]


def read_file(path: Path, vault: Vault | None = None) -> Iterable[Read]:
    """Reads the contents of one file; an Unreadable takes the place of a faulty record, a NotRead says what is missing.

    Args:
        vault: the vault that the file is in, if any; its Markdown has the vault's syntax.

    Raises:
        Unreadable: nothing in the file can be used.
        OSError: it cannot be read.
    """
    ending = path.suffix.lower()
    size = size_of(path)
    if reason := reason_against_name(path.name):
        raise Unreadable(reason)
    if ending not in FORMATS:
        with path.open("rb") as file:
            binary = b"\0" in file.read(4096)
        ending = printable(path.suffix) or "(no ending)"
        raise Unreadable("binary file" if binary else f"unsupported file type {ending}")
    refuse_larger(size, MAX_FILE_SIZE)
    contents = read_note(path, vault) if ending in MARKDOWN else FORMATS[ending](path)
    contents = [contents] if isinstance(contents, str) else contents
    return with_coverage(path, contents) if ending in COUNTED else contents


def size_of(path: Path) -> int:
    """Returns the size of a file, in bytes."""
    if not path.is_file():
        raise Unreadable("not a regular file")
    size = path.stat().st_size
    if not size:
        # System files (/proc) report size 0 too; reading them may block or never end.
        raise Unreadable("empty")
    return size


def refuse_larger(size: int, largest: int) -> None:
    """Raises an Unreadable if a size is more than the largest, in bytes."""
    if size > largest:
        raise Unreadable(f"larger than {largest // 1_000_000} MB; split it to use it")


def text_size(path: Path) -> int:
    """Returns how many bytes of text `read_file` reads of a file; 0 if it refuses it, or must unpack it to know."""
    ending = path.suffix.lower()
    try:
        size = path.stat().st_size if ending in FORMATS.keys() - PACKED else 0
    except OSError:
        return 0
    return size if size <= MAX_FILE_SIZE else 0


MARKDOWN = {".md", ".markdown"}
WORD = {".docx", ".docm", ".dotx", ".dotm"}
PACKED = {*WORD, ".odt", ".ott", ".pdf"}
FORMATS: dict[str, Reader] = {
    ".txt": decode,
    ".rst": read_rst,
    **dict.fromkeys(MARKDOWN, read_note),
    ".mdx": read_mdx,
    ".org": read_org,
    **dict.fromkeys((".html", ".htm"), read_html),
    ".ipynb": read_notebook,
    **dict.fromkeys(WORD, read_docx),
    **dict.fromkeys((".odt", ".ott", ".fodt"), read_odt),
    ".rtf": read_rtf,
    ".pdf": read_pdf,
    **dict.fromkeys((".json", ".jsonl"), read_json),
    **dict.fromkeys((".csv", ".tsv"), read_csv),
}
