"""Lists memory plans for decreasing budgets."""

import pytest

from sebp_edge import Recipe
from sebp_edge.errors import MachineError

RECIPE = Recipe(name="test", description="", r=4, epochs=2, batch_tokens=4000, context_length=64, refit=False)


def all_plans(plan_for, size):
    """Returns the plans for `size` and for smaller budgets, each one byte below the previous plan's peak."""
    plans = [plan_for(size)]
    while plans[-1].smaller is not None:
        plans.append(plan_for(plans[-1].chosen.peak - 1))
    with pytest.raises(MachineError):
        plan_for(plans[-1].chosen.peak - 1)
    return plans
