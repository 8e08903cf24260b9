"""Finds what of a Markdown text is code, mathematics or a comment, with a CommonMark parser (markdown-it-py).

The parser only says where these are. Nothing is rendered, so that the rest of a text stays as it is.
"""

import functools
import re
import time
from bisect import bisect_right
from dataclasses import dataclass, field
from html import unescape
from html.entities import html5
from itertools import accumulate
from typing import NamedTuple

from markdown_it import MarkdownIt, rules_block, rules_inline
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline

from sebp_edge.reading.edits import Edit, Span, masked
from sebp_edge.values.documents import Unreadable

# Of the processor, so that a busy machine reads the same texts.
MAX_SECONDS = 20
# The parser keeps about 250 bytes a line, which is too much for so many lines of this length, in characters, or less.
MAX_SHORT_LINES, SHORT = 100_000, 6
# Lists and quotes within each other; what is deeper is taken for prose.
_MAX_NESTING = 100


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


def find_parts(text: str, syntax: Syntax = COMMON) -> Parts:
    """Finds code, mathematics and comments in a text with Unix newlines; none in one where they do not matter.

    Raises:
        Unreadable: the text takes too long to parse, or has too many short lines.
    """
    is_marked = _ENTITY.search(text) or (syntax.marks and syntax.marks.search(text))
    if not ((is_marked and _CODE.search(text)) or _MAY_HIDE.search(text)):
        return Parts()
    if (num_lines := text.count("\n")) > MAX_SHORT_LINES and len(text) < SHORT * num_lines:
        raise Unreadable(f"more than {MAX_SHORT_LINES:,} very short lines; split it to use it")
    search, parser = _Search(text, syntax), _parser(syntax)
    parser.block.parse(text, parser, {"search": search}, _LastToken())
    search.parts.code.sort()
    return search.parts


def entities(text: str, code: list[Span]) -> list[Edit]:
    """Returns the edits that put signs in the place of entities of HTML, such as "&euml;", outside of code."""
    found = (mark for mark in _ENTITY.finditer(masked(text, code)) if mark[1] == "#" or mark[0][1:] in html5)
    return [(mark.start(), mark.end(), unescape(mark[0]).replace("\xa0", " ")) for mark in found]


# ---------------------------------------------------------------------------------------------- the parser

_CLOSED_BY = {
    # An exclamation mark is one of the ends only if it is none of the beginning.
    "<!--": re.compile(r"-->|(?<!<!)--!>"),
    "%%": re.compile("%%"),
    "$$": re.compile(r"\$\$"),
}
# What may begin a comment, and code or mathematics. In indented code only entities and marks of Obsidian matter.
_MAY_HIDE = re.compile(r"%%|<!--|\]:\s*(?:#|<>)")
_CODE = re.compile(r"[`$]|~~~|^(?: {4}| {0,3}\t).*(?:\[\[| \^|&)", re.MULTILINE)
_ENTITY = re.compile(r"(?<!\\)&(?:(#)(?:\d{1,7}|[xX][0-9a-fA-F]{1,6})|[A-Za-z][A-Za-z\d]{1,31});", re.ASCII)
# What ends an address such as "https://a.org/50%%20off", and its length in characters.
_ENDS_ADDRESS, _LONGEST_ADDRESS = " \t\n<>()[]{}\"'`|", 2_000
# "5 %%" may be a slip of the pen.
_AMOUNT = re.compile(r"\d ?\Z")
# Mathematics hide no comment.
_MATHS = re.compile(r"\$\$(?:(?!\$\$|%%|<!--)(?s:.))+\$\$|\$(?![\s$])(?:\\.|(?!%%|<!--)[^$\\\n])+(?<!\s)\$(?!\d)")
_NO_MATHS = re.compile(r"\n[ \t>]*\n|%%|<!--")
# A definition of a link to nowhere, whose title is a comment.
_NOWHERE = re.compile(r"\[//\]:[ \t]*(?:#|<>)")


class _LastToken(list):
    """The parser's tokens, of which only the last one is looked at: a large text has millions."""

    def append(self, token) -> None:
        self[:] = [token]


