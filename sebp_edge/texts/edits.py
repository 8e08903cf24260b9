"""Replaces spans of a text, and keeps count of where the rest of it moves."""

import re
from bisect import bisect_right
from collections.abc import Callable

Span = tuple[int, int]
# Begin, end, and what replaces the characters between.
Edit = tuple[int, int, str]


def edit(text: str, edits: list[Edit], code: list[Span]) -> tuple[str, list[Span]]:
    """Replaces spans of a text.

    Args:
        edits: begin, end and replacement of each span; of two that overlap, the one that begins first wins.
        code: spans that stay.

    Returns:
        The new text, and where the spans of code are in it, as far as they were not replaced.
    """
    pieces, end, kept = [], 0, []
    size, shifts = 0, [(0, 0)]
    for begin, stop, replacement in sorted(edits):
        if begin < end:
            # The rest of a longer edit that begins within another one.
            begin, replacement = end, ""
        if stop <= begin:
            continue
        pieces += [text[end:begin], replacement]
        size += begin - end + len(replacement)
        kept.append((begin, stop))
        end = stop
        shifts.append((end, size - end))
    pieces.append(text[end:])
    begins = [begin for begin, _ in kept]
    ends = [stop for stop, _ in shifts]

    def moved(position: int) -> int:
        return position + shifts[bisect_right(ends, position) - 1][1]

    def is_kept(span: Span) -> bool:
        before = bisect_right(begins, span[0]) - 1
        return before < 0 or kept[before][1] <= span[0]

    return "".join(pieces), [
        (moved(begin), max(moved(begin), moved(stop))) for begin, stop in code if is_kept((begin, stop))
    ]


def masked(text: str, code: list[Span]) -> str:
    """Returns a text of the same length and lines with NUL characters in place of code, for patterns of marks."""
    pieces, end = [], 0
    for begin, stop in sorted(code):
        if stop > end:
            begin = max(begin, end)
            pieces += [text[end:begin], "\n".join("\0" * len(line) for line in text[begin:stop].split("\n"))]
            end = stop
    return "".join([*pieces, text[end:]])


def replace_marks(
    marks: re.Pattern, text_of: Callable[[re.Match, str], str], text: str, code: list[Span]
) -> tuple[str, list[Span]]:
    """Replaces marks outside of code; returns as `edit` does.

    Args:
        text_of: returns the replacement, from a match whose groups lack the code within them, and the text.
    """
    found = marks.finditer(masked(text, code))
    return edit(text, [(mark.start(), mark.end(), text_of(mark, text)) for mark in found], code)
