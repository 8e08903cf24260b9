"""Counts the words of a file a second time, by patterns that know nothing of its reader, so that lost text is noticed.

The patterns are simple on purpose. They set aside what is no text, and what all readers leave out by design; what else
a reader leaves out, it says.
"""

import html
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from zipfile import ZipFile

from sebp_edge.reading.formats.encodings import decode, decode_html, utf8_of
from sebp_edge.reading.formats.xml_parts import COMPRESSIONS, MAX_XML
from sebp_edge.values.documents import Content, NotRead, Unreadable, pieces, texts_of

# The share of the words that a reader must have read.
ENOUGH = 0.9

# Marks of where a word may be hyphenated are parts of it.
_WORD = re.compile(r"[^\W_](?:[^\W_]|[\u00ad\u200b-\u200d\u2060])*")


def with_coverage(
    path: Path, contents: Iterable[Content | Unreadable | NotRead]
) -> list[Content | Unreadable | NotRead]:
    """Returns the contents of a file, and how many of its words they lack if that is many.

    Args:
        path: a file in one of the formats `COUNTED`.
        contents: what its reader found in it, without refusing it.
    """
    contents = list(contents)
    found = [content for content in contents if not isinstance(content, (Unreadable, NotRead))]
    read = sum(_num_words(text) for content in found for text in texts_of(content))
    total = sum(map(_num_words, COUNTED[path.suffix.lower()](path)))
    if read < ENOUGH * total:
        contents.append(NotRead(f"words that were not read: {total - read:,} of {total:,}"))
    return contents


def _num_words(text: str) -> int:
    return sum(_WORD.subn("", piece)[1] for piece in pieces(text))  # without a Python object for each word


def _from_bytes(text: str) -> Iterator[str]:
    """Yields the text of UTF-8 of which each byte was a character, which saves memory while marks are cut out."""
    return (piece.encode("latin-1").decode(errors="replace") for piece in pieces(text))


def _without(text: str, begin: str, end: str) -> str:
    """Cuts out all that is between two patterns, each with the first end after it; one without an end is kept.

    A single pattern for both would take a time that grows with the square of the size of a damaged file.
    """
    begins, ends = re.compile(begin, re.IGNORECASE | re.MULTILINE), re.compile(end, re.IGNORECASE | re.MULTILINE)
    kept, start = [], 0
    while (opened := begins.search(text, start)) and (closed := ends.search(text, opened.end())):
        kept.append(text[start : opened.start()])
        start = closed.end()
    return " ".join([*kept, text[start:]])


# ---------------------------------------------------------------------------------------------- formats

_IN_LINE = "a|abbr|b|bdi|bdo|big|cite|code|em|font|i|kbd|mark|q|s|samp|small|span|strong|sub|sup|tt|u|var|wbr"
_IN_LINE_TAG = re.compile(rf"</?(?:{_IN_LINE})(?:\s[^<>]*)?>", re.IGNORECASE)
_TAG = re.compile(r"<[!/?a-z][^<>]*>", re.IGNORECASE)
# May hold whole pages, with tags.
_ATTRIBUTE = re.compile(r"""=\s*(?:"[^"]*"|'[^']*')""")
# Menus and what a page only shows on demand. One that is never closed, or begins within another, is counted.
_ASIDE = re.compile(
    r"<(head|nav|select|button|template|noscript|svg|iframe|object|audio|video|canvas|textarea)(?=[\s>])"
    r"[^<]*(?:<(?!/?\1[\s>])[^<]*)*</\1\s*>",
    re.IGNORECASE,
)


def _page_text(text: str) -> str:
    text = _without(text, r"<!(?=--)", r"--!?>")
    for name in ("script", "style"):
        text = _without(text, rf"<{name}(?=[\s>])", rf"</{name}\s*>")
    text = _ASIDE.sub(" ", _ATTRIBUTE.sub("", text))
    return html.unescape(_TAG.sub(" ", _IN_LINE_TAG.sub("", text)))


_WORD_PART = re.compile(r"word/(?:document|footnotes|endnotes)\d*\.xml", re.IGNORECASE)
_WORD_LETTER = re.compile(
    r"""<(?:\w+:)?sym\s(?=[^<>]*["']Symbol["'])[^<>]*["'](?:F0|00)?[4-7][0-9A-F]["'][^<>]*>""", re.I
)
# Texts, prompts of fields and the first entries of lists.
_WORD_TEXT = re.compile(
    r"<(?:\w+:)?(?:t(?:\s[^<>]*)?>|instrText[^<>]*>\s*(?:MACRO|GOTO)BUTTON\s+[^\s<]+"
    r"|ddList>(?:\s*<(?:\w+:)?(?:result|default)\s[^<>]*>)*\s*<(?:\w+:)?listEntry\s[^<>=]*=)([^<]*)"
    r"|</(?:\w+:)?p>|<(?:\w+:)?(?:tab|br|cr|ptab)\b"
)