class _Search:
    """A search for the parts of one text."""

    def __init__(self, text: str, syntax: Syntax):
        self.text = text
        self.syntax = syntax
        self.parts = Parts()
        self.hidden_until = 0
        self._until = time.thread_time() + MAX_SECONDS
        self._begins = [0, *(match.end() for match in re.finditer("\n", text))]
        self.last_line = self.line_of(len(text.rstrip()))
        # From which position on nothing closes a mark, and from which length on nothing closes a fence.
        self._never_closed: dict[str, int] = {}
        self.fence_never_closed: dict[str, int] = {}
        self._pieces: list[tuple[int, int]] = []

    def check_time(self) -> None:
        if time.thread_time() > self._until:
            raise Unreadable(f"its Markdown takes longer than {MAX_SECONDS} seconds to read; split it to use it")

    def line_of(self, position: int) -> int:
        return bisect_right(self._begins, position) - 1

    # ---- comments and mathematics

    def comment_at(self, text: str, position: int) -> str:
        """Returns the mark of a comment that stands at a position, or ""."""
        if not text.startswith(self.syntax.comments, position):
            return ""
        return next(mark for mark in self.syntax.comments if text.startswith(mark, position))

    def end_of(self, mark: str, position: int) -> int | None:
        """Returns where what a mark begins ends; None if nothing closes it."""
        if position >= self._never_closed.get(mark, len(self.text)):
            return None
        closed = _CLOSED_BY[mark].search(self.text, position + 2)
        if not closed:
            self._never_closed[mark] = position
            return None
        return closed.end()

    def hide(self, begin: int, end: int) -> None:
        self.parts.comments.append((begin, end))
        self.hidden_until = max(self.hidden_until, end)

    # ---- lines and their content

    def place(self, pieces: list[Span]) -> str:
        """Sets the content that is parsed next, from the text's pieces in it, a line each; returns it."""
        sizes = accumulate((end - begin + 1 for begin, end in pieces), initial=0)
        self._pieces = [(at, begin) for at, (begin, _) in zip(sizes, pieces, strict=False)]
        return "\n".join(self.text[begin:end] for begin, end in pieces)

    def in_text(self, position: int) -> int:
        """Returns where a position of the content is in the text."""
        at, begin = self._pieces[bisect_right(self._pieces, position, key=lambda piece: piece[0]) - 1]
        return begin + position - at

    def in_content(self, position: int) -> int:
        """Returns where a position of the text is in the content."""
        at, begin = self._pieces[max(0, bisect_right(self._pieces, position, key=lambda piece: piece[1]) - 1)]
        return at + max(0, position - begin)


@functools.cache
def _parser(syntax: Syntax) -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"maxNesting": _MAX_NESTING, "inline_definitions": True}).enable("table")
    block, inline = parser.block.ruler, parser.inline.ruler
    alternatives = {rule.name: rule.alt for rule in block.__rules__}
    for name, rule in _BLOCK_RULES.items():
        block.at(name, rule, {"alt": alternatives[name]})
    if not syntax.has_indented_code:
        parser.disable("code")
    block.before("table", "comment", _skip, {"alt": ["paragraph", "reference", "blockquote", "list"]})
    block.before("table", "prose", _prose, {"alt": []})
    inline.at("backticks", _inline_code)
    inline.before("escape", "comment", _inline_comment)
    if syntax.has_maths:
        inline.before("escape", "maths", _inline_maths)
    inline.enableOnly([*(["maths"] if syntax.has_maths else []), *_INLINE_RULES])
    parser.inline.ruler2.enableOnly([])
    parser.inline.terminator_re = _BEGINS_MARK
    return parser


_INLINE_RULES = ["text", "comment", "escape", "backticks", "autolink", "html_inline"]
# What these rules and that for mathematics begin with; the parser would try them at each sign of punctuation.
_BEGINS_MARK = re.compile(r"[%<\\`$]")


def _search(state: StateBlock | StateInline) -> _Search:
    return state.env["search"]


# ---- rules for blocks


