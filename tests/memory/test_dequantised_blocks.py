"""Of 4-bit weights, as many blocks are kept dequantised as the memory has room for."""

import dataclasses
from itertools import pairwise
from types import SimpleNamespace

import pytest
from memory_plans import CPU, CUDA, RECIPE, make_dataset, plan_3b

from sebp_edge.engine.memory import choosing
from sebp_edge.engine.memory.budget import MemoryBudget
from sebp_edge.engine.memory.memory_options import FASTEST
from sebp_edge.engine.memory.this_machine import target_of
from sebp_edge.engine.models.four_bits import NF4_BYTES
from sebp_edge.engine.sparse.rows.schedule import make_schedules
from sebp_edge.run.conditions import Conditions
from sebp_edge.run.encoding import TrainingPreparation
from sebp_edge.run.preparation import Prepared


@pytest.mark.slow
@pytest.mark.usefixtures("has_bitsandbytes")
def test_what_4_bits_leave_of_the_budget_holds_dequantised_blocks(shape_3b):
    recipe, blocks = RECIPE.replace(load_in_4bit=True), len(shape_3b.blocks)
    dataset, sizes = make_dataset(80, longest=60), [5 * 10**9, 6 * 10**9, 7 * 10**9, 80 * 10**9]
    plans = [plan_3b(shape_3b, size, dataset, recipe).chosen for size in sizes]
    numbers = [each.options.dequantised_blocks for each in plans]
    assert 0 < max(numbers[:3]) < numbers[3] == blocks
    assert all(larger.seconds < smaller.seconds for smaller, larger in pairwise(plans))
    for number, chosen in zip(numbers, plans, strict=True):
        kept = f"{number} of {blocks} blocks kept in bf16" if number else f"every pass dequantises all {blocks}"
        assert kept in chosen.description
    for size, chosen in zip(sizes[:3], plans[:3], strict=True):
        # One block more would not fit.
        assert chosen.peak <= size < chosen.peak + 2 * shape_3b.blocks[0].parameters * 1.05
    in_bf16 = plan_3b(shape_3b, "80GB", dataset).chosen.footprint
    held = plans[3].footprint.weights - in_bf16.weights
    # With the copies of adapters beside weights.
    assert plans[3].footprint.adapter == in_bf16.adapter > plans[0].footprint.adapter
    assert held == pytest.approx(NF4_BYTES * shape_3b.linear_parameters, rel=0.01)
    assert plan_3b(shape_3b, "80GB").chosen.options.dequantised_blocks == 0
    assert "kept" not in plan_3b(shape_3b, "80GB").chosen.description


@pytest.mark.usefixtures("has_bitsandbytes")
def test_without_a_budget_dequantised_blocks_take_half_of_what_the_training_leaves_free(shape_3b):
    recipe, blocks = RECIPE.replace(load_in_4bit=True), len(shape_3b.blocks)
    dataset, target = make_dataset(80, longest=60), target_of(CUDA, 650_000_000)
    schedules = make_schedules(dataset, recipe, seed=0)

    def filled(free):
        return choosing.fill_free_memory(shape_3b, dataset, schedules, recipe, target, free)

    least, most = filled(10**9), filled(80 * 10**9)
    assert least.options == FASTEST and least.peak > 10**9
    assert least.kept == f"no block kept in bf16: every pass dequantises all {blocks}"
    assert most.options == dataclasses.replace(FASTEST, dequantised_blocks=blocks)
    assert most.kept == f"{blocks} of {blocks} blocks kept in bf16"
    numbers = []
    for free in range(least.peak, most.peak + 7 * 10**9, 2 * 10**9):
        found = filled(free)
        numbers.append(found.options.dequantised_blocks)
        # One block more would not fit.
        room = (free - least.peak) // 2
        assert found.peak - least.peak <= room
        assert numbers[-1] == blocks or found.peak - least.peak > room - 2 * 1.05 * shape_3b.blocks[0].parameters
    assert numbers == sorted(numbers) and 0 in numbers and blocks in numbers and len({*numbers}) > 3


@pytest.mark.usefixtures("has_bitsandbytes")
@pytest.mark.parametrize("changes", [{}, {"load_in_4bit": False}, {"budget": MemoryBudget(10**9)}, {"on_gpu": False}])
def test_only_4_bits_on_a_gpu_without_a_budget_fill_the_free_memory(shape_3b, changes):
    recipe, said = RECIPE.replace(load_in_4bit=changes.get("load_in_4bit", True)), []
    call = SimpleNamespace(
        recipe=recipe,
        seed=0,
        on_gpu=changes.get("on_gpu", True),
        budget=changes.get("budget"),
        conditions=lambda: Conditions(shape_3b, None, target_of(CUDA, 650_000_000), MemoryBudget(80 * 10**9)),
        notify=said.append,
    )
    prepared = Prepared(make_dataset(8), starting_point=None)
    schedules = make_schedules(prepared.dataset, recipe, seed=0)
    found = TrainingPreparation(call, reading=None).fill_free_memory(recipe, FASTEST, prepared, schedules)
    if changes:
        assert found == FASTEST and said == []
    else:
        assert found == dataclasses.replace(FASTEST, dequantised_blocks=28)
        (notice,) = said
        assert notice.message.endswith("the free GPU memory decides: 28 of 28 blocks kept in bf16.")


def test_a_model_that_runs_on_padded_batches_keeps_no_block(shape_3b, machine):
    machine.multiplies(1e12)
    padded = shape_3b.with_blocks([dataclasses.replace(block, kind=None) for block in shape_3b.blocks])
    recipe, dataset = RECIPE.replace(load_in_4bit=True), make_dataset(20)
    schedules = make_schedules(dataset, recipe, seed=0)
    found = choosing.fill_free_memory(padded, dataset, schedules, recipe, target_of(CPU, 0), 10**12)
    assert found.options.dequantised_blocks == 0
    assert found.kept.startswith("no block kept in fp32: ")
