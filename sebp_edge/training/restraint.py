"""Scales a trained adapter down until general text is hardly worse than before.

Training on, and then scaling down, keeps more of what was learnt at the same loss on general text than training less
(Wortsman et al. 2022 interpolate all weights in this way).
"""

from sebp_edge.models.adaptation import restore, restore_scaled, snapshot
from sebp_edge.texts.schedule import Group
from sebp_edge.training.evaluation import evaluate
from sebp_edge.training.loop import Progress
from sebp_edge.training.recovery import RecoveringLearner

# By how much the loss on held-out general text may rise, and the scales that are tried in turn.
MAX_RISE = 0.01
SCALES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)


def restrain(learner: RecoveringLearner, progress: Progress, general: Group, base_loss: float) -> float:
    """Scales the best state of a training, which the adapter is in; returns the scale, the last one if none is enough.

    Args:
        progress: its best state becomes the scaled one; after an error, the adapter is in the best state.
        general: held-out general text.
        base_loss: the base model's loss on it.
    """
    trained = progress.best_state
    try:
        for scale in SCALES:
            if scale < 1:
                restore_scaled(learner.adaptation, trained, scale)
            if evaluate(learner, general).mean <= (1 + MAX_RISE) * base_loss:
                break
    except BaseException:
        restore(learner.adaptation, trained)
        raise
    progress.best_state = snapshot(learner.adaptation)
    return scale
