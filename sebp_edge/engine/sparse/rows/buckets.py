"""Token buckets: the few fixed sizes that batches of active tokens are padded to with filler.

A captured graph has fixed sizes, and each capture costs seconds and memory. A grid alone would make dozens of buckets,
since tokens, sequences, longest and loss rows vary independently. All micro-batches of a training are known before its
first step, so buckets are chosen for them: their sizes are rounded up to a grid, then buckets are merged, those of the
least cost first, until each one that is left pays for its capture.

Shapes: K buckets.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

MAX_BUCKETS = 6
# The smallest step of the grid; a GPU multiplies this many tokens at once.
GRID_STEP = 32
# Costs of a step of a 3B model, in units of the cost of one token: the fixed cost (a captured step took 9.9 ms on an
# H200 for 128 tokens, 28.3 for 832 and 98.4 for 3712), the head's cost of a loss row, and attention's cost of each
# position of a slot (1.45 ns in a layer; a token takes 0.9 us, forward and backward).
STEP_COST, LOSS_ROW_COST, SLOT_POSITION_COST = 300, 1 / 8, 1 / 640
# That of a graph: its warm-up and its capture take 0.3 to 0.5 s together.
CAPTURE_COST = 12_000


class Bucket(NamedTuple):
    """The sizes of a batch, or the maximum sizes of the batches that a bucket holds."""

    tokens: int  # active ones
    sequences: int  # the batch's own sequences; `slots` adds those of the filler
    longest: int  # tokens of the longest sequence
    loss_rows: int  # at most `tokens`

    @property
    def on_grid(self) -> "Bucket":
        """The smallest bucket on the grid for a batch of these sizes."""
        sequences, longest = _power_of_two(self.sequences), _power_of_two(self.longest)
        return Bucket(_on_grid(self.tokens), sequences, longest, _on_grid(self.loss_rows))

    def holds(self, sizes: "Bucket") -> bool:
        """Whether a batch of these sizes fits into this bucket."""
        return all(own >= size for own, size in zip(self, sizes, strict=True))

    @property
    def slots(self) -> int:
        """The number of sequences, filler included: all tokens may be filler, and no sequence exceeds `longest`."""
        return self.sequences + -(-self.tokens // self.longest)

    @property
    def cost(self):
        """The cost of a step, in units of the cost of one token. Sizes may be arrays, for many buckets at once."""
        slot_positions = SLOT_POSITION_COST * self.slots * self.longest
        return STEP_COST + self.tokens + LOSS_ROW_COST * self.loss_rows + slot_positions


def _on_grid(size: int) -> int:
    """Rounds up: to powers of two below `GRID_STEP`, to its multiples up to 32, then to 16 sizes per doubling."""
    if size <= GRID_STEP:
        return _power_of_two(size)
    step = max(GRID_STEP, _power_of_two(size) // 32)
    return -(-size // step) * step


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def choose_buckets(needed: Iterable[Bucket]) -> list[Bucket]:
    """Chooses few buckets for many batches, and returns them cheapest first; each of `needed` fits into one of them.

    Repeatedly merges the two buckets whose union adds least to the cost of all batches: until there are at most six,
    and further as long as that adds less than the capture of one more graph. Sizes are `on_grid`, and repeated as often
    as they run.
    """
    counts = Counter(needed)
    if not counts:
        return []
    sizes_K4, times_K = np.array(list(counts)), np.array(list(counts.values()))
    is_merged_K = np.zeros(len(counts), bool)

    def costs_of_merging(one: int) -> np.ndarray:
        """Returns the cost added by merging this bucket with each of the others, [K]; infinite if impossible."""
        merged_K = _costs(np.maximum(sizes_K4[one], sizes_K4))
        added_K = times_K[one] * (merged_K - merged_K[one]) + times_K * (merged_K - _costs(sizes_K4))
        added_K[one] = np.inf
        return np.where(is_merged_K, np.inf, added_K)

    added_KK = np.stack([costs_of_merging(one) for one in range(len(counts))])
    for num_buckets in range(len(counts), 1, -1):
        one, other = divmod(int(added_KK.argmin()), len(counts))
        if num_buckets <= MAX_BUCKETS and added_KK[one, other] >= CAPTURE_COST:
            break
        sizes_K4[one] = np.maximum(sizes_K4[one], sizes_K4[other])
        times_K[one] += times_K[other]
        is_merged_K[other] = True
        added_KK[other] = added_KK[:, other] = np.inf
        added_KK[one] = added_KK[:, one] = costs_of_merging(one)
    return sorted(set(map(Bucket._make, sizes_K4[~is_merged_K].tolist())), key=lambda bucket: bucket.cost)


def _costs(sizes_K4: np.ndarray) -> np.ndarray:
    return Bucket._make(np.moveaxis(sizes_K4, -1, 0)).cost
