"""Reads web pages: the text that a browser shows, without menus.

The parser follows the HTML standard and nests at most as deep as browsers do, so that it takes linear time.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from turbohtml.saxparse import SaxHandler, sax_parse

from sebp_edge.texts.documents import Unreadable
from sebp_edge.texts.formats.encodings import decode_html

# Takes about 10 s and 1 GB.
MAX_TAGS = 5_000_000
# A longer table row with several lines in a cell is laid out as paragraphs, in characters.
LONGEST_ROW = 1000
# Of a list within lists, in levels.
MAX_INDENT = 9

Attributes = tuple[tuple[str, str | None], ...]

_NOT_SHOWN = {
    *(
        "head",
        "title",
        "script",
        "style",
        "template",
        "noscript",
        "noframes",
        "noembed",
        "iframe",
        "canvas",
        "audio",
        "video",
    ),
    *("select", "datalist", "meter", "progress", "desc", "metadata", "defs", "symbol", "annotation", "annotation-xml"),
}
_PREFORMATTED = {"pre", "listing", "xmp", "plaintext", "textarea"}
# What separates two texts, at least.
_SEPARATORS = ("", " ", "\n", "\n\n")
_SPACE, _LINE, _PARAGRAPH = 1, 2, 3
_BREAKS = {
    **dict.fromkeys(
        (
            *("address", "article", "aside", "blockquote", "details", "dialog", "dl", "fieldset", "figure", "footer"),
            *("form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hgroup", "hr", "listing", "main", "menu", "nav"),
            *("ol", "p", "plaintext", "pre", "search", "section", "table", "ul", "xmp"),
        ),
        _PARAGRAPH,
    ),
    **dict.fromkeys(
        (
            *(
                "body",
                "caption",
                "center",
                "dd",
                "div",
                "dt",
                "figcaption",
                "legend",
                "li",
                "summary",
                "text",
                "textarea",
            ),
            "tr",
        ),
        _LINE,
    ),
}
_LISTS = {"ul", "ol", "menu"}

_SURROGATES = re.compile("[\ud800-\udfff]")
_WHITE_SPACE = re.compile(r"[ \t\n\f\r]+")
# The standard opens these again in each paragraph if they were left open, with all attributes, so that a small page
# could fill the memory. Under another name they are elements like others.
_NAMES = r"(?:a|b|big|code|em|font|i|nobr|s|small|strike|strong|tt|u)[\s/>]"
_FORMATTING = re.compile(rf"<(/?)(?={_NAMES})", re.IGNORECASE)
_RENAMED = re.compile(rf"<(/?)x-(?={_NAMES})", re.IGNORECASE)
# Of each of these it collects the attributes of all.
_ROOTS = [re.compile(rf"<(?={name}[\s/])", re.IGNORECASE) for name in ("html", "body")]
# The parser reads pages as if scripts were off. As where they are on, tags mean nothing in there.
_NO_SCRIPT = re.compile(r"<(/?)noscript(?=[\s/>])", re.IGNORECASE)
# What a component shows stands in a template with this attribute, which the parser leaves out.
_SHADOW = re.compile(r"<template\s[^<>]{0,200}\bshadowrootmode\b", re.IGNORECASE)
_TEMPLATE = re.compile(r"<(/?)template(?=[\s/>])", re.IGNORECASE)
_XHTML = re.compile(r"<\?xml\s|<html\s[^<>]*\bxmlns\s*=", re.IGNORECASE)
_SELF_CLOSED = re.compile(
    r"<(?!(?:area|base|br|col|embed|hr|img|input|link|meta|param|source|track|wbr)\b)([a-z][\w:-]*)(\s[^<>]*)?/>",
    re.IGNORECASE,
)


def read_html(path: Path) -> str:
    """Returns the text of a web page; see `html_text`.

    Raises:
        Unreadable: it has no text or too many tags, or see `decode`.
    """
    if not (text := html_text(decode_html(path))):
        raise Unreadable("no text")
    return text


def html_text(html: str) -> str:
    """Returns the text that a browser shows of a web page, or of a part of one, without menus.

    Paragraphs are apart, list items have a dash or their number, and the cells of a table's row have bars between them.
    Text that is preformatted keeps its spaces. Closed details are read, since a reader may open them.

    Raises:
        Unreadable: it has more than `MAX_TAGS` tags.
    """
    if html.count("<") > MAX_TAGS:
        raise Unreadable(f"more than {MAX_TAGS // 1_000_000} million tags; split it to use it")
    if _XHTML.search(html, 0, 2000):
        # There an element may be closed in its start tag, which HTML knows only of some.
        html = _SELF_CLOSED.sub(r"<\1\2></\1>", html)
    page = _Page()
    sax_parse(_renamed(_SURROGATES.sub("\ufffd", html)), page)
    return page.text()


def _renamed(html: str) -> str:
    """Renames elements that the parser would repeat or leave out."""
    html = _NO_SCRIPT.sub(r"<\1noframes", _FORMATTING.sub(r"<\1x-", html))
    if _SHADOW.search(html):
        html = _TEMPLATE.sub(r"<\1applet template", html)  # Its end tag ends what is open in it, too.
    for root in _ROOTS:
        if first := root.search(html):
            html = html[: first.end()] + root.sub("<x-", html[first.end() :])
    return html


@dataclass(slots=True)
class _Row:
    """A table's row that is open.

    Attributes:
        start: the number of pieces before it.
        gap: what separates it from the text before it.
        is_fresh: whether it begins the page, or a cell.
        cells: the indices of the pieces that separate its cells.
        has_cell: whether a cell was begun.
        has_paragraphs: whether a cell has several, or has lines that must be kept.
    """

    start: int
    gap: int
    is_fresh: bool
    cells: list[int] = field(default_factory=list)
    has_cell: bool = False
    has_paragraphs: bool = False


class _Page(SaxHandler):
    """Collects the text of a page from the events of the parser."""

    def __init__(self):
        self._pieces: list[str] = []
        # What separates the next text, what stands before it in a list, and whether it begins the page or a cell.
        self._gap, self._marker, self._is_fresh = 0, "", True
        # The number of open elements that are not shown.
        self._hidden = 0
        # Whether text is preformatted, here and in each of the open elements around.
        self._preformatted, self._outer = False, []
        # The next number of each open list, None without numbers.
        self._lists: list[int | None] = []
        self._rows: list[_Row] = []
        self._menu = _Menu()

    def start_element(self, tag: str, attrs: Attributes) -> None:
        """Begins an element."""
        if self._hidden:
            self._hidden += 1
            return
        attributes = dict(attrs)
        style = _declarations(attributes["style"] or "") if "style" in attributes else {}
        if _is_hidden(tag, attributes, style):
            self._hidden = 1
            return
        self._outer.append(self._preformatted)
        self._preformatted |= tag in _PREFORMATTED or style.get("white-space", "").startswith(("pre", "break-spaces"))
        self._break(tag)
        if tag == "br":
            self._break_line()
        elif tag == "li":
            self._marker = self._next_marker(attributes)
        elif tag in _LISTS:
            self._lists.append(_number(attributes.get("start"), 1) if tag == "ol" else None)
        elif tag in ("td", "th"):
            self._begin_cell()
        elif tag == "tr":
            self._begin_row()
        elif tag == "nav":
            self._menu.begin(len(self._pieces), self._is_fresh)
        elif tag == "x-a":
            self._menu.links += 1

    def end_element(self, tag: str) -> None:
        """Ends an element."""
        if self._hidden:
            self._hidden -= 1
            return
        self._preformatted = self._outer.pop()
        if tag in _PREFORMATTED and self._pieces:
            self._pieces[-1] = self._pieces[-1].rstrip()
        elif tag in _LISTS:
            self._lists.pop()
        elif tag == "tr":
            self._end_row()
        elif tag == "nav":
            self._end_menu()
        elif tag == "x-a":
            self._menu.links -= 1
        self._break(tag)

    def characters(self, data: str) -> None:
        """Adds text."""
        if self._hidden:
            return
        if "<" in data:
            data = _RENAMED.sub(r"<\1", data).replace("<noframes", "<noscript").replace("</noframes", "</noscript")
        data = data.replace("\xad", "")  # A soft hyphen is not shown.
        if not self._preformatted:
            data = _WHITE_SPACE.sub(" ", data)
            text = data.strip(" ")
            if not text.strip():
                self._gap = max(self._gap, _SPACE if data else 0)
                return
            if data[0] == " ":
                self._gap = max(self._gap, _SPACE)
        else:
            text = data
            if self._rows and "\n" in data:
                self._rows[-1].has_paragraphs = True
        self._separate()
        self._pieces.append(text.replace("\xa0", " "))
        self._menu.add(len(text))
        if not self._preformatted and data[-1] == " ":
            self._gap = _SPACE

    def text(self) -> str:
        """Returns the text of the whole page."""
        return "".join(self._pieces).rstrip().lstrip("\n")

    def _break(self, tag: str) -> None:
        """Begins a line or a paragraph, if the element does so; a list within a list is no paragraph."""
        gap = _BREAKS.get(tag, 0)
        self._gap = max(self._gap, _LINE if tag in _LISTS and self._lists else gap)

    def _break_line(self) -> None:
        if self._preformatted:
            self._separate()
            self._pieces.append("\n")
        else:
            self._gap = _LINE if self._gap < _LINE else _PARAGRAPH

    def _separate(self) -> None:
        """Adds what stands before the next text."""
        if not self._is_fresh:
            self._pieces.append(_SEPARATORS[self._gap])
            if self._gap == _PARAGRAPH and self._rows:
                self._rows[-1].has_paragraphs = True
        self._pieces.append(self._marker)
        self._gap, self._marker, self._is_fresh = 0, "", False

    def _next_marker(self, attributes: dict[str, str | None]) -> str:
        if not self._lists:
            return "- "
        indent = "  " * min(len(self._lists) - 1, MAX_INDENT)
        if self._lists[-1] is None:
            return f"{indent}- "
        number = _number(attributes.get("value"), self._lists[-1])
        self._lists[-1] = number + 1
        return f"{indent}{number}. "

    def _begin_row(self) -> None:
        if self._rows:
            self._rows[-1].has_paragraphs = True  # What holds tables lays a page out.
        self._rows.append(_Row(len(self._pieces), self._gap, self._is_fresh))
        if not self._is_fresh:
            self._pieces.append(_SEPARATORS[self._gap])
        self._gap, self._is_fresh = 0, True

    def _begin_cell(self) -> None:
        if self._rows:
            row = self._rows[-1]
            if row.has_cell:
                row.cells.append(len(self._pieces))
                self._pieces.append("")
            row.has_cell = True
            self._gap, self._marker, self._is_fresh = 0, "", True

    def _end_row(self) -> None:
        row, pieces = self._rows.pop(), self._pieces
        begin = row.start + (not row.is_fresh)
        while row.cells and row.cells[-1] == len(pieces) - 1:
            del pieces[row.cells.pop() :]  # Empty cells at the end.
        if len(pieces) == begin:
            del pieces[row.start :]
            self._gap, self._marker, self._is_fresh = row.gap, "", row.is_fresh
            return
        if row.cells and not row.has_paragraphs:
            lines = [index for index in range(begin, len(pieces)) if pieces[index] == "\n"]
            if lines and sum(len(pieces[index]) for index in range(begin, len(pieces))) > LONGEST_ROW:
                row.has_paragraphs = True
            else:
                for index in lines:
                    pieces[index] = " "
        previous = begin - 1
        for index in row.cells:
            is_empty = index == previous + 1
            if row.has_paragraphs:
                pieces[index] = "" if is_empty else "\n\n"
            else:
                pieces[index] = "| " if is_empty else " | "
            previous = index
        self._gap, self._marker, self._is_fresh = _PARAGRAPH if row.has_paragraphs else _LINE, "", False

    def _end_menu(self) -> None:
        menu = self._menu
        if menu.end():
            del self._pieces[menu.start :]
            self._is_fresh = menu.is_fresh


class _Menu:
    """Tells whether a `nav` is a menu: most of its text is links. One without an end tag holds the rest of the page."""

    def __init__(self):
        # The number of open links and menus.
        self.links = self._depth = 0
        self.start, self.is_fresh = 0, True
        self._linked = self._other = 0

    def begin(self, start: int, is_fresh: bool) -> None:
        """Begins a `nav` before the piece with this index."""
        if not self._depth:
            self.start, self.is_fresh, self._linked, self._other = start, is_fresh, 0, 0
        self._depth += 1

    def add(self, num_characters: int) -> None:
        """Counts text."""
        if self.links:
            self._linked += num_characters
        else:
            self._other += num_characters

    def end(self) -> bool:
        """Returns whether what is between here and the start is a menu."""
        self._depth -= 1
        return not self._depth and self._linked > self._other


def _is_hidden(tag: str, attributes: dict[str, str | None], style: dict[str, str]) -> bool:
    """Returns whether a browser does not show an element."""
    if tag in _NOT_SHOWN:
        return True
    if tag == "applet" and "template" in attributes:
        return "shadowrootmode" not in attributes
    if tag in ("html", "body"):
        return False  # Scripts show a page that begins hidden.
    if style.get("visibility") in ("hidden", "collapse"):
        return True
    if display := style.get("display"):
        return display == "none"
    if tag == "dialog" and "open" not in attributes:
        return True
    return "popover" in attributes or (attributes.get("hidden", "until-found") or "").lower() != "until-found"


def _declarations(style: str) -> dict[str, str]:
    """Returns the values of a `style` attribute by their names."""
    pairs = (declaration.partition(":") for declaration in style.lower().split(";"))
    return {name.strip(): value.partition("!")[0].strip() for name, _, value in pairs}


def _number(text: str | None, default: int) -> int:
    """Returns the number in an attribute."""
    match = re.match(r"\s*(-?\d{1,9})", text or "")
    return int(match[1]) if match else default
