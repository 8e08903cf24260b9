"""Token buckets: batches fit into them, at little extra cost."""

import random
from collections import Counter
from itertools import combinations

import pytest
from pace import at_most

from sebp_edge.engine.sparse.rows.buckets import CAPTURE_COST, GRID_STEP, MAX_BUCKETS, Bucket, choose_buckets


def test_every_size_fits_into_its_bucket_with_little_filler():
    for size in range(1, 5001):
        bucket = Bucket(size, size, size, size).on_grid
        assert bucket.holds(Bucket(size, size, size, size))
        assert max(bucket.sequences, bucket.longest) < 2 * size
        assert bucket.tokens == bucket.loss_rows
        assert bucket.tokens - size < max(min(size, GRID_STEP), size / 16)
        assert bucket.tokens % min(32, bucket.tokens) == 0


@pytest.mark.parametrize("bucket", [Bucket(512, 16, 64, 512), Bucket(513, 1, 512, 9), Bucket(7, 7, 1, 7)])
def test_a_bucket_has_slots_for_a_batch_of_only_filler(bucket):
    assert (bucket.slots - bucket.sequences) * bucket.longest >= bucket.tokens


def lengths_of_notes(order: random.Random, count: int) -> list[int]:
    """Lengths of paragraphs in notes: a median of 30 tokens, 90 at the 90th percentile, 512 at most."""
    return [min(512, max(2, round(order.lognormvariate(3.4, 0.85)))) for _ in range(count)]


def steps_of_notes(order: random.Random, batch_tokens: int, max_rows: int = 4096) -> list[list[int]]:
    """Lengths of the micro-batches of 300 steps."""
    found = []
    for _ in range(300):
        step = [0]
        while sum(step) < batch_tokens:
            step += lengths_of_notes(order, 1)
        group = []
        for length in sorted(step[1:], reverse=True):
            if sum(group) + length > max_rows:
                found.append(group)
                group = []
            group.append(length)
        found.append(group)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("share", [1, 0.3])
@pytest.mark.parametrize("batch_tokens", [100, 512, 1024, 4096, 16384])
def test_a_long_training_needs_few_buckets_and_wastes_little(batch_tokens, share):
    """With loss on about this share of the tokens, in 6,000 steps."""
    order = random.Random(batch_tokens)
    sizes = []
    for lengths in steps_of_notes(order, batch_tokens):
        tokens = sum(lengths)
        loss_rows = tokens if share == 1 else max(1, round(tokens * order.gauss(share, 0.03)))
        sizes.append(Bucket(tokens, len(lengths), max(lengths), loss_rows))
    buckets = choose_buckets(20 * [Bucket(*size).on_grid for size in sizes])
    assert 1 <= len(buckets) <= MAX_BUCKETS
    assert [bucket.cost for bucket in buckets] == sorted(bucket.cost for bucket in buckets)
    chosen = [next(bucket for bucket in buckets if bucket.holds(size)) for size in sizes]
    assert set(chosen) == set(buckets)
    waste = sum(bucket.cost for bucket in chosen) / sum(size.cost for size in sizes) - 1
    # A sixteenth by rounding, the rest by merging.
    assert waste <= 0.11
    large = [(size, bucket) for size, bucket in zip(sizes, chosen, strict=True) if size.tokens > 0.9 * 4096]
    assert sum(bucket.tokens for _, bucket in large) <= 1.05 * sum(size.tokens for size, _ in large)


def cost_with_captures(needed: Counter[Bucket], buckets: list[Bucket]) -> float:
    steps = sum(count * min(bucket.cost for bucket in buckets if bucket.holds(size)) for size, count in needed.items())
    return steps + CAPTURE_COST * len(buckets)


@pytest.mark.parametrize("seed", range(12))
def test_each_bucket_pays_for_its_capture(seed):
    """No two of them can be merged at a gain, and no other grouping of the sizes costs much less."""
    order, needed = random.Random(seed), Counter()
    for _ in range(6):
        tokens, longest = order.randint(50, 1200), order.choice([64, 256, 512])
        size = Bucket(tokens, order.randint(1, 8), min(longest, tokens), order.randint(1, tokens)).on_grid
        needed[size] += order.choice([1, 5, 30, 200])
    buckets = choose_buckets(list(needed.elements()))
    found = cost_with_captures(needed, buckets)
    for one, other in combinations(buckets, 2):
        merged = Bucket(*map(max, one, other))
        assert cost_with_captures(needed, [each for each in buckets if each not in (one, other)] + [merged]) >= found
    groupings = [[]]
    for size in needed:
        groupings = [
            [*each[:at], [*each[at], size] if at < len(each) else [size], *each[at + 1 :]]
            for each in groupings
            for at in range(len(each) + 1)
        ]
    least = min(
        cost_with_captures(needed, [Bucket(*map(max, *group, group[0])) for group in each]) for each in groupings
    )
    assert least <= found <= 1.1 * least


def test_choosing_takes_little_time_for_sizes_that_vary_much():
    order, needed = random.Random(0), []
    for _ in range(300):
        tokens, longest = order.randint(50, 4096), order.choice([64, 256, 1024, 4096])
        sequences = -(-tokens // longest) * order.randint(1, 4)
        needed.append(Bucket(tokens, sequences, min(longest, tokens), order.randint(1, tokens)).on_grid)
    with at_most(5):
        buckets = choose_buckets(needed)
    assert len(buckets) == MAX_BUCKETS
    assert all(any(bucket.holds(one) for bucket in buckets) for one in needed)


def test_more_than_six_buckets_are_merged_at_any_cost():
    needed = 12 * [Bucket(1000 * size, 4, 1000, 1000 * size).on_grid for size in range(1, 20)]
    buckets = choose_buckets(needed)
    assert len(buckets) == MAX_BUCKETS
    assert all(any(bucket.holds(one) for bucket in buckets) for one in needed)


def test_one_batch_has_one_bucket_and_no_batch_has_none():
    one = Bucket(7, 2, 4, 5).on_grid
    assert choose_buckets([one]) == [one]
    assert choose_buckets([]) == []