def _parts(path: Path, names: re.Pattern) -> list[bytes]:
    """Returns the parts of an archive whose names match."""
    with path.open("rb") as file, ZipFile(file) as archive:
        found = [info for info in archive.infolist() if names.fullmatch(info.filename)]
        if sum(info.file_size for info in found) > MAX_XML or any(
            info.compress_type not in COMPRESSIONS for info in found
        ):
            return []  # Its reader did not read all of these.
        return [archive.read(info) for info in found]


def _word_text(path: Path) -> list[str]:
    xml = " ".join(part.decode("utf-8", errors="replace") for part in _parts(path, _WORD_PART))
    xml = _WORD_LETTER.sub("<t>x", xml)
    # The copies of text boxes for older programs, and of what was moved.
    for name in ("Fallback", "moveFrom"):
        xml = _without(xml, rf"<(?:\w+:)?{name}[\s>]", rf"</(?:\w+:)?{name}>")
    return [html.unescape("".join(" " if found[1] is None else found[1] for found in _WORD_TEXT.finditer(xml)))]


_OPEN_DOCUMENT_PART = re.compile(r"content\.xml", re.IGNORECASE)
_IN_LINE_XML = re.compile(r"</?text:(?:span|a|meta|bookmark\S*|change\S*|soft-page-break)(?:\s[^<>]*)?>")


def _open_document_text(path: Path) -> Iterator[str]:
    is_flat = path.suffix.lower() == ".fodt"
    data = path.read_bytes() if is_flat else b" ".join(_parts(path, _OPEN_DOCUMENT_PART))
    xml = data.decode("latin-1")
    xml = _without(_without(xml, r"\A", r"<office:text\b[^<>]*>"), r"<office:binary-data>", r"</office:binary-data>")
    of_text = ("text:tracked-changes", "text:[a-z-]*(?:index|content)", "text:note-citation")
    for name in (*of_text, "office:annotation", "svg:title", "svg:desc"):
        xml = _without(xml, rf"<{name}(?=[\s>])", rf"</{name}>")
    return map(html.unescape, _from_bytes(_TAG.sub(" ", _IN_LINE_XML.sub("", xml))))


# How groups of a Rich Text file begin that are no text.
_RTF_ASIDE = re.compile(
    r"\s*\\(?:\*(?!\s*\\(?:shpinst|do|moMath(?:Para)?|footnote|[cdt]s)\d*\b)|(?:fonttbl|colortbl|stylesheet|info|pict|header"
    r"|footer|fldinst|nonesttables|listtext|pntext|shprslt|sp|m\w+P(?:r|ict))[lrf]?\b)"
)
_RTF_SIGN = re.compile(r"\\u-?\d+ ?(?:\?|\\'[0-9a-f]{2})?|\\'[0-9a-f]{2}", re.IGNORECASE)
_RTF_BREAK = re.compile(r"\\(?:par|line|tab|cell|row)\b ?|\\[\r\n]")
_RTF_WORD = re.compile(r"\\[a-z]+-?\d* ?|\\.|[{}\r\n]", re.IGNORECASE)


def _rich_text(path: Path) -> list[str]:
    kept, aside, before = [], [False], ""
    for piece in re.split(r"(?<!\\)([{}])", path.read_bytes().decode("latin-1")):
        if piece == "{":
            aside.append(aside[-1])
        elif piece == "}":
            aside.pop()
            if len(aside) < 2:
                break  # The file's only group ends.
        else:
            aside[-1] |= before == "{" and bool(_RTF_ASIDE.match(piece))
            kept.append("" if aside[-1] else piece)
        before = piece
    return [_RTF_WORD.sub("", _RTF_BREAK.sub(" ", _RTF_SIGN.sub("x", "".join(kept))))]


_CELL_TEXT = re.compile(r'"(?:source|input)"\s*:\s*(?:("(?:[^"\\]|\\.)*")|\[((?:\s*"(?:[^"\\]|\\.)*"\s*,?)*)\s*\])')
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def _notebook_text(path: Path) -> Iterator[str]:
    strings = (_STRING.findall(found[1] or found[2]) for found in _CELL_TEXT.finditer(decode(path)))
    return ("".join(json.loads(string, strict=False) for string in cell) for cell in strings)


