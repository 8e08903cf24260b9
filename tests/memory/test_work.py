"""The work that a plan counts is that of the training: its micro-batches, and the largest of them."""

import dataclasses
import random

import pytest
from builders import IGNORE, make_sentences
from failing_memory import RECIPE as SMALL

from sebp_edge import Recipe
from sebp_edge.engine.memory import amount_of_work
from sebp_edge.engine.memory.amount_of_work import AmountOfWork
from sebp_edge.engine.memory.memory_options import FASTEST, MemoryOptions
from sebp_edge.engine.memory.prediction import predict_footprint
from sebp_edge.engine.memory.setup import TrainingSetup
from sebp_edge.engine.memory.shape_reader import read_shape
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.sparse.rows.batches import pack
from sebp_edge.engine.sparse.rows.buckets import Bucket
from sebp_edge.engine.sparse.rows.schedule import RowLimit, Schedule
from sebp_edge.engine.sparse.rows.share_beginnings import share_beginnings
from sebp_edge.values.example import Example, outlines

RECIPE = Recipe(name="test", description="", r=4, epochs=2, batch_tokens=4000, context_length=64)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_largest_sizes_give_the_footprint_of_all_sizes(method):
    shape_3b = read_shape(resolve("llama-3.2-3b"))
    draw = random.Random(0)
    sizes = [Bucket(draw.randint(60, 4096), draw.randint(1, 64), 64, draw.randint(1, 60)) for _ in range(500)]
    of_cpu = TrainingSetup(shape_3b, RECIPE.replace(method=method), on_gpu=False, has_kernels=False, itemsize=4)
    few = amount_of_work._largest(sizes, has_graphs=False)
    assert len(few) < 50
    for options in (FASTEST, MemoryOptions(small_buffers=True), MemoryOptions(checkpoints=14, small_buffers=True)):
        setup = dataclasses.replace(of_cpu, options=options)
        assert predict_footprint(setup, few, few, 0).total == predict_footprint(setup, sizes, sizes, 0).total
    # With graphs all sizes count, since each may have a graph.
    assert amount_of_work._largest(sizes, has_graphs=True) == sorted(set(sizes))


def test_what_examples_begin_with_in_common_costs_its_tokens_once():
    ids = [[*range(20), 30 + number, 40, 41] for number in range(5)]
    examples = [Example(own, [IGNORE] * 21 + own[21:], 0) for own in ids]
    known = outlines(examples)
    schedule = Schedule([[known]], known[:3], known[3:])
    schedule.lay_out(RowLimit(1000))
    alone, shared = (
        AmountOfWork.of([schedule], examples, on_gpu=False, has_graphs=False, shares_prefixes=shares)
        for shares in (False, True)
    )
    assert alone.trained_tokens - shared.trained_tokens == 4 * 20
    # Validation examples are evaluated before and after the epoch, test examples too.
    assert alone.evaluated_tokens - shared.evaluated_tokens == 2 * (2 + 1) * 20
    assert alone.trained == shared.trained
    assert alone.repeated == shared.repeated == 4 * 20 / (5 * 22)


def test_on_a_gpu_buckets_hold_what_is_computed_once():
    ids = [[*range(20), 30 + number, 40, 41] for number in range(5)]
    examples = [Example(own, [IGNORE] * 21 + own[21:], 0) for own in ids]
    schedule = Schedule([[outlines(examples)]])
    schedule.lay_out(RowLimit(1000))
    alone, shared = (
        AmountOfWork.of([schedule], examples, on_gpu=True, has_graphs=True, shares_prefixes=shares)
        for shares in (False, True)
    )
    packed = share_beginnings(pack(examples), on_gpu=True)
    assert alone.trained == [pack(examples).sizes.on_grid]
    assert shared.trained == [packed.sizes.on_grid]
    assert shared.trained_tokens == shared.trained[0].cost


@pytest.mark.slow
@pytest.mark.usefixtures("unassessed")
def test_the_sizes_are_those_of_the_trainings_micro_batches(make, notes_folder, micro_batches, monkeypatch):
    works, count = [], AmountOfWork.of

    def recorded(schedules, examples, **options):
        works.append(count(schedules, examples, **options))
        return works[-1]

    monkeypatch.setattr(AmountOfWork, "of", recorded)
    (notes_folder / "long.md").write_text(" ".join(make_sentences(3)))
    make(recipe=SMALL.replace(refit=False), memory_budget="4GB").adapt(notes_folder)
    # The training runs the plan's first work, which has the largest micro-batches.
    counted = {sizes.tokens for sizes in (*works[0].trained, *works[0].evaluated)}
    rows = {sum(example.num_active_tokens for example in micro_batch) for micro_batch in micro_batches}
    assert max(rows) == max(counted)
    assert counted <= rows
