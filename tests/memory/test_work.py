"""What a plan counts with is what the training will do: its micro-batches, and the largest of them."""

import dataclasses
import random

import pytest
from builders import make_sentences

from sebp_edge import Recipe
from sebp_edge.memory import work
from sebp_edge.memory.footprint import Footprint
from sebp_edge.memory.options import FASTEST, MemoryOptions
from sebp_edge.memory.setup import TrainingSetup
from sebp_edge.memory.shape_reader import read_shape
from sebp_edge.memory.work import Work
from sebp_edge.models.catalog import resolve
from sebp_edge.rows.buckets import Bucket
from sebp_edge.training.losses import RowLosses

RECIPE = Recipe(name="test", description="", r=4, epochs=2, batch_tokens=4000, context_length=64)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_plan_looks_at_few_sizes_and_counts_as_with_all(method):
    shape_3b = read_shape(resolve("llama-3.2-3b"))
    draw = random.Random(0)
    sizes = [Bucket(draw.randint(60, 4096), draw.randint(1, 64), 64, draw.randint(1, 60)) for _ in range(500)]
    of_cpu = TrainingSetup(shape_3b, RECIPE.replace(method=method), on_gpu=False, has_kernels=False, itemsize=4)
    few = work._largest(sizes, has_graphs=False)
    assert len(few) < 50
    for options in (FASTEST, MemoryOptions(small_buffers=True), MemoryOptions(checkpoints=14, small_buffers=True)):
        setup = dataclasses.replace(of_cpu, options=options)
        assert Footprint.of(setup, few, few, 0).total == Footprint.of(setup, sizes, sizes, 0).total
    # There the next largest graph may be held as well.
    assert work._largest(sizes, has_graphs=True) == sorted(set(sizes))


def test_the_sizes_are_those_that_the_training_cuts(make, notes_folder, monkeypatch):
    works, own = [], Work.of
    monkeypatch.setattr(Work, "of", lambda schedules, **options: works.append(own(schedules, **options)) or works[-1])
    rows = set()
    inner = RowLosses.__call__
    monkeypatch.setattr(
        RowLosses,
        "__call__",
        lambda losses, examples: (
            rows.add(sum(example.num_active_tokens for example in examples)) or inner(losses, examples)
        ),
    )
    (notes_folder / "long.md").write_text(" ".join(make_sentences(3)))
    make(memory_budget="4GB").adapt(notes_folder)
    # The first of the plan's, with the most rows at a time, is what is carried out.
    counted = {sizes.tokens for sizes in (*works[0].trained, *works[0].evaluated)}
    assert max(rows) == max(counted)
    assert counted <= rows
