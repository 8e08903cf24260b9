"""Schedules have batches of about equal size, full micro-batches, and the same steps however they are cut."""

import random
from dataclasses import replace
from itertools import chain, pairwise

import pytest
from builders import dataset_of, example

from sebp_edge import Recipe
from sebp_edge.engine.sparse.rows.schedule import (
    MAX_EVALUATED_ROWS_CPU,
    MIN_EVALUATED_ROWS,
    Group,
    RowLimit,
    make_schedules,
    shuffled_batches,
)
from sebp_edge.values.example import Example

RECIPE = Recipe(name="test", description="", epochs=3, batch_tokens=400)


def many(count: int = 200, longest: int = 60) -> list[Example]:
    order = random.Random(0)
    return [example(order.randint(2, longest), document=number) for number in range(count)]


# -------------------------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("batch_tokens", [1, 50, 300, 1024, 10**9])
def test_each_epoch_has_every_example_in_exactly_one_batch(batch_tokens):
    examples = many()
    epochs = shuffled_batches(examples, batch_tokens, epochs=3, seed=0)
    assert len(epochs) == 3
    for batches in epochs:
        assert all(batches)
        assert sorted(example.document for batch in batches for example in batch) == list(range(200))
    assert epochs[0] != epochs[1]


def test_the_order_depends_on_the_seed_only():
    assert shuffled_batches(many(), 300, 2, seed=5) == shuffled_batches(many(), 300, 2, seed=5)
    assert shuffled_batches(many(), 300, 2, seed=5) != shuffled_batches(many(), 300, 2, seed=6)


def test_batches_have_about_equal_sizes():
    for seed in range(5):
        examples = many()
        total = sum(example.num_loss_tokens for example in examples)
        [batches] = shuffled_batches(examples, 400, 1, seed)
        assert len(batches) == round(total / 400)
        for batch in batches:
            assert abs(sum(example.num_loss_tokens for example in batch) - total / len(batches)) <= 60


def test_an_example_larger_than_a_batch_does_not_make_the_next_one_tiny():
    """Chats may have both examples that fill the context and short answers."""
    examples = [example(size) for size in [1001, 3, 3, 3, 3] * 8]
    for seed in range(20):
        [batches] = shuffled_batches(examples, 500, 1, seed)
        sizes = [sum(example.num_loss_tokens for example in batch) for batch in batches]
        assert min(sizes) >= 250


# ------------------------------------------------------------------------------------------------------- micro-batches


@pytest.mark.parametrize("max_rows", [1, 59, 60, 300, 4096, 10**9])
def test_micro_batches_hold_every_example_once_and_the_longest_first(max_rows):
    cut = RowLimit(max_rows).cut(many())
    together = list(chain.from_iterable(micro_batch.examples for micro_batch in cut))
    assert sorted(example.document for example in together) == list(range(200))
    lengths = [example.num_active_tokens for example in together]
    assert lengths == sorted(lengths, reverse=True)
    for micro_batch in cut:
        assert len(micro_batch.examples) == 1 or micro_batch.sizes.tokens <= max_rows


def test_all_micro_batches_but_the_last_are_full():
    cut = RowLimit(300).cut(many())
    for micro_batch, following in pairwise(cut):
        assert micro_batch.sizes.tokens + following.examples[0].num_active_tokens > 300
    assert len(cut) > 20


def test_an_example_over_the_limit_is_a_micro_batch_of_its_own():
    cut = RowLimit(20).cut([example(4), example(100), example(5), example(90)])
    assert [[len(one.input_ids) for one in micro_batch.examples] for micro_batch in cut] == [[100], [90], [5, 4]]
    assert RowLimit(20).cut([]) == []


