"""Scales a trained adapter down until general text is hardly worse than before.

Training on, and then scaling down, keeps more of what was learnt at the same loss on general text than training less
(Wortsman et al. 2022 interpolate all weights in this way).
"""

import math

from sebp_edge.models.adaptation import restore, restore_scaled, snapshot
from sebp_edge.texts.schedule import Group
from sebp_edge.training.evaluation import evaluate
from sebp_edge.training.loop import Progress
from sebp_edge.training.recovery import RecoveringLearner

# By how much the loss on general text may rise, and the steps in which the scale falls to the least one.
MAX_RISE = 0.015
STEP, LEAST = 0.05, 0.5


def restrain(learner: RecoveringLearner, progress: Progress, general: Group, base_loss: float) -> float:
    """Scales the best state of a training, which the adapter is in; returns the scale, the least if none is enough.

    Args:
        progress: its best state becomes the scaled one; after an error, the adapter is in the best state.
        general: general text.
        base_loss: the base model's loss on it.
    """
    trained, scale = progress.best_state, 1.0
    try:
        while (rise := evaluate(learner, general).mean / base_loss - 1) > MAX_RISE and scale > LEAST:
            scale = _next(scale, rise)
            restore_scaled(learner.adaptation, trained, scale)
    except BaseException:
        restore(learner.adaptation, trained)
        raise
    progress.best_state = snapshot(learner.adaptation)
    return scale


def _next(scale: float, rise: float) -> float:
    """Returns the scale at which the loss would be low enough if it rose with the scale's square."""
    steps = min(scale / STEP - 1, scale / STEP * math.sqrt(MAX_RISE / rise))
    return max(LEAST, STEP * math.floor(steps + 1e-6))