# Settings of a file or of a block, and comments, each on a line of its own; and targets of links.
_ORG_MARK = re.compile(
    r"^[ \t]*(?:#\+.*|#[ \t].*|#$|:[\w-]+:.*|(?:SCHEDULED|DEADLINE|CLOSED|CLOCK):.*)|\[\[[^\[\]\n]*\](?=\[)",
    re.MULTILINE,
)


def _org_text(path: Path) -> list[str]:
    text = _without(decode(path), r"^[ \t]*#\+begin_comment", r"^[ \t]*#\+end_comment")
    return [_ORG_MARK.sub(" ", text)]


# Front matter in which each line is a setting, an item or the rest of one; lines with prose are counted.
_FRONT_MATTER = re.compile(
    r"""
    \A(---|\+\+\+)[ \t]*\n
    (?:(?>
        [\w\x80-\xff. -]{1,120}:[ \t]*(?:'[^']{0,1000}'|"[^"]{0,1000}")[ \t]*\n   # a value of several lines, perhaps
      | [ \t]+.*\n | [-#\]}].*\n | [\w\x80-\xff. "'-]{1,120}[:=].*\n | \n
    ))*?
    (?:\1|\.\.\.)[ \t]*(?:\n|\Z)
    """,
    re.ASCII | re.VERBOSE,
)
# Pictures as text and those of Joplin, targets of links, Obsidian's block ids, the properties and queries of Logseq,
# Joplin's metadata.
_MARKDOWN_MARK = re.compile(
    r"!\[[^\[\]\n]*\]\(:/[^()\n]*\)"
    r"|data:[\w/+.;=-]{0,100},[^\s)\"'>]*|(?<=\]\()[^()\s]*|!\[\[[^\[\]\n]*\]\]|(?<=\[\[)[^\[\]\n|]*\|"
    r"|[ \t]\^[\w\x80-\xff-]+$|^[ \t]*(?:- )?[\w\x80-\xff-]+:: .*$"
    r"|\{\{[^{}\n]*\}\}|\n\nid: [0-9a-f]{32}\n(?:\w+: ?.*(?:\n|\Z))*\Z",
    re.MULTILINE | re.ASCII,
)


def _markdown_bytes(path: Path) -> str:
    text = _FRONT_MATTER.sub("", utf8_of(path).replace(b"\r\n", b"\n").decode("latin-1"))
    text = _without(text, "<!--", "-->")
    text = _without(text, r"%%", r"%%")
    text = _without(text, r"^[ \t]*:(?:logbook|properties):[ \t]*$", r"^[ \t]*:end:")
    text = _without(text, r"^[ \t]*[`~]{3,}(?:dataview|dataviewjs|tasks|query|base)\b", r"^[ \t]*[`~]{3,}[ \t]*$")
    if re.search(r" [0-9a-f]{32}\.", path.name):
        text = _NOTION_MARK.sub(" ", text)
    return _MARKDOWN_MARK.sub(" ", text)


# Properties below the title, and pictures.
_NOTION_MARK = re.compile(r"\A# .*\n\n(?:[^\s:][^:\n]*: .*(?:\n|\Z))+|!\[[^\[\]\n]*\]\([^\s]*\)", re.ASCII)
_BRACES = re.compile(r"\{[^{}]*\}")
_MDX_MARK = re.compile(r"^(?:import|export)\b.*(?:\n.+)*|</?[a-z>][^<>]*>?", re.I | re.M | re.A)


def _mdx_text(path: Path) -> Iterator[str]:
    text = _markdown_bytes(path)
    for _ in range(6):
        text = _BRACES.sub(" ", text)
    return map(html.unescape, _from_bytes(_MDX_MARK.sub(" ", text)))


# The raw text of a file in parts, by its ending.
COUNTED: dict[str, Callable[[Path], Iterable[str]]] = {
    **dict.fromkeys((".html", ".htm"), lambda path: [_page_text(decode_html(path))]),
    **dict.fromkeys((".docx", ".docm", ".dotx", ".dotm"), _word_text),
    ".ipynb": _notebook_text,
    ".org": _org_text,
    **dict.fromkeys((".md", ".markdown"), lambda path: map(html.unescape, _from_bytes(_markdown_bytes(path)))),
    ".mdx": _mdx_text,
    **dict.fromkeys((".odt", ".ott", ".fodt"), _open_document_text),
    ".rtf": _rich_text,
}
