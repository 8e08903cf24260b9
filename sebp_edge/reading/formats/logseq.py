"""Reads the marks of Logseq's notes as a person sees them: links as their text; no properties, queries or templates."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import accumulate

from sebp_edge.reading.edits import Edit, Span, edit, masked
from sebp_edge.reading.formats.markdown import Parts, Syntax

# Properties, macros, references, queries, drawers, planning and empty blocks.
_MARKS = re.compile(r"::|[{(\[]{2}|#\+|^[ \t]*:\w+:|:[ \t]*[<\[]|^[ \t]*[-*][ \t]*$", re.MULTILINE)
LOGSEQ = Syntax(has_maths=True, has_indented_code=False, marks=_MARKS)

# What stands in a mark; it may have braces itself, as in LaTeX.
_INNER = r"(?:[^{}\n]|\{(?:[^{}\n]|\{[^{}\n]*+\})*+\})*+"
# Words to be guessed, which the user wrote.
_CLOZE = re.compile(rf"\{{\{{cloze[ \t]+(?P<words>{_INNER})\}}\}}")
# What Logseq computes, or plays, in the place of the mark.
_MACROS = (
    "embed|query|renderer|namespace|function|cards|youtube|youtube-timestamp|video|vimeo|bilibili|tweet|twitter|"
    "zotero-imported-file|zotero-linked-file"
)
_MARK = re.compile(
    rf"""
      \{{\{{[ \t]*(?:\[\[)?(?:{_MACROS})\b{_INNER}\}}\}}
    | !?\(\([0-9a-fA-F-]{{36}}\)\)                                 # a reference to a block
    | \[(?P<label>[^\[\]\n]*)\]\((?:\[\[[^\[\]\n]*\]\]|\(\([0-9a-fA-F-]{{36}}\)\))\)
    | \[\[(?P<link>(?:[^\[\]\n]|\[\[[^\[\]\n]+\]\])++)\]\]          # whole names, which may have links within
    """,
    re.VERBOSE,
)
_BULLET = re.compile(r"([ \t]*)[-*](?:[ \t]+|$)")
_EMPTY_BULLET = re.compile(r"^[ \t]*[-*][ \t]*(?:\n|\Z)", re.MULTILINE)
_PROPERTY = re.compile(r"[ \t]*(?:[-*][ \t]+)?[\w/.?-]{1,100}::(?:[ \t]|$)")
# Those of a page are its first block.
_OF_PAGE = re.compile(r"\s*+(?:[-*][ \t]+)?(?:[ \t]*[\w/.?-]{1,100}::(?:[ \t][^\n]*)?(?:\n|\Z))++")
_TEMPLATE = re.compile(r"[ \t]*(?:[-*][ \t]+)?template::[ \t]*\S", re.IGNORECASE)
_PLANNED = re.compile(r"[ \t]*(?:SCHEDULED|DEADLINE|CLOSED):[ \t]*[<\[]")
# What begins a drawer, a query or a comment, and its last line.
_CLOSED_BY = {
    re.compile(r"[ \t]*:(?:LOGBOOK|PROPERTIES):[ \t]*$", re.IGNORECASE): ":END:",
    re.compile(r"[ \t]*(?:[-*][ \t]+)?#\+BEGIN_QUERY\b", re.IGNORECASE): "#+END_QUERY",
    re.compile(r"[ \t]*(?:[-*][ \t]+)?#\+BEGIN_COMMENT\b", re.IGNORECASE): "#+END_COMMENT",
}


def read_as_logseq(text: str, parts: Parts, comments: list[Edit]) -> str:
    """Returns a note's text without comments and marks."""
    text, code = edit(text, [*comments, *_Outline(text, parts).dropped()], parts.code)
    text, code = edit(text, list(_cloze_marks(text, code)), code)
    marks = _MARK.finditer(masked(text, code))
    text, code = edit(text, [(*mark.span(), _text_of(mark, text)) for mark in marks], code)
    return edit(text, [(*bullet.span(), "") for bullet in _EMPTY_BULLET.finditer(masked(text, code))], code)[0]


def page_properties(text: str) -> str:
    """Returns the properties at the beginning of a page, such as its aliases and tags; "" if it has none."""
    found = _OF_PAGE.match(text)
    return found[0] if found and not re.search(r"\btemplate::", found[0], re.IGNORECASE) else ""


def _cloze_marks(text: str, code: list[Span]) -> Iterator[Edit]:
    for cloze in _CLOZE.finditer(masked(text, code)):
        yield cloze.start(), cloze.start("words"), ""
        yield cloze.end("words"), cloze.end(), ""


def _text_of(mark: re.Match, text: str) -> str:
    if mark["link"]:
        name = text[slice(*mark.span("link"))].replace("[[", "").replace("]]", "")
        # A space within the brackets may be the only one between two words.
        name = name if text[mark.start() - 1 : mark.start()].strip() else name.lstrip()
        return name if text[mark.end() : mark.end() + 1].strip() else name.rstrip()
    return text[slice(*mark.span("label"))] if mark["label"] else ""


class _Outline:
    """The lines of a note, which are blocks with a bullet each."""

    def __init__(self, text: str, parts: Parts):
        self._lines = text.split("\n")
        self._begins = list(accumulate((len(line) + 1 for line in self._lines), initial=0))
        self._end = len(text)
        self._code = set()
        for (begin, end), _ in parts.fenced:
            # The first line may have a bullet.
            self._code.update(range(bisect_right(self._begins, begin), bisect_left(self._begins, end)))
        bullets = {number: _BULLET.match(line) for number, line in enumerate(self._lines) if number not in self._code}
        self._indents = {number: len(bullet[1].expandtabs(4)) for number, bullet in bullets.items() if bullet}
        self._bullets = [*self._indents, len(self._lines)]
        self._ends = {
            mark: [number for number, line in enumerate(self._lines) if line.strip().upper() == mark]
            for mark in _CLOSED_BY.values()
        }

    def dropped(self) -> Iterator[Edit]:
        """Yields the lines of properties, planning, drawers, queries and templates."""
        for number in sorted(self._dropped_lines()):
            yield self._begins[number], min(self._begins[number + 1], self._end), ""

    def _dropped_lines(self) -> set[int]:
        dropped, skipped_until = set(), 0
        # The open blocks, as their indent and first line; the indent of the template that is skipped.
        blocks: list[tuple[int, int]] = []
        template: int | None = None
        for number, line in enumerate(self._lines):
            indent = self._indents.get(number)
            if indent is not None:
                while blocks and blocks[-1][0] >= indent:
                    blocks.pop()
                if template is not None and indent <= template:
                    template = None
                blocks.append((indent, number))
            if template is not None or number < skipped_until:
                dropped.add(number)
            elif number in self._code:
                continue
            elif blocks and _TEMPLATE.match(line):
                template, begin = blocks[-1]
                dropped.update(range(begin, number + 1))
            elif closed := self._end_of_drawer(number):
                skipped_until = closed + 1
                dropped.add(number)
            elif _PROPERTY.match(line) or _PLANNED.match(line):
                dropped.add(number)
        return dropped

    def _end_of_drawer(self, number: int) -> int | None:
        """Returns the last line of the drawer or query that begins on a line; None if none does, or it has no end."""
        for begin, mark in _CLOSED_BY.items():
            if begin.match(self._lines[number]):
                ends = self._ends[mark]
                at = bisect_right(ends, number)
                next_bullet = self._bullets[bisect_right(self._bullets, number)]
                # It ends within its block.
                return ends[at] if at < len(ends) and ends[at] < next_bullet else None
        return None
