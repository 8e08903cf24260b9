"""Finds boilerplate: lines that stand in many documents, such as headers, footers and a template's headings."""

from collections import Counter
from collections.abc import Mapping

from sebp_edge.lessons.tokens import Span

# A line is common if it stands in this share of the clusters, within these bounds.
SHARE, MIN_CLUSTERS, MAX_CLUSTERS = 0.05, 3, 20

# Every digit becomes 0, and a tab becomes a space.
_SAME = bytes.maketrans(b"123456789\t", b"000000000 ")


def common_lines(texts: Mapping[int, str], cluster_of: Mapping[int, int]) -> frozenset[str]:
    """Returns the lines that stand in many clusters of near-duplicates.

    Lines that differ only in numbers or in the amount of whitespace are the same line; blank lines are none.

    Returns:
        The lines, normalised as `common_spans` expects them.
    """
    clusters: dict[int, list[str]] = {}
    for document, text in texts.items():
        clusters.setdefault(cluster_of[document], []).append(text)
    if len(clusters) < MIN_CLUSTERS:
        return frozenset()
    needed = max(MIN_CLUSTERS, min(MAX_CLUSTERS, SHARE * len(clusters)))
    num_clusters = Counter()
    for members in clusters.values():
        num_clusters.update(set(_normalised_lines("\n".join(members))))
    return frozenset(line for line, count in num_clusters.items() if count >= needed and line)


def common_spans(text: str, lines: frozenset[str]) -> list[Span]:
    """Returns the spans of characters that the common lines take in `text`, with their line endings."""
    spans, end = [], 0
    if lines:
        for line, normalised in zip(text.split("\n"), _normalised_lines(text), strict=True):
            begin, end = end, min(end + len(line) + 1, len(text))
            if normalised in lines:
                spans.append((begin, end))
    return spans


def _normalised_lines(text: str) -> list[str]:
    # Replacing bytes in the whole text is far faster than regular expressions, and there may be a million lines.
    found = text.encode().translate(_SAME)
    for twice, once in ((b"00", b"0"), (b"  ", b" ")):
        while twice in found:
            found = found.replace(twice, once)
    return [line.strip() for line in found.decode().split("\n")]
