"""Makes memory plans of a shape, and lists them for decreasing budgets."""

import random

import pytest
import torch
from builders import dataset_of

from sebp_edge import Recipe
from sebp_edge.engine.memory import choosing
from sebp_edge.engine.memory.budget import MemoryBudget
from sebp_edge.engine.memory.choosing import make_plan
from sebp_edge.engine.memory.this_machine import target_of
from sebp_edge.engine.sparse.rows.schedule import make_schedules
from sebp_edge.errors import MachineError
from sebp_edge.values.dataset import Dataset
from sebp_edge.values.example import Example
from sebp_edge.values.preparation_progress import Progress

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
RECIPE = Recipe(name="test", description="", r=4, epochs=2, batch_tokens=4000, context_length=64, refit=False)


def make_dataset(num_documents: int, longest: int = 200) -> Dataset:
    draw = random.Random(0)
    lengths = [draw.randint(20, longest) for _ in range(num_documents)]
    examples = [Example(list(range(length)), list(range(length)), n) for n, length in enumerate(lengths)]
    return dataset_of(examples)


def plan_of(shape, dataset, recipe, target, budget):
    return make_plan(shape, dataset, make_schedules(dataset, recipe, seed=0), recipe, target, budget)


def candidates(shape, dataset, target, recipe=RECIPE):
    schedules = make_schedules(dataset, recipe, seed=0)
    return choosing._Candidates(shape, dataset, schedules, recipe, target, Progress())


def choices_3b(shape, dataset, recipe):
    """All choices of which a plan takes the first that fits."""
    return list(candidates(shape, dataset, target_of(CUDA, 650_000_000), recipe).for_recipe(recipe))


def plan_3b(shape, size, dataset=None, recipe=RECIPE):
    dataset = dataset or make_dataset(80)
    return plan_of(shape, dataset, recipe, target_of(CUDA, 650_000_000), MemoryBudget.parse(size))


def all_plans(plan_for, size):
    """Returns the plans for `size` and for smaller budgets, each one byte below the previous plan's peak."""
    plans = [plan_for(size)]
    while plans[-1].smaller is not None:
        plans.append(plan_for(plans[-1].chosen.peak - 1))
    with pytest.raises(MachineError):
        plan_for(plans[-1].chosen.peak - 1)
    return plans
