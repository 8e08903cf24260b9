"""Reads OpenDocument texts (.odt, .ott, and .fodt, which is one file of XML): what a person sees on the page.

That is also what tracked changes inserted; what they deleted, comments and hidden text are not seen.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from sebp_edge.reading.formats.layout import LINE, PARAGRAPH, SPACE, Layout
from sebp_edge.reading.formats.signs import in_unicode
from sebp_edge.reading.formats.xml_parts import (
    Attributes,
    Deadline,
    Handler,
    attribute,
    feed,
    number,
    open_package,
    xml_faults,
)
from sebp_edge.values.documents import NotRead, Unreadable

_DAMAGED = "damaged, or not an OpenDocument text"
# Elements whose text is not shown, or is the document's own and not its writer's, with what they are counted as.
_INDEXES = ("illustration-index", "table-index", "object-index", "user-index", "alphabetical-index")
_LEFT_OUT = {
    "annotation": "comments",
    **dict.fromkeys(("table-of-content", *_INDEXES), "tables of contents and indexes"),
    **dict.fromkeys(("tracked-changes", "note-citation", "forms", "script", "scripts", "master-styles", "meta"), ""),
    **dict.fromkeys(("settings", "image", "object", "object-ole", "plugin"), ""),
}
_PICTURES = "pictures and objects"
_DRAWN = {
    *("frame", "custom-shape", "g", "rect", "circle", "ellipse", "line", "path", "polygon", "polyline", "connector"),
    *("caption", "measure", "regular-polygon", "note-body"),
}
# Elements with a style, and what family it is of.
_FAMILIES = {"p": "paragraph", "h": "paragraph", "span": "text"}
_WHITE_SPACE = re.compile(r"[ \t\r\n]+")
# Of blanks that are counted; and styles that are based on each other.
_MAX_BLANKS, _MAX_BASES = 100, 20


def read_odt(path: Path) -> Iterator[str | NotRead]:
    """Yields the text of an OpenDocument text, and what of it was not read."""
    text = _Text()
    if path.suffix.lower() == ".fodt":
        with xml_faults(_DAMAGED), path.open("rb") as file:
            feed(file, text, Deadline())
    else:
        with open_package(path, _DAMAGED) as package:
            manifest = _Manifest()
            package.read("META-INF/manifest.xml", manifest)
            if manifest.is_encrypted or "encrypted-package" in package:
                raise Unreadable("encrypted; save it without a password to use it")
            text.has_own_styles = False
            package.read("styles.xml", text)
            text.has_own_styles = True
            package.read("content.xml", text)
    if not text.is_text:
        raise Unreadable(_DAMAGED)
    yield text.whole()
    yield from (NotRead(f"{kind}: {count:,}") for kind, count in sorted(text.left_out.items()) if kind and count > 0)


class _Manifest(Handler):
    """Handles the list of an archive's parts."""

    is_encrypted = False

    def start(self, name: str, attributes: Attributes) -> None:
        self.is_encrypted |= name == "encryption-data"