@pytest.mark.parametrize("max_rows", [1, 37, 100, 1000])
def test_padding_to_the_longest_counts(max_rows):
    examples = [example(tokens) for tokens in (*random.sample(range(2, 60), 20), 100, 2, 2, 2)]
    limit = RowLimit(max_rows, pads=True)
    cut = limit.cut(examples)
    assert sorted(map(id, chain.from_iterable(each.examples for each in cut))) == sorted(map(id, examples))
    for each in cut:
        padded = len(each.examples) * max(one.num_active_tokens for one in each.examples)
        assert each.sizes.tokens == padded
        assert padded <= max_rows or len(each.examples) == 1
        if len(each.examples) > 1:
            assert limit.halved(each).max_rows == -(-padded // 2)


def test_padded_examples_take_the_same_rows_and_keep_their_order():
    cut = RowLimit(128, padded_to=64).cut(many(7))
    assert [one.document for micro_batch in cut for one in micro_batch.examples] == list(range(7))
    assert [len(micro_batch.examples) for micro_batch in cut] == [2, 2, 2, 1]
    assert cut[0].sizes[:3] == (128, 2, 64)


def test_on_a_cpu_evaluations_are_cut_smaller():
    limit = RowLimit.on("cpu", 4096)
    assert len(limit.cut(many())) < len(limit.cut(many(), is_evaluated=True))
    assert max(one.sizes.tokens for one in limit.cut(many(), is_evaluated=True)) <= MAX_EVALUATED_ROWS_CPU
    assert limit.cut(many(), is_evaluated=True) == Group(many(), limit, is_evaluated=True).micro_batches
    on_a_gpu = RowLimit.on("cuda", 4096)
    assert on_a_gpu.cut(many(), is_evaluated=True) == on_a_gpu.cut(many())


# ------------------------------------------------------------------------------------------------------------ schedules


def laid_out(limit, **options):
    (schedule,) = make_schedules(dataset_of(many()), RECIPE.replace(refit=False), seed=3)
    schedule.lay_out(limit, **options)
    return schedule


def documents(group):
    return sorted(one.document for micro_batch in group.micro_batches for one in micro_batch.examples)


def test_smaller_micro_batches_leave_the_steps_unchanged():
    schedule = laid_out(RowLimit(4096))
    before = [[documents(step) for step in epoch] for epoch in schedule.epochs]
    few = len(schedule.trained)
    schedule.cut(RowLimit(100))
    assert [[documents(step) for step in epoch] for epoch in schedule.epochs] == before
    assert len(schedule.trained) > 2 * few
    assert all(micro_batch.sizes.tokens <= 100 for _, micro_batch in schedule.evaluated)
    assert not schedule.has_smaller_steps


def test_an_evaluation_computes_no_more_rows_at_once_than_the_steps_or_a_few():
    for batch_tokens, least in ((400, MIN_EVALUATED_ROWS), (900, 700)):
        recipe, limit = RECIPE.replace(batch_tokens=batch_tokens, refit=False), RowLimit(4096)
        (schedule,) = make_schedules(dataset_of(many()), recipe, seed=3)
        schedule.lay_out(limit)
        rows = max(micro_batch.sizes.tokens for micro_batch in schedule.trained)
        limit = limit.evaluating_like([schedule])
        schedule.cut_evaluations(limit)
        assert least <= limit.max_evaluated_rows == max(rows, MIN_EVALUATED_ROWS)
        assert max(micro_batch.sizes.tokens for _, micro_batch in schedule.evaluated) <= limit.max_evaluated_rows
        assert replace(limit, max_evaluated_rows=100).evaluating_like([schedule]).max_evaluated_rows == 100


def test_steps_of_one_micro_batch_hold_the_same_examples_and_are_not_cut_again():
    schedule = laid_out(RowLimit(100), one_micro_batch_each=True)
    assert schedule.has_smaller_steps
    assert all(len(step.micro_batches) == 1 for epoch in schedule.epochs for step in epoch)
    for epoch in schedule.epochs:
        assert sorted(chain.from_iterable(map(documents, epoch))) == documents(Group(schedule_train(), RowLimit(100)))
    before = len(schedule.trained)
    schedule.cut(RowLimit(50))
    assert len(schedule.trained) == before
    schedule.lay_out(RowLimit(50), one_micro_batch_each=True)
    assert len(schedule.trained) > before


def schedule_train():
    schedule = laid_out(RowLimit(10**9))
    return [one for step in schedule.epochs[0] for one in step.examples]


def test_one_split_has_a_last_training_on_all_that_is_tested_on_the_validation_documents():
    judged, last = make_schedules(dataset_of(many()), RECIPE, seed=3)
    for schedule in (judged, last):
        schedule.lay_out(RowLimit(4096))
    assert (judged.trains_on_all, last.trains_on_all) == (False, True)
    assert last.num_documents == (200, 0, 0)
    assert (len(judged.epochs), len(last.epochs)) == (3, 1)  # it begins in the judged state
    for epoch in last.epochs:
        assert sorted(chain.from_iterable(map(documents, epoch))) == list(range(200))
    assert documents(last.test) == documents(judged.validation)
    assert [times for times, _ in last.evaluated] == [1]


def test_rows_bound_a_step_and_an_epoch_has_its_least_number_of_steps():
    for seed in range(20):
        draw = random.Random(seed)
        examples = [
            example(length := draw.randint(2, 90), draw.randint(1, length - 1)) for _ in range(draw.randint(1, 60))
        ]
        batch_rows, min_steps = draw.choice([40, 100, 400]), draw.choice([1, 4, 200])
        (epoch,) = shuffled_batches(examples, 10**6, 1, seed, batch_rows=batch_rows, min_steps=min_steps)
        assert sorted(map(id, chain.from_iterable(epoch))) == sorted(map(id, examples))
        longest = max(each.num_active_tokens for each in examples)
        assert max(sum(each.num_active_tokens for each in batch) for batch in epoch) <= 1.5 * batch_rows + longest
        if min_steps <= len(examples) // 4:
            assert len(epoch) >= min_steps / 2


def test_few_loss_tokens_in_many_rows_make_several_steps():
    answers = [example(50, 45, document=number) for number in range(160)]
    assert len(shuffled_batches(answers, 1024, 1, 0)[0]) == 1
    assert len(shuffled_batches(answers, 1024, 1, 0, batch_rows=1024)[0]) == 8
    assert len(shuffled_batches(answers, 1024, 1, 0, min_steps=16)[0]) == 16
