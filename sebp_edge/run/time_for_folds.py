"""Decides how many documents are split into folds though they are enough for one split. Imports no torch."""

import math

from sebp_edge.engine.memory.seconds import OVERHEAD_CPU
from sebp_edge.recipe import Recipe
from sebp_edge.values.remembered import MANY_FOLDS

# With more documents, one split tests enough of them (kernels/bench/how-the-gate-decides.md, "Small gains").
MOST_IN_FOLDS = 100
# On a CPU, the trainings in folds may take so many seconds at this rate of floating-point operations per second, about
# that of two cores. A measured rate would not be the same each time, and so a draw would not.
MOST_SECONDS, RATE = 120, 50e9


def most_tokens(recipe: Recipe, parameters: int, *, on_gpu: bool) -> float:
    """Returns up to how many tokens folds are worth their time."""
    if on_gpu:
        return math.inf
    epochs = recipe.epochs + len(recipe.learning_rates) - 1
    # Each document is trained on in all folds but two and at the end, with two passes, or the time of two, per epoch.
    trained = 2 * ((MANY_FOLDS - 2) * epochs + recipe.epochs)
    # It is in one validation split, evaluated before each epoch and after the last, and in one test split.
    evaluated = epochs + 1 + 2 + 1
    return MOST_SECONDS * RATE / (OVERHEAD_CPU * 2 * parameters * (trained + evaluated))
