"""Reads web pages: the text that a browser shows, without scripts, styles and menus.

Python's own parser takes a time that grows with the square of a damaged page's size. Here a pattern finds the tags,
which never looks further than to the next one.
"""

import re
from html import unescape
from pathlib import Path

from sebp_edge.texts.documents import Unreadable
from sebp_edge.texts.formats.encodings import decode_html

_NOT_SHOWN = {
    *("head", "script", "style", "template", "noscript", "svg", "math", "canvas", "iframe", "object", "nav"),
    *("select", "button", "audio", "video"),
}
# Elements that begin and end a paragraph, and those that begin a line.
_PARAGRAPHS = {
    *("address", "article", "aside", "blockquote", "body", "center", "details", "dialog", "div", "dl", "fieldset"),
    *("figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "main", "ol", "p"),
    *("pre", "section", "summary", "table", "ul"),
}
_LINES = {"br", "caption", "dd", "dt", "li", "tr"}


_TAG = re.compile(r"""<(/?)([a-zA-Z][a-zA-Z0-9:-]{0,30})(?:"[^"<]*"|'[^'<]*'|[^"'<>])*+>|<[!?/][^<>]*>""")
_RAW = {"script", "style"}


def read_html(path: Path) -> str:
    """Returns the text of a web page: paragraphs apart, list items with a dash, cells of tables with bars between them.

    Raises:
        Unreadable: it has no text, or see `decode`.
    """
    first, *others = decode_html(path).split("<!--")
    html = first + "".join(part.partition("-->")[2] for part in others)
    page, end = _Page(), 0
    for tag in _TAG.finditer(html):
        page.add_text(html[end : tag.start()])
        if tag[2]:
            (page.end if tag[1] else page.begin)(tag[2].lower())
        end = tag.end()
    page.add_text(html[end:])
    if not (text := page.text()):
        raise Unreadable("no text")
    return text


class _Page:
    """Collects the text of a page, tag by tag."""

    def __init__(self):
        self._pieces: list[str] = []
        # The element that is not shown, if any, and how many of its kind are open within each other.
        self._hidden, self._depth = "", 0
        self._preformatted = 0

    def begin(self, tag: str) -> None:
        """Begins an element."""
        if tag == "body" and self._hidden == "head":
            self._hidden = ""  # The end tag of a head may be missing.
        if self._hidden:
            # What looks like a tag in a script may be a string.
            self._depth += tag == self._hidden and tag not in _RAW
        elif tag in _NOT_SHOWN:
            self._hidden, self._depth = tag, 1
        else:
            self._preformatted += tag == "pre"
            if tag in _PARAGRAPHS:
                self._pieces.append("\n\n")
            elif tag in _LINES:
                self._pieces.append("\n- " if tag == "li" else "\n")

    def end(self, tag: str) -> None:
        """Ends an element."""
        if self._hidden:
            self._depth -= tag == self._hidden
            if not self._depth:
                self._hidden = ""
            return
        self._preformatted = max(0, self._preformatted - (tag == "pre"))
        if tag in ("td", "th"):
            self._pieces.append(" | ")
        if tag in _PARAGRAPHS:
            self._pieces.append("\n\n")

    def add_text(self, html: str) -> None:
        """Adds the text between two tags."""
        if html and not self._hidden:
            text = unescape(html)
            self._pieces.append(text if self._preformatted else re.sub(r"\s+", " ", text))

    def text(self) -> str:
        """Returns the text, with at most one blank line between paragraphs."""
        lines = [line.strip().removesuffix("|").rstrip() for line in "".join(self._pieces).split("\n")]
        return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
