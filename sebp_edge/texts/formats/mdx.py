"""Reads Markdown with components (.mdx): its Markdown, without imports, exports, expressions and the tags of JSX."""

import re
from collections import Counter
from pathlib import Path

from sebp_edge.texts.documents import NotRead, unix_newlines
from sebp_edge.texts.edits import Edit, edit, masked
from sebp_edge.texts.formats.encodings import decode
from sebp_edge.texts.formats.front_matter import front_matter
from sebp_edge.texts.formats.markdown import Syntax, find_parts
from sebp_edge.texts.formats.notes import Seen, comments_not_read

MDX = Syntax(has_indented_code=False, has_html=False, marks=re.compile(r"[<{]|^(?:import|export) ", re.MULTILINE))
_BEGIN = re.compile(
    r"""
      (?P<import>^import[ \t]+(?:(?:[\w*$][\w*$,\ \t]*)?(?:\{[^{}]*\})?\s*from\s*)?["'][^"'\n]+["'];?[ \t]*$)
    | (?P<export>^export\s+(?=(?:default|const|let|var|async|function|class)\b|[{*]))
    | \\[<{]
    | (?P<tag></?(?:[A-Za-z][\w.-]*(?::[\w-]+)?)?(?=[\s/>]))
    | (?P<expression>\{)
    """,
    re.VERBOSE | re.MULTILINE,
)
_ATTRIBUTES = re.compile(r"""(?:[\s/=]+|[\w:.$-]+|"[^"]*"|'[^']*')+""")
_BRACE_OR_BLANK_LINE = re.compile(r"\{|\n[ \t]*(?=\n)")
_STRING = re.compile(r"""\{\s*(["'`])([^"'`{}\\]*)\1\s*\}""")
_KINDS = ("tags of components", "expressions", "imports and exports")
_KIND_OF = dict(zip(("tag", "expression", "import", "export"), (*_KINDS, _KINDS[2]), strict=True))
# What was left out leaves this mark, which no text has; a line of them only is left out, too.
_MARK, _MARKS = "\0", re.compile(r"^[ \t]*\0[ \t\0]*(?:\n|\Z)|\0", re.MULTILINE)


def read_mdx(path: Path) -> list[str | NotRead]:
    """Returns the text of a file, and what of it was not read.

    Raises:
        Unreadable: see `decode` and `find_parts`.
    """
    text = unix_newlines(decode(path))
    front = front_matter(text)
    text = text[len(front) :]
    parts = find_parts(text, MDX)
    code, num_comments = parts.code, len(parts.comments)
    if parts.comments:
        text, code = edit(text, [(begin, end, "") for begin, end in parts.comments], code)
    text, counts = _without_components(text, masked(text, code) if code else text)
    text = _MARKS.sub("", text)
    reasons = [f"{kind}: {counts[kind]:,}" for kind in _KINDS if counts[kind]]
    seen = Seen("", num_comments + counts["comments"], parts.is_cut)
    return [text, *([NotRead("", front)] * bool(front)), *map(NotRead, reasons), *comments_not_read(seen)]


def _without_components(text: str, shown: str) -> tuple[str, Counter[str]]:
    """Returns a text with marks for what is no Markdown, and counts that by its kind; code is not shown."""
    closed_at, counts = _closed_braces(shown), Counter()
    edits: list[Edit] = []
    at = 0
    while found := _BEGIN.search(shown, at):
        kind, begin, at = found.lastgroup, found.start(), found.end()
        if kind == "export":
            at = _end_of_export(shown, at, closed_at)
        elif kind == "tag":
            at = _end_of_tag(shown, at, closed_at) or at
            kind = kind if shown[at - 1] == ">" else None
        elif kind == "expression":
            at = closed_at.get(begin, at)
            kind = kind if at > begin + 1 else None
        if kind is None:
            continue
        string = _STRING.fullmatch(text, begin, at)
        edits.append((begin, at, string[2] if string else _MARK))
        if text.startswith("{/*", begin):
            counts["comments"] += 1
        elif not string:
            counts[_KIND_OF[kind]] += 1
    return edit(text, edits, [])[0], counts


def _closed_braces(text: str) -> dict[int, int]:
    """Returns where each brace that is closed ends, by where it begins."""
    closed_at, opened = {}, []
    for brace in re.finditer(r"(?<!\\)[{}]", text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened:
            closed_at[opened.pop()] = brace.end()
    return closed_at


def _end_of_export(text: str, at: int, closed_at: dict[int, int]) -> int:
    """Returns where an export ends that goes on here: before a blank line that is not within braces."""
    while found := _BRACE_OR_BLANK_LINE.search(text, at):
        if found[0] != "{":
            return found.start()
        at = closed_at.get(found.start(), found.end())
    return len(text)


def _end_of_tag(text: str, at: int, closed_at: dict[int, int]) -> int | None:
    """Returns where a tag ends whose attributes begin here; None if this is no tag."""
    while True:
        if attributes := _ATTRIBUTES.match(text, at):
            at = attributes.end()
        if text.startswith(">", at):
            return at + 1
        if at not in closed_at:
            return None
        at = closed_at[at]
