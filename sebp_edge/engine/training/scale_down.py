"""Scales a trained adapter down until general text is hardly worse than before.

Training on, and then scaling down, keeps more of what was learnt at the same loss on general text than training less
(Wortsman et al. 2022 interpolate all weights in this way).
"""

from bisect import bisect_left
from collections.abc import Callable

from sebp_edge.engine.models.adaptation import restore, restore_scaled, snapshot
from sebp_edge.engine.sparse.rows.schedule import Group
from sebp_edge.engine.training.evaluation import evaluate
from sebp_edge.engine.training.loop import TrainingProgress
from sebp_edge.engine.training.recovery import RecoveringLearner

# From the whole adapter to half of it.
SCALES = tuple(percent / 100 for percent in range(100, 45, -5))

# An adapter of `ask` that raises the loss on it by more is scaled down.
MAX_RISE = 0.02


def scale_down(learner: RecoveringLearner, progress: TrainingProgress, general: Group, base_loss: float) -> float:
    """Scales the best state of a training, which the adapter is in; returns the scale, the least if none is enough.

    The scale is the largest one at which the loss rises by at most `MAX_RISE`, if a smaller one never rises more. The
    best state of `progress` becomes the scaled one; after an error, the adapter is in the best state as it was.
    """
    trained = progress.best_state

    def is_little(scale: float) -> bool:
        restore_scaled(learner.adaptation, trained, scale)
        return evaluate(learner, general).mean / base_loss - 1 <= MAX_RISE

    try:
        scale = largest_scale(is_little)
        restore_scaled(learner.adaptation, trained, scale)
    except BaseException:
        restore(learner.adaptation, trained)
        raise
    progress.best_state = snapshot(learner.adaptation)
    return scale


def largest_scale(is_little: Callable[[float], bool]) -> float:
    """Returns the largest of `SCALES` at which the loss rises little, or else the least; tries at most five."""
    return 1.0 if is_little(1.0) else SCALES[bisect_left(SCALES, True, lo=1, hi=len(SCALES) - 1, key=is_little)]
