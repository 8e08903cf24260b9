"""Groups of prompts leave the fewest tokens to compute, and batches keep to their bounds."""

import random
from itertools import chain

from pace import at_most

from sebp_edge.engine.models.prefix_groups import PASS_TOKENS, PrefixGroup, group_by_prefix, make_batches


def saved(prompts, groups):
    return sum((len(group.numbers) - 1) * group.prefix - PASS_TOKENS for group in groups if group.prefix)


def most_saved(prompts, max_rows):
    """The most that any cut of the sorted prompts into groups saves, by trying them all."""
    order = sorted(prompts)

    def common(first, last):
        shortest = min(map(len, order[first : last + 1])) - 1
        return next((at for at in range(shortest) if order[first][at] != order[last][at]), shortest)

    def best(begin):
        if begin == len(order):
            return 0
        ends = range(begin, min(begin + max_rows, len(order)))
        return max(max(0, (end - begin) * common(begin, end) - PASS_TOKENS) + best(end + 1) for end in ends)

    return best(0)


def test_no_other_cut_saves_more():
    for seed in range(30):
        draw = random.Random(seed)
        stems = [[draw.randrange(3) for _ in range(draw.randint(1, 40))] for _ in range(3)]
        prompts = [
            draw.choice(stems)[: draw.randint(1, 40)] + [draw.randrange(3) for _ in range(draw.randint(1, 30))]
            for _ in range(draw.randint(1, 11))
        ]
        max_rows = draw.choice([1, 2, 4, 20])
        groups = group_by_prefix(prompts, max_rows)
        assert sorted(chain.from_iterable(group.numbers for group in groups)) == list(range(len(prompts)))
        for group in groups:
            assert len(group.numbers) <= max_rows
            assert len({tuple(prompts[number][: group.prefix]) for number in group.numbers}) == 1
            assert all(len(prompts[number]) > group.prefix for number in group.numbers)
        assert saved(prompts, groups) == most_saved(prompts, max_rows)


def test_questions_about_a_note_are_a_group_despite_a_common_beginning():
    draw = random.Random(0)
    system, notes = [1] * 30, [[draw.randrange(100, 900) for _ in range(200)] for _ in range(20)]
    prompts = [[*system, *note, *[draw.randrange(100, 900) for _ in range(9)]] for note in notes for _ in range(8)]
    groups = group_by_prefix(prompts, 64)
    expected = [list(range(begin, begin + 8)) for begin in range(0, 160, 8)]
    assert sorted(sorted(group.numbers) for group in groups) == expected
    assert all(group.prefix >= 230 for group in groups)


def test_a_short_prefix_is_not_worth_a_pass():
    assert group_by_prefix([[1, 2, 3], [1, 2, 4]], 64) == [PrefixGroup(0, [0]), PrefixGroup(0, [1])]


def test_thousands_of_nested_prompts_take_little_time():
    prompts = [[5] * length for length in range(1, 2001)]
    with at_most(10):
        groups = group_by_prefix(prompts, 64)
    assert sum(len(group.numbers) for group in groups) == 2000


def test_batches_keep_to_rows_and_cells_and_take_every_prompt_once():
    for seed in range(10):
        draw = random.Random(seed)
        columns = [draw.randint(1, 90) for _ in range(40)]
        max_rows, max_cells = draw.choice([1, 3, 7, 100]), draw.choice([1, 50, 300, 10**6])
        left, groups = draw.sample(range(40), 40), []
        while left:
            size = draw.randint(1, max(1, min(max_rows, max_cells // max(columns))))
            groups.append(PrefixGroup(draw.choice([0, 3]), left[:size]))
            left = left[size:]
        batches = make_batches(groups, columns, max_rows, max_cells)
        assert sorted(chain.from_iterable(batch.numbers for batch in batches)) == list(range(40))
        assert {id(group) for batch in batches for group in batch.groups} == {id(group) for group in groups}
        for batch in batches:
            rows = len(batch.numbers)
            assert batch.columns == max(columns[number] for number in batch.numbers)
            assert rows == 1 or (rows <= max_rows and rows * batch.columns <= max_cells)
        assert [batch.columns for batch in batches] == sorted((batch.columns for batch in batches), reverse=True)