def _skip(state: StateBlock, line: int, end_line: int, silent: bool) -> bool:
    """Skips comments and mathematics at the beginning of a block, and the rest of those that began before."""
    search = _search(state)
    search.check_time()
    begin = state.bMarks[line] + state.tShift[line]
    if silent:
        if state.is_code_block(line):
            return False
        return bool(
            search.comment_at(state.src, begin) or _maths_end(search, begin) or _NOWHERE.match(state.src, begin)
        )
    position = max(begin, search.hidden_until)
    if position == begin and state.is_code_block(line):
        return False
    while True:
        position = state.skipSpaces(position)
        if mark := search.comment_at(state.src, position):
            end = search.end_of(mark, position)
            if end is None:
                # It hides the rest, as in browsers and in Obsidian.
                end, search.parts.is_cut = len(state.src), True
            search.hide(position, end)
        elif end := _maths_end(search, position):
            search.parts.code.append((position, end))
            search.hidden_until = end
        else:
            break
        position = end
    return position > begin and _go_on(state, line, end_line, position)


def _maths_end(search: _Search, position: int) -> int | None:
    """Returns where a block of mathematics ends that begins at a position; None if none does."""
    is_maths = search.syntax.has_maths and search.text.startswith("$$", position)
    end = search.end_of("$$", position) if is_maths else None
    return end if end and not _NO_MATHS.search(search.text, position, end) else None


def _go_on(state: StateBlock, line: int, end_line: int, position: int) -> bool:
    """Lets the parser go on at a position of this line or a later one, as if a line began there."""
    last = _search(state).line_of(position)
    if last >= end_line:
        state.line = end_line
        return True
    if not state.src[position : state.eMarks[last]].strip():
        state.line = last + 1
        return True
    state.bMarks[last], state.tShift[last], state.sCount[last] = position, 0, state.blkIndent
    state.line = last
    return last > line


def _prose(state: StateBlock, line: int, end_line: int, silent: bool) -> bool:
    """Finds a paragraph whose lines all begin with letters, so that no other rule applies: most of a text, at once."""
    after = line
    while after < state.lineMax and not state.isEmpty(after):
        if not state.src[state.bMarks[after] + state.tShift[after]].isalpha():
            return False
        after += 1
    if state.is_code_block(line):
        return False
    _parse_content(state, _contents(state, line, after))
    state.line = after
    return True


def _with_content(name: str, state: StateBlock, line: int, end_line: int, silent: bool) -> bool:
    """Finds a block that has lines of text by the parser's own rule, and parses its content."""
    if not getattr(rules_block, name)(state, line, end_line, silent):
        return False
    if not silent:
        lines = _contents(state, line, state.line)
        if name == "table":
            for begin, end in lines:
                for cell in re.finditer(r"(?:\\.|[^|\\])+", state.src[begin:end]):
                    _parse_content(state, [(begin + cell.start(), begin + cell.end())])
        else:
            _parse_content(state, lines)
    return True


def _contents(state: StateBlock, line: int, after: int) -> list[Span]:
    return [(state.bMarks[n] + state.tShift[n], state.eMarks[n]) for n in range(line, after)]


def _parse_content(state: StateBlock, pieces: list[Span]) -> None:
    search = _search(state)
    content = search.place(pieces)
    marks = ("`", *search.syntax.comments, *("$" * search.syntax.has_maths))
    if any(mark in content for mark in marks):
        state.md.inline.parse(content, state.md, state.env, _LastToken())


def _fence(state: StateBlock, line: int, end_line: int, silent: bool) -> bool:
    """Finds fenced code; what is never closed is none."""
    begin = state.bMarks[line] + state.tShift[line]
    if not state.src.startswith(("`", "~"), begin):
        return False
    search, mark = _search(state), state.src[begin]
    length = state.skipCharsStr(begin, mark) - begin
    may_close = length < search.fence_never_closed.get(mark, length + 1)
    if not (may_close and rules_block.fence(state, line, end_line, silent)):
        return False
    if silent:
        return True
    token = state.tokens[-1]
    last = state.line - 1
    closing = state.src[state.bMarks[last] + state.tShift[last] : state.eMarks[last]].strip()
    is_closed = last > line and closing.startswith(token.markup) and not closing.strip(mark)
    if not is_closed and state.line > search.last_line:
        search.fence_never_closed[mark] = len(token.markup)
        state.tokens.pop()
        state.line = line
        return False
    language = re.match(r"[\w-]*", token.info.strip())[0].lower()
    search.parts.fenced.append((_lines(state, line), language))
    search.parts.code.append(_lines(state, line))
    return True


