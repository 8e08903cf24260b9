"""Reads web pages: the text that a browser shows, without menus.

The parser follows the HTML standard, and nests as deep as browsers do, 512 elements. Without a limit (selectolax), the
time grows with the square of the depth.
"""

import re
from pathlib import Path

from turbohtml.saxparse import SaxHandler, sax_parse

from sebp_edge.reading.formats.encodings import decode_html
from sebp_edge.reading.formats.layout import LINE, PARAGRAPH, SPACE, Layout
from sebp_edge.values.documents import Unreadable

# Takes about 10 s and 1 GB.
MAX_TAGS = 5_000_000
# Where Notion names a workspace, in characters.
MAX_BEGINNING = 1_000

Attributes = tuple[tuple[str, str | None], ...]

_NOT_SHOWN = {
    *("head", "title", "script", "style", "template", "noframes", "noembed", "iframe", "canvas", "audio", "video"),
    *("select", "datalist", "meter", "progress"),
}
# In drawings and formulas.
_NOT_DRAWN = {"desc", "metadata", "defs", "symbol", "annotation", "annotation-xml"}
_FOREIGN = {"svg", "math"}
# Scripts show a page that begins hidden.
_PAGE = {"html", "body"}
_PREFORMATTED = {"pre", "listing", "xmp", "plaintext", "textarea"}
_LISTS = {"ul", "ol", "menu"}
_PARAGRAPHS = {
    *("address", "article", "aside", "blockquote", "details", "dialog", "dl", "fieldset", "figure", "footer", "form"),
    *("h1", "h2", "h3", "h4", "h5", "h6", "header", "hgroup", "hr", "listing", "main", "nav", "p", "plaintext", "pre"),
    *("search", "section", "table", "xmp"),
}
_LINES = {
    *("body", "caption", "center", "dd", "div", "dt", "figcaption", "legend", "li", "summary", "text", "textarea")
}
# Of a `style` attribute: what makes an element stand on lines of its own.
_BLOCK_DISPLAYS = {"block", "flex", "grid", "flow-root", "list-item", "table", "table-row"}
_CSS_COMMENT = re.compile(r"/\*.*?(?:\*/|\Z)", re.DOTALL)
# What separates elements from the text before and after them.
_GAPS = dict.fromkeys(_PARAGRAPHS, PARAGRAPH) | dict.fromkeys(_LINES, LINE)

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
    r"<(?!(?:area|base|br|col|embed|hr|img|input|link|meta|param|source|track|wbr)\b)([a-z][\w:-]*)"
    r"(\s(?:\"[^\"<]*\"|'[^'<]*'|[^\"'<>/]|/(?!>))*+)?/>",
    re.IGNORECASE,
)


def read_html(path: Path) -> str:
    """Returns the text of a web page; see `html_text`."""
    page = decode_html(path)
    if path.name == "index.html" and "<p>Workspace identifier: " in page[:MAX_BEGINNING]:
        raise Unreadable("the list of the pages that Notion exported")
    if not (text := html_text(page)):
        raise Unreadable("no text")
    return text


def html_text(html: str) -> str:
    """Returns the text that a browser shows of a web page, or of a part of one, without menus.

    Paragraphs are apart, list items have a dash or their number, and the cells of a table's row have bars between them.
    Text that is preformatted keeps its spaces. Closed details are read, since a reader may open them.
    """
    if html.count("<") > MAX_TAGS:
        raise Unreadable(f"more than {MAX_TAGS // 1_000_000} million tags; split it to use it")
    if _XHTML.search(html, 0, 2000):
        # There an element may be closed in its start tag, which HTML knows only of some.
        html = _SELF_CLOSED.sub(r"<\1\2></\1>", html)
    page = _Page()
    sax_parse(_renamed(_SURROGATES.sub("\ufffd", html)), page)
    return page.layout.text()


def _renamed(html: str) -> str:
    """Renames elements that the parser would repeat or leave out."""
    html = _NO_SCRIPT.sub(r"<\1noframes", _FORMATTING.sub(r"<\1x-", html))
    if _SHADOW.search(html):
        html = _TEMPLATE.sub(r"<\1applet template", html)  # Its end tag ends what is open in it, too.
    for root in _ROOTS:
        if first := root.search(html):
            html = html[: first.end()] + root.sub("<x-", html[first.end() :])
    return html


