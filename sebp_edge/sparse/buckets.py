"""Token buckets: the few fixed sizes that batches of active tokens are filled up to.

A captured graph has fixed sizes, and each capture costs seconds and memory. A grid alone would make dozens of buckets,
since tokens, sequences, longest and loss rows vary by themselves. All micro-batches of a training are known before its
first step, so they choose: each is rounded up to a grid, then the buckets that cost least to join are joined.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import combinations
from typing import NamedTuple

# Up to here a step costs nearly the same whatever the tokens: the weights have to be read.
SMALL = 512
# What else a step computes, in tokens that cost as much, for a 3B model: a loss row's share of the head; and in the
# attention each position of a slot (1.45 ns in a layer, where a token takes 1.7 us forward and backward).
TOKENS_PER_LOSS_ROW, TOKENS_PER_SLOT_POSITION = 1 / 8, 1 / 1024

MOST_BUCKETS, MOST_WASTE = 6, 0.05


class Bucket(NamedTuple):
    """The sizes of a batch, or the largest ones of the batches that this bucket is for.

    Attributes:
        tokens: active tokens.
        sequences: sequences of the batch's own; there is always room for the filler's beside them.
        longest: tokens of the longest sequence.
        loss_rows: at most `tokens`.
    """

    tokens: int
    sequences: int
    longest: int
    loss_rows: int

    @classmethod
    def holding(cls, tokens: int, sequences: int, longest: int, loss_rows: int) -> "Bucket":
        """The smallest bucket on the grid for a batch of these sizes."""
        return cls(_on_grid(tokens), _power_of_two(sequences), _power_of_two(longest), _on_grid(loss_rows))

    def holds(self, sizes: "Bucket") -> bool:
        """Whether a batch of these sizes can be filled up to this bucket."""
        return all(own >= size for own, size in zip(self, sizes, strict=True))

    def joined(self, other: "Bucket") -> "Bucket":
        """The smallest bucket that holds what either of two holds."""
        return Bucket(*map(max, self, other))

    @property
    def slots(self) -> int:
        """Sequences and filler sequences; none is longer than `longest`, and all tokens may be filler."""
        return self.sequences + -(-self.tokens // self.longest)

    @property
    def cost(self) -> float:
        """What a step on it costs, in tokens."""
        rows = self.tokens + TOKENS_PER_LOSS_ROW * self.loss_rows
        return max(SMALL, rows) + TOKENS_PER_SLOT_POSITION * self.slots * self.longest


def _on_grid(size: int) -> int:
    """The next power of two up to `SMALL`; above, 16 sizes in each doubling, so that less than 1/16 is filler."""
    if size <= SMALL:
        return _power_of_two(size)
    step = _power_of_two(size) // 32
    return -(-size // step) * step


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def choose_buckets(needed: Iterable[Bucket]) -> list[Bucket]:
    """Few buckets for many batches, the cheapest first; each of `needed` is held by one of them.

    The two whose joining adds least to the cost of all batches are joined, until there are at most six, and further as
    long as all that was added stays below 5 % of the cost.

    Args:
        needed: `Bucket.holding` the sizes of each micro-batch, repeated as often as it is run.
    """
    counts = Counter(needed)
    allowed = MOST_WASTE * sum(count * bucket.cost for bucket, count in counts.items())

    def added(pair: tuple[Bucket, Bucket]) -> float:
        joined = pair[0].joined(pair[1])
        return sum(counts[bucket] * (joined.cost - bucket.cost) for bucket in pair)

    while len(counts) > 1:
        pair = min(combinations(counts, 2), key=added)
        allowed -= added(pair)
        if len(counts) <= MOST_BUCKETS and allowed < 0:
            break
        both = sum(counts.pop(bucket) for bucket in pair)
        counts[pair[0].joined(pair[1])] += both
    return sorted(counts, key=lambda bucket: bucket.cost)
