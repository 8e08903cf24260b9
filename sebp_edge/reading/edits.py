"""Replaces spans of a text, and keeps count of where the rest of it moves."""

from array import array
from bisect import bisect_right

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
    # Where replaced spans begin and end, and how far what follows moves; the first one is empty.
    begins, ends, shifts = array("q", [0]), array("q", [0]), array("q", [0])
    pieces = []
    for begin, stop, replacement in sorted(edits):
        if begin < ends[-1]:
            # The rest of a longer edit that begins within another one.
            begin, replacement = ends[-1], ""
        if stop <= begin:
            continue
        pieces += [text[ends[-1] : begin], replacement]
        begins.append(begin)
        ends.append(stop)
        shifts.append(shifts[-1] + len(replacement) - (stop - begin))
    pieces.append(text[ends[-1] :])

    def moved(position: int) -> int:
        return position + shifts[bisect_right(ends, position) - 1]

    kept = ((begin, stop) for begin, stop in code if ends[bisect_right(begins, begin) - 1] <= begin)
    return "".join(pieces), [(moved(begin), max(moved(begin), moved(stop))) for begin, stop in kept]


def masked(text: str, code: list[Span]) -> str:
    """Returns a text of the same length and lines with NUL characters in place of code, for patterns of marks."""
    pieces, end = [], 0
    for begin, stop in sorted(code):
        if stop > end:
            begin = max(begin, end)
            pieces += [text[end:begin], "\n".join("\0" * len(line) for line in text[begin:stop].split("\n"))]
            end = stop
    return "".join([*pieces, text[end:]])
