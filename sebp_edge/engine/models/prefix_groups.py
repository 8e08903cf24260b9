"""Groups prompts by the tokens that they begin with, and packs the groups into batches of bounded size."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

# In decoding, a group's prefix is computed by itself, which costs about as much as this many more tokens.
PASS_TOKENS = 32


class PrefixGroup(NamedTuple):
    """Prompts that begin with the same `prefix` tokens, which are computed once for all; 0 if that is not worth it."""

    prefix: int
    numbers: list[int]


class PrefixBatch(NamedTuple):
    """Groups that are decoded together, in rows of at most so many columns, new tokens included."""

    groups: list[PrefixGroup]
    columns: int

    @property
    def numbers(self) -> list[int]:
        """The prompts in the order of the batch's rows."""
        return [number for group in self.groups for number in group.numbers]


def group_by_prefix(
    prompts: Sequence[Sequence[int]], max_rows: int, tokens_per_group: int = PASS_TOKENS
) -> list[PrefixGroup]:
    """Returns the groups of at most `max_rows` prompts that leave the fewest tokens to compute.

    A prefix never has a prompt's last token, whose logits are needed for each row. Besides its own tokens, it costs
    `tokens_per_group`.
    """
    order = sorted(range(len(prompts)), key=lambda number: prompts[number])
    common = [0, *(common_length(prompts[one], prompts[other]) for one, other in itertools.pairwise(order))]
    # best[end]: the most tokens that groups of the first `end` prompts save, and where the last group begins.
    best = [(0, 0)]
    for end in range(1, len(order) + 1):
        choice, prefix = (best[end - 1][0], end - 1), None
        for begin in range(end - 2, max(end - max_rows, 0) - 1, -1):
            prefix = common[begin + 1] if prefix is None else min(prefix, common[begin + 1])
            if prefix == 0:
                break
            choice = max(choice, (best[begin][0] + (end - begin - 1) * prefix - tokens_per_group, begin))
        best.append(choice)
    groups, end = [], len(order)
    while end > 0:
        begin = best[end][1]
        groups.append(PrefixGroup(min(common[begin + 1 : end], default=0), order[begin:end]))
        end = begin
    return groups[::-1]


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns how many first tokens two prompts share, the last token of either excluded."""
    length = max(0, min(len(one), len(other)) - 1)
    return next((at for at in range(length) if one[at] != other[at]), length)


def make_batches(groups: list[PrefixGroup], columns: list[int], max_rows: int, max_cells: int) -> list[PrefixBatch]:
    """Packs groups into batches, those with the longest rows first: each prompt's row can have so many columns.

    Batches have at most so many rows, and cells (rows times columns), unless a single group has more.
    """
    widths = [max(columns[number] for number in group.numbers) for group in groups]
    batches: list[PrefixBatch] = []
    for width, group in sorted(zip(widths, groups, strict=True), key=lambda pair: -pair[0]):
        if batches:
            rows = len(batches[-1].numbers) + len(group.numbers)
            if rows <= max_rows and rows * batches[-1].columns <= max_cells:
                batches[-1].groups.append(group)
                continue
        batches.append(PrefixBatch([group], width))
    return batches
