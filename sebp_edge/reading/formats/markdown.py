"""Finds what of a Markdown text is code, mathematics or a comment, in one pass; the rest of a text stays as it is.

No parser of Markdown says where these stand within lines. Blocks are told by how their lines begin, so that a list or a
quotation needs no nesting.
"""

import re
from dataclasses import dataclass, field
from html import unescape
from html.entities import html5
from typing import NamedTuple

from sebp_edge.reading.edits import Edit, Span, masked


class Syntax(NamedTuple):
    """A dialect of Markdown.

    Attributes:
        comments: what begins a comment.
        has_maths: whether dollar signs enclose mathematics.
        has_indented_code: whether four spaces begin code.
        marks: what else than comments is replaced outside of code; code does not matter without it.
    """

    comments: tuple[str, ...] = ("<!--",)
    has_maths: bool = False
    has_indented_code: bool = True
    marks: re.Pattern | None = None


COMMON = Syntax()


@dataclass
class Parts:
    """What stands where in a text, as spans of characters in order.

    Attributes:
        fenced: fenced code with the language that it names, in lower case; whole lines.
        code: all code, of blocks and within lines, and mathematics.
        inline: code within lines.
        comments: comments with their marks.
        is_cut: whether the last comment is never closed, and so hides the rest.
    """

    fenced: list[tuple[Span, str]] = field(default_factory=list)
    code: list[Span] = field(default_factory=list)
    inline: list[Span] = field(default_factory=list)
    comments: list[Span] = field(default_factory=list)
    is_cut: bool = False


# What may begin a comment, and code or mathematics. In indented code only entities and marks of Obsidian matter.
_MAY_HIDE = re.compile(r"%%|<!--|\]:\s*(?:#|<>)")
_CODE = re.compile(r"[`$]|~~~|^(?: {4}| {0,3}\t).*(?:\[\[| \^|&)", re.MULTILINE)
_ENTITY = re.compile(r"(?<!\\)&(?:(#)(?:\d{1,7}|[xX][0-9a-fA-F]{1,6})|[A-Za-z][A-Za-z\d]{1,31});", re.ASCII)


def find_parts(text: str, syntax: Syntax = COMMON) -> Parts:
    """Finds code, mathematics and comments in a text with Unix newlines; none in one where they do not matter."""
    is_marked = _ENTITY.search(text) or (syntax.marks and syntax.marks.search(text))
    may_hide = _MAY_HIDE.search(text)
    return _Search(text, syntax).parts if may_hide or (is_marked and _CODE.search(text)) else Parts()


def entities(text: str, code: list[Span]) -> list[Edit]:
    """Returns the edits that put signs in the place of entities of HTML, such as "&euml;", outside of code."""
    found = (mark for mark in _ENTITY.finditer(masked(text, code)) if mark[1] == "#" or mark[0][1:] in html5)
    return [(mark.start(), mark.end(), unescape(mark[0]).replace("\xa0", " ")) for mark in found]


# What lines of lists and quotations begin with.
_CONTAINERS = re.compile(r"[ \t>]*+(?:(?:[-*+]|\d{1,9}[.)])[ \t>]++)*+")
_MARK = re.compile(
    rf"""
      ^{_CONTAINERS.pattern}(?P<fence>`{{3,}}+(?=[^`\n]*$)|~{{3,}}+)[ \t]*(?P<language>[\w-]*)[^\n]*(?:\n|\Z)
    | ^[ ]{{0,3}}(?P<definition>
        \[[^\[\]\n]{{1,200}}\]:[ \t]*(?:\#|<>)[ \t]*(?:\n[ \t]*)?     # a link to nowhere, whose title is a comment
        (?:\((?:[^()\\\n]|\\.|\n(?!\s)){{0,2000}}+\)|"(?:[^"\\\n]|\\.|\n(?!\s)){{0,2000}}+"
        |'(?:[^'\\\n]|\\.|\n(?!\s)){{0,2000}}+')[ \t]*$
        | \[//\]:[ \t]*(?:\#|<>)[^\n]*)
    | ^(?P<indented>(?P<indent>[ ]{{4}}|[ ]{{0,3}}\t)[^\n]*(?:\n|\Z))
    | \\[^\n]
    | (?P<ticks>`+)
    | (?P<comment><!--|%%)
    | (?P<maths>\$)
    """,
    re.VERBOSE | re.MULTILINE,
)
# A line that is not indented, and so begins or ends a list.
_OUTER_LINE = re.compile(r"^(?:(?P<item>[ ]{0,3}(?:[-*+]|\d{1,9}[.)])[ \t])|\S)", re.MULTILINE)
_CLOSED_BY = {
    # An exclamation mark is one of the ends only if it is none of the beginning.
    "<!--": re.compile(r"-->|(?<!<!)--!>"),
    "%%": re.compile("%%"),
}
# Mathematics hide no comment, and go over no blank line.
_MATHS = re.compile(
    r"\$\$(?:(?!\$\$|%%|<!--|\n[ \t>]*\n)(?s:.))+\$\$|\$(?![\s$])(?:\\.|(?!%%|<!--)[^$\\\n])+(?<!\s)\$(?!\d)"
)
# What ends a paragraph, and so the code in it.
_PARAGRAPH_END = re.compile(
    r"\n(?=[ \t>]*+(?:\n|\Z|(?:[-*+]|\d{1,9}[.)])[ \t]|\#{1,6}[ \t]|`{3}[^`\n]*$|~{3}|\|))", re.MULTILINE
)
_MOST_TICKS = 64
# What ends an address such as "https://a.org/50%%20off", and its length in characters.
_ENDS_ADDRESS, _LONGEST_ADDRESS = " \t\n<>()[]{}\"'`|", 2_000
# "5 %%" may be a slip of the pen.
_AMOUNT = re.compile(r"\d ?\Z")