class _Page(SaxHandler):
    """Lays out the text of a page from the events of the parser."""

    def __init__(self):
        self.layout = Layout()
        # The number of open elements that are not shown, and of those that are drawings and formulas.
        self._hidden = self._foreign = 0
        # Whether text is preformatted here, and whether it is invisible; the same around each of the open elements, and
        # what separates them.
        self._preformatted = self._invisible = False
        self._outer: list[tuple[bool, bool, int]] = []
        self._menu = _Menu()

    def start_element(self, tag: str, attrs: Attributes) -> None:
        if self._hidden:
            self._hidden += 1
            return
        attributes = dict(attrs)
        style = _declarations(attributes["style"] or "") if "style" in attributes else {}
        if (self._foreign and tag in _NOT_DRAWN) or _is_hidden(tag, attributes, style):
            self._hidden = 1
            return
        gap = _GAPS.get(tag, LINE if style.get("display") in _BLOCK_DISPLAYS else 0)
        self._outer.append((self._preformatted, self._invisible, gap))
        if (visibility := style.get("visibility")) and tag not in _PAGE:
            self._invisible = visibility in ("hidden", "collapse")
        self._preformatted |= tag in _PREFORMATTED or style.get("white-space", "").startswith(("pre", "break-spaces"))
        self.layout.separate(gap)
        if tag == "br" and self._preformatted:
            self.layout.add_lines("\n")
        elif tag == "br":
            self.layout.break_line()
        elif tag == "li":
            self.layout.begin_item(_number(attributes.get("value")))
        elif tag in _LISTS:
            start = _number(attributes.get("start"))
            self.layout.begin_list(None if tag != "ol" else 1 if start is None else start)
        elif tag in ("td", "th"):
            self.layout.begin_cell()
        elif tag == "tr":
            self.layout.begin_row()
        elif tag in _FOREIGN:
            self._foreign += 1
        elif tag == "nav":
            self._menu.begin(self.layout.mark())
        elif tag == "x-a":
            self._menu.links += 1

    def end_element(self, tag: str) -> None:
        if self._hidden:
            self._hidden -= 1
            return
        self._preformatted, self._invisible, gap = self._outer.pop()
        if tag in _PREFORMATTED:
            self.layout.end_lines()
        elif tag in _LISTS:
            self.layout.end_list()
        elif tag == "tr":
            self.layout.end_row()
        elif tag in _FOREIGN:
            self._foreign -= 1
        elif tag == "nav":
            if self._menu.end():
                self.layout.cut(self._menu.mark)
        elif tag == "x-a":
            self._menu.links -= 1
        self.layout.separate(gap)

    def characters(self, data: str) -> None:
        if self._hidden or self._invisible:
            return
        if "<" in data:
            data = _RENAMED.sub(r"<\1", data).replace("<noframes", "<noscript").replace("</noframes", "</noscript")
        data = data.replace("\xad", "")  # A soft hyphen is not shown.
        if self._preformatted:
            self.layout.add_lines(data.replace("\xa0", " "))
            self._menu.count(len(data))
            return
        data = _WHITE_SPACE.sub(" ", data)
        text = data.strip(" ")
        if data[:1] == " " or not text.strip():
            self.layout.separate(SPACE if data else 0)
        if text.strip():
            self.layout.add(text.replace("\xa0", " "))
            self._menu.count(len(text))
            if data[-1] == " ":
                self.layout.separate(SPACE)


class _Menu:
    """Tells whether a `nav` is a menu: most of its text is links. One without an end tag holds the rest of the page."""

    def __init__(self):
        # The number of open links and menus.
        self.links = self._depth = 0
        self.mark = (0, True)
        self._linked = self._other = 0

    def begin(self, mark: tuple[int, bool]) -> None:
        """Begins a `nav` at this mark of the layout."""
        if not self._depth:
            self.mark, self._linked, self._other = mark, 0, 0
        self._depth += 1

    def count(self, num_characters: int) -> None:
        if self.links:
            self._linked += num_characters
        else:
            self._other += num_characters

    def end(self) -> bool:
        """Returns whether what is between here and the mark is a menu."""
        self._depth -= 1
        return not self._depth and self._linked > self._other


def _is_hidden(tag: str, attributes: dict[str, str | None], style: dict[str, str]) -> bool:
    """Returns whether a browser does not show an element."""
    if tag in _NOT_SHOWN:
        return True
    if tag == "applet" and "template" in attributes:
        return "shadowrootmode" not in attributes
    if tag in _PAGE:
        return False
    if style.get("content-visibility") == "hidden":
        return True
    if display := style.get("display"):
        return display == "none"
    if tag == "dialog" and "open" not in attributes:
        return True
    return "popover" in attributes or (attributes.get("hidden", "until-found") or "").lower() != "until-found"


def _declarations(style: str) -> dict[str, str]:
    """Returns the values of a `style` attribute by their names."""
    pairs = (declaration.partition(":") for declaration in _CSS_COMMENT.sub("", style).lower().split(";"))
    return {name.strip(): value.partition("!")[0].strip() for name, _, value in pairs}


def _number(text: str | None) -> int | None:
    """Returns the number in an attribute, or None."""
    match = re.match(r"\s*(-?\d{1,9})", text or "")
    return int(match[1]) if match else None