def _indented_code(state: StateBlock, line: int, end_line: int, silent: bool) -> bool:
    found = rules_block.code(state, line, end_line, silent)
    if found and not silent:
        _search(state).parts.code.append(_lines(state, line))
    return found


def _lines(state: StateBlock, line: int) -> Span:
    """Returns the span of the whole lines from this one to the parser's."""
    search = _search(state)
    begin = max(search.text.rfind("\n", 0, state.bMarks[line]) + 1, search.hidden_until)
    return begin, min(state.eMarks[state.line - 1] + 1, len(search.text))


def _html_block(state: StateBlock, line: int, end_line: int, silent: bool) -> bool:
    """Finds the comments in a block of HTML."""
    if not rules_block.html_block(state, line, end_line, silent):
        return False
    search = _search(state)
    position, end = state.bMarks[line] + state.tShift[line], state.eMarks[state.line - 1]
    if not silent and not re.compile(r"<(?:script|style|textarea)\b", re.IGNORECASE).match(state.src, position):
        for mark in re.compile("|".join(search.syntax.comments)).finditer(state.src, position, end):
            if mark.start() >= search.hidden_until and (closed := search.end_of(mark[0], mark.start())):
                search.hide(mark.start(), closed)
    return True


def _definition(state: StateBlock, line: int, end_line: int, silent: bool) -> bool:
    """Finds comments that are definitions of links to nowhere."""
    found = rules_block.reference(state, line, end_line, silent)
    begin = state.bMarks[line] + state.tShift[line]
    if found and not silent:
        meta = state.tokens[-1].meta
        if meta["title"] and meta["url"] in ("", "#"):
            _search(state).hide(begin, state.eMarks[state.line - 1])
    elif not silent and not state.is_code_block(line) and _NOWHERE.match(state.src, begin):
        _search(state).hide(begin, state.eMarks[line])
        state.line = line + 1
        return True
    return found


_BLOCK_RULES = {
    **{name: functools.partial(_with_content, name) for name in ("table", "heading", "lheading", "paragraph")},
    "fence": _fence,
    "html_block": _html_block,
    "reference": _definition,
    "code": _indented_code,
}


# ---- rules for what is within lines


def _inline_code(state: StateInline, silent: bool) -> bool:
    begin = state.pos
    state.tokens.clear()
    found = rules_inline.backtick(state, silent)
    if state.tokens and state.tokens[-1].type == "code_inline":
        search = _search(state)
        span = search.in_text(begin), search.in_text(state.pos - 1) + 1
        search.parts.inline.append(span)
        search.parts.code.append(span)
    return found


def _inline_comment(state: StateInline, silent: bool) -> bool:
    search = _search(state)
    search.check_time()
    mark = search.comment_at(state.src, state.pos)
    if not mark:
        return False
    begin, after = search.in_text(state.pos), state.pos + len(mark)
    before = state.src[max(0, state.pos - _LONGEST_ADDRESS) : state.pos]
    end = None
    # A comment that began in another cell of a table ends here.
    if begin >= search.hidden_until and not (mark == "%%" and _is_in_address(before)):
        end = search.end_of(mark, begin)
    if end and mark == "%%" and search.in_content(end) > state.posMax and _AMOUNT.search(before):
        end = None
    if end is None:
        state.pos = after
    else:
        search.hide(begin, end)
        state.pos = max(after, min(search.in_content(end), state.posMax))
    return True


def _is_in_address(before: str) -> bool:
    return "://" in before[max(map(before.rfind, _ENDS_ADDRESS)) + 1 :]


def _inline_maths(state: StateInline, silent: bool) -> bool:
    found = _MATHS.match(state.src, state.pos)
    if not found:
        return False
    search = _search(state)
    search.parts.code.append((search.in_text(state.pos), search.in_text(found.end() - 1) + 1))
    state.pos = found.end()
    return True
