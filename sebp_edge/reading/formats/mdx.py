"""Reads Markdown with components (.mdx): its Markdown, without imports, exports, expressions and the tags of JSX."""

import re
from collections import Counter
from pathlib import Path

from sebp_edge.reading.edits import Span, edit, masked
from sebp_edge.reading.formats.encodings import decode
from sebp_edge.reading.formats.front_matter import front_matter
from sebp_edge.reading.formats.markdown import Syntax, entities, find_parts
from sebp_edge.reading.formats.notes import Seen, comments_not_read
from sebp_edge.values.documents import NotRead, unix_newlines

MDX = Syntax(has_indented_code=False, marks=re.compile(r"[<{]|^(?:import|export) ", re.MULTILINE))
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
_STRING = re.compile(r"""\{\s*(["'`])(?P<text>[^"'`{}\\]*)\1\s*\}""")
_KINDS = ("tags of components", "expressions", "imports and exports")
_KIND_OF = dict(zip(("tag", "expression", "import", "export"), (*_KINDS, _KINDS[2]), strict=True))
# Of what is left out each character is NUL, which no text has; lines without others are left out, too.
_LEFT_OUT = re.compile(rb"^[ \t]*\0[ \t\0]*(?:\n|\Z)|\0+", re.MULTILINE)


def read_mdx(path: Path) -> list[str | NotRead]:
    """Returns the text of a file, and what of it was not read."""
    text = unix_newlines(decode(path))
    front = front_matter(text)
    text = text[len(front) :]
    parts = find_parts(text, MDX)
    code, num_comments = parts.code, len(parts.comments)
    if parts.comments:
        text, code = edit(text, [(begin, end, "") for begin, end in parts.comments], code)
    spans, counts = _find_components(text, masked(text, code) if code else text)
    # A character that is four bytes makes each one four bytes, so that no more of these are kept than must be.
    mask = bytearray(text.encode("latin-1", errors="replace"))
    for begin, stop in spans:
        mask[begin:stop] = bytes(stop - begin)
    edits = [(left_out.start(), left_out.end(), "") for left_out in _LEFT_OUT.finditer(mask)]
    text, _ = edit(text, [*edits, *entities(text, code)], [])
    reasons = [f"{kind}: {counts[kind]:,}" for kind in _KINDS if counts[kind]]
    seen = Seen("", num_comments + counts["comments"], parts.is_cut)
    return [text, *([NotRead("", front)] * bool(front)), *map(NotRead, reasons), *comments_not_read([seen])]


def _find_components(text: str, shown: str) -> tuple[list[Span], Counter[str]]:
    """Returns where a text has what is no Markdown, in order, and counts that by its kind; code is not shown."""
    closed_at, counts = _closed_braces(shown), Counter()
    spans: list[Span] = []
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
        if string := _STRING.fullmatch(text, begin, at):
            spans += [(begin, string.start("text")), (string.end("text"), at)]
            continue
        spans.append((begin, at))
        counts["comments" if text.startswith("{/*", begin) else _KIND_OF[kind]] += 1
    return spans, counts


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
