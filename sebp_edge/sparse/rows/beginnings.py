"""Finds the tokens that sequences begin with in common; imports no torch."""

from collections import defaultdict
from collections.abc import Sequence

# The fewest tokens that are worth the longer attention of each sequence.
MIN_TOKENS = 8


def num_shared_tokens(heads: list[Sequence[int]]) -> int:
    """Returns by how many tokens `share_prefixes` shortens sequences.

    Args:
        heads: the tokens of each sequence before its first loss row.
    """
    return sum((len(members) - 1) * length for members, length in groups_of_equal(heads, MIN_TOKENS))


def groups_of_equal(heads: list[Sequence[int]], min_tokens: int) -> list[tuple[list[int], int]]:
    """Returns groups of sequences that begin alike, with the length of what they share.

    Args:
        heads: the tokens of each sequence that can be shared.
    """
    alike = defaultdict(list)
    for number, head in enumerate(heads):
        if len(head) >= min_tokens:
            alike[tuple(head[:min_tokens])].append(number)
    groups = [members for members in alike.values() if len(members) > 1]
    return [(members, _shared_length([heads[member] for member in members])) for members in groups]


def _shared_length(heads: list[Sequence[int]]) -> int:
    columns = zip(*heads, strict=False)
    differing = (at for at, column in enumerate(columns) if len(set(column)) > 1)
    return next(differing, min(map(len, heads)))