class _Text(Handler):
    """Handles the styles and the content.

    Attributes:
        is_text: whether there is a text document at all.
        has_own_styles: whether automatic styles are those of the content; those of page headers have the same names.
        left_out: how many elements of each kind were not read.
    """

    def __init__(self):
        self.is_text, self.has_own_styles = False, True
        self.left_out: Counter[str] = Counter()
        # The innermost layout is that of a note, if any.
        self._layouts, self._notes = [Layout()], []
        # How many elements around this place are not shown, and whether the innermost paragraph or drawing has text.
        self._skipped, self._has_text = 0, [False]
        # Of styles by family and name: the one that it is based on, whether it hides text, and its font. Of styles of
        # lists, the first numbers of levels with numbers.
        self._styles: dict[tuple[str, str], tuple[str, bool | None, str | None]] = {}
        # Those that styles name; and those of the open paragraphs and spans.
        self._named_fonts, self._fonts = {}, [""]
        self._numbered: dict[tuple[str, int], int] = {}
        self._style = "", ""  # The family and name of the one that is read.
        # Of the open lists, the style and the next number, and where lists of a style stopped.
        self._lists: list[tuple[str, int]] = []
        self._next: dict[tuple[str, int], int] = {}
        self._heading = ""

    def whole(self) -> str:
        """Returns the text with its notes at the end."""
        notes = "\n".join(f"[^{place}]: {note}" for place, note in enumerate(self._notes, start=1))
        return f"{self._layouts[0].text()}\n\n{notes}"

    def start(self, name: str, attributes: Attributes) -> None:
        if self._skipped or self._is_hidden(name, attributes):
            self._skipped += 1
            if name == "deletion":
                self.left_out["deleted texts"] += 1
            return
        layout = self._layouts[-1]
        if family := _FAMILIES.get(name):
            font = self._of_style((family, attribute(attributes, "style-name")), 2)
            self._fonts.append(self._fonts[-1] if font is None else font)
        match name:
            case "p" | "h":
                self._has_text.append(True)
                layout.separate(LINE if self._lists else PARAGRAPH)
                level = min(number(attributes, "outline-level", 1), 9)
                self._heading = "#" * level + " " if name == "h" and not self._lists else ""
            case "list":
                self._begin_list(attributes)
            case "list-item" if self._lists:
                style, following = self._lists[-1]
                following = number(attributes, "start-value", following)
                self._lists[-1] = style, following + 1
                layout.begin_item(following if self._is_numbered() else None)
            case "table":
                layout.separate(PARAGRAPH)
            case "table-row":
                layout.begin_row()
            case "table-cell":
                layout.begin_cell()
            case "s":
                self._add(" " * min(number(attributes, "c", 1), _MAX_BLANKS))
            case "tab":
                self._add("\t")
            case "line-break" if self._has_text[-1]:
                layout.break_line()
            case "ruby-text":
                self._add("(")
            case "style" | "default-style":
                self._style = attribute(attributes, "family"), attribute(attributes, "name")
                self._styles[self._style] = attribute(attributes, "parent-style-name"), None, None
            case "font-face":
                self._named_fonts[attribute(attributes, "name")] = attribute(attributes, "font-family")
            case "text-properties" if self._style in self._styles:
                base, hides, font = self._styles[self._style]
                if display := attribute(attributes, "display"):
                    hides = display == "none"
                if named := attribute(attributes, "font-name") or attribute(attributes, "font-family"):
                    font = self._named_fonts.get(named, named)
                self._styles[self._style] = base, hides, font
            case "list-style":
                self._style = "list", attribute(attributes, "name")
            case "list-level-style-number" if attribute(attributes, "num-format"):
                place = self._style[1], number(attributes, "level")
                self._numbered[place] = number(attributes, "start-value", 1)
            case "text-box":
                self.left_out[_PICTURES] -= 1
            case _ if name in _DRAWN:
                self._has_text.append(False)
                self.left_out[_PICTURES] += name == "frame"
                if name == "note-body":
                    self._layouts.append(Layout())
        self.is_text |= name == "text" and self._has_text == [False]

    def end(self, name: str) -> None:
        if self._skipped:
            self._skipped -= 1
            return
        layout = self._layouts[-1]
        if name in _FAMILIES:
            self._fonts.pop()
        if name in ("p", "h"):
            self._has_text.pop()
            layout.separate(LINE if self._lists else PARAGRAPH)
        elif name == "list" and self._lists:
            style, following = self._lists[-1]
            self._next[style, len(self._lists)] = following
            self._lists.pop()
            layout.end_list()
        elif name == "table-row":
            layout.end_row()
        elif name == "table":
            layout.separate(PARAGRAPH)
        elif name == "ruby-text":
            self._add(")")
        elif name in ("style", "default-style"):
            self._style = "", ""  # What is about the signs of lists is no style's.
        elif name in _DRAWN:
            self._has_text.pop()
            if name == "note-body":
                self._notes.append(" ".join(self._layouts.pop().text().split()))
                self._add(f"[^{len(self._notes)}]")

    def text(self, text: str) -> None:
        if self._skipped or not self._has_text[-1]:
            return
        text = in_unicode(_WHITE_SPACE.sub(" ", text.replace("\xad", "")), self._fonts[-1], self.left_out)
        if text[:1] == " ":
            self._layouts[-1].separate(SPACE)
        self._add(text.strip(" ").replace("\xa0", " "))
        if text[-1:] == " ":
            self._layouts[-1].separate(SPACE)

    def _add(self, text: str) -> None:
        if text and self._has_text[-1]:
            if self._heading:
                self._layouts[-1].add(self._heading)
                self._heading = ""
            self._layouts[-1].add(text)

    def _begin_list(self, attributes: Attributes) -> None:
        style = attribute(attributes, "style-name") or (self._lists[-1][0] if self._lists else "")
        goes_on = attribute(attributes, "continue-numbering") == "true" or attribute(attributes, "continue-list")
        place = style, len(self._lists) + 1
        following = self._next.get(place, 1) if goes_on else self._numbered.get(place, 1)
        self._lists.append((style, following))
        self._layouts[-1].begin_list(1 if self._is_numbered() else None)

    def _is_numbered(self) -> bool:
        return (self._lists[-1][0], len(self._lists)) in self._numbered

    def _is_hidden(self, name: str, attributes: Attributes) -> bool:
        """Returns whether an element is not shown; counts it."""
        if name == "automatic-styles":
            return not self.has_own_styles
        if (kind := _LEFT_OUT.get(name)) is None or (name == "meta" and self.is_text):
            family = _FAMILIES.get(name)
            if not (
                (name == "section" and attribute(attributes, "display") == "none")
                or attribute(attributes, "is-hidden") == "true"
                or (name == "table-row" and attribute(attributes, "visibility") in ("collapse", "filter"))
                or (family and self._of_style((family, attribute(attributes, "style-name")), 1))
            ):
                return False
            kind = "hidden texts"
        self.left_out[kind] += 1
        return True

    def _of_style(self, style: tuple[str, str], place: int) -> bool | str | None:
        """Returns one thing of a style, or of those that it is based on."""
        for _ in range(_MAX_BASES):
            found = self._styles.get(style)
            if found is None or found[place] is not None:
                return found and found[place]
            style = style[0], found[0]
        return None
