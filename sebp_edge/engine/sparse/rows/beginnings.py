"""Chooses which sequences of a micro-batch share what they begin with; imports no torch."""

from collections.abc import Sequence

from sebp_edge.engine.models.prefix_groups import PrefixGroup, group_by_prefix
from sebp_edge.engine.sparse.rows.buckets import Bucket

# A shared beginning is a sequence of its own, which costs about as much as this many tokens.
GROUP_TOKENS = 8
# On a GPU our kernels compute the attention of sequences that continue others, and torch's faster ones that of long
# ones that do not. So sequences up to this length share, where that saves at least this part of all rows.
MAX_LENGTH_GPU, MIN_SAVED_GPU = 1024, 1 / 8


def shared_beginnings(
    prompts: Sequence[Sequence[int]], lengths: Sequence[int], *, on_gpu: bool = False
) -> list[PrefixGroup]:
    """Returns all sequences in groups, of which those with a prefix share it; no groups if sharing is not worth it.

    Args:
        prompts: the tokens of each sequence up to its first loss row, which is not shared.
        lengths: the number of active rows of each sequence.
    """
    if sum(len(prompt) > 1 for prompt in prompts) < 2:
        return []
    groups = group_by_prefix(prompts, len(prompts), GROUP_TOKENS)
    is_worth_it = not on_gpu or (max(lengths) <= MAX_LENGTH_GPU and _num_saved(groups) >= MIN_SAVED_GPU * sum(lengths))
    return groups if is_worth_it and _num_saved(groups) else []


def sizes_when_shared(sizes: Bucket, groups: Sequence[PrefixGroup], lengths: Sequence[int]) -> Bucket:
    """Returns the sizes of a micro-batch whose sequences share their beginnings, from those without."""
    if not groups:
        return sizes
    longest = max(max(group.prefix, *(lengths[number] - group.prefix for number in group.numbers)) for group in groups)
    num_prefixes = sum(group.prefix > 0 for group in groups)
    return Bucket(sizes.tokens - _num_saved(groups), sizes.sequences + num_prefixes, longest, sizes.loss_rows)


def _num_saved(groups: Sequence[PrefixGroup]) -> int:
    return sum((len(group.numbers) - 1) * group.prefix for group in groups)