class _Search:
    """A search for the parts of one text, in a time that is linear in its length."""

    def __init__(self, text: str, syntax: Syntax):
        self.parts = Parts()
        self._text, self._syntax = text, syntax
        # From which position on nothing closes a mark, and from which length on nothing closes a fence or code.
        self._never_closed: dict[str, int] = {}
        self._fence_never_closed: dict[str, int] = {}
        self._ticks_never_closed: set[int] = set()
        self._paragraph_end = -1
        # Up to where newlines were looked for, and up to where this line has nothing to show.
        self._seen = self._clear = 0
        self._is_in_list, self._lines_seen, self._indented_end = False, 0, 0
        at = 0
        while found := _MARK.search(text, at):
            at = self._end_of(found)

    def _end_of(self, found: re.Match) -> int:
        """Returns where what begins with a mark ends, after noting it; that of the mark alone if nothing does."""
        begin = found.start()
        if found["fence"]:
            return self._fence(found)
        if found["definition"]:
            return self._hide(found.start("definition"), found.end())
        if found["ticks"]:
            return self._inline_code(begin, found.end(), len(found["ticks"]))
        if found["comment"] in self._syntax.comments:
            return self._comment(begin, found["comment"])
        if found["maths"] and self._syntax.has_maths and (maths := _MATHS.match(self._text, begin)):
            self.parts.code.append(maths.span())
            return maths.end()
        return self._indented_code(found) if found["indented"] else found.end()

    def _fence(self, found: re.Match) -> int:
        """Notes fenced code; what is never closed is none."""
        mark, length, begin = found["fence"][0], len(found["fence"]), found.start()
        if length >= self._fence_never_closed.get(mark, length + 1):
            return found.end("fence")
        # Indented further, it is a line of the code.
        most = found.start("fence") - begin + 3
        close = re.compile(rf"^[ \t>]{{0,{most}}}{mark}{{{length},}}[ \t]*(?:\n|\Z)", re.MULTILINE)
        if not (closed := close.search(self._text, found.end())):
            self._fence_never_closed[mark] = length
            return found.end("fence")
        self.parts.fenced.append(((begin, closed.end()), found["language"].lower()))
        self.parts.code.append((begin, closed.end()))
        return closed.end()

    def _indented_code(self, found: re.Match) -> int:
        """Notes a line of indented code, which it is not in a list, and not below a line of a paragraph."""
        begin = found.start()
        for line in _OUTER_LINE.finditer(self._text, self._lines_seen, begin):
            self._is_in_list = bool(line["item"])
        self._lines_seen = begin
        before = self._text[self._text.rfind("\n", 0, max(0, begin - 1)) + 1 : begin]
        follows = begin == self._indented_end or not before.strip()
        if self._is_in_list or not follows or not self._syntax.has_indented_code:
            return found.end("indent")
        self._indented_end = found.end()
        self.parts.code.append(found.span())
        return found.end()

    def _inline_code(self, begin: int, after: int, length: int) -> int:
        if after > self._paragraph_end:
            end = _PARAGRAPH_END.search(self._text, after)
            self._paragraph_end = end.start() if end else len(self._text)
            self._ticks_never_closed.clear()
        if length > _MOST_TICKS or length in self._ticks_never_closed:
            return after
        closed = re.compile(rf"(?<!`)`{{{length}}}(?!`)").search(self._text, after, self._paragraph_end)
        if not closed:
            self._ticks_never_closed.add(length)
            return after
        self.parts.inline.append((begin, closed.end()))
        self.parts.code.append((begin, closed.end()))
        return closed.end()

    def _comment(self, begin: int, mark: str) -> int:
        begins_line, end = self._begins_line(begin), self._end_of_comment(mark, begin)
        if begins_line:
            # One that is never closed hides the rest, as in browsers and in Obsidian.
            self.parts.is_cut = end is None
            self._clear = self._hide(begin, len(self._text) if end is None else end)
            return self._clear
        before = self._text[max(0, begin - _LONGEST_ADDRESS) : begin]
        if end is None or (mark == "%%" and (_is_in_address(before) or self._is_amount(before, begin, end))):
            return begin + len(mark)
        return self._hide(begin, end)

    def _is_amount(self, before: str, begin: int, end: int) -> bool:
        return bool(_AMOUNT.search(before)) and bool(_PARAGRAPH_END.search(self._text, begin, end))

    def _begins_line(self, position: int) -> bool:
        """Whether nothing stands before a position of a line but marks of lists and quotations, and comments."""
        line = self._text.rfind("\n", self._seen, position) + 1
        self._seen, self._clear = position, max(self._clear, line)
        self._clear = max(self._clear, _CONTAINERS.match(self._text, self._clear, position).end())
        return self._clear == position

    def _end_of_comment(self, mark: str, position: int) -> int | None:
        if position >= self._never_closed.get(mark, len(self._text)):
            return None
        if closed := _CLOSED_BY[mark].search(self._text, position + 2):
            return closed.end()
        self._never_closed[mark] = position
        return None

    def _hide(self, begin: int, end: int) -> int:
        self.parts.comments.append((begin, end))
        return end


def _is_in_address(before: str) -> bool:
    return "://" in before[max(map(before.rfind, _ENDS_ADDRESS)) + 1 :]
