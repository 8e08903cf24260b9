"""Turns measurements into one sentence of advice, which also says so if this project gains nothing."""

from collections.abc import Iterable

from sebp_edge.research.bench.compare import Measurement
from sebp_edge.research.bench.variants import DENSE

# Our fastest variant is recommended if it takes at most this many times as long as the fastest other one.
TIE_RATIO = 1.05
# By variant: the beginning of the sentence, and how to train with it.
ADVICE = {
    "dense padded": ("the dense padded step is the fastest:", "there is too little padding to gain from"),
    "drop-in": ("the drop-in takes", "put `sparsify(model)` around your training loop"),
    "dynamic padding": ("dynamic padding takes", "pad to the longest text of each batch"),
    "packed": ("packing takes", "put the texts of a batch into one row"),
    "hoisted": ("hoisted rows take", "`sebp-edge adapt` trains that way"),
    "graph": ("captured graphs take", "`sebp-edge adapt` trains that way"),
}


def recommend(measurements: Iterable[Measurement]) -> str:
    """One sentence on the fastest variant, compared with dense padding and the fastest one without this project."""
    measurements = list(measurements)
    timed = {one.variant.name: one.times.step for one in measurements if one.times}
    peer = _fastest(timed, [one for one in measurements if not one.variant.is_ours])
    ours = _fastest(timed, [one for one in measurements if one.variant.is_ours])
    if not timed:
        return "No variant could be timed on this machine; try a smaller model, shorter texts or less padding."
    chosen = ours if peer is None or (ours and timed[ours] <= TIE_RATIO * timed[peer]) else peer
    words, action = ADVICE[chosen]
    if chosen == DENSE.name:
        return f"On this machine, {words} {action}."
    figures = []
    if DENSE.name in timed:
        figures.append(f"{timed[chosen] / timed[DENSE.name]:.2f} of the dense padded step's time")
    else:
        figures.append(f"{1e3 * timed[chosen]:,.0f} ms per step (the dense padded step does not run)")
    if chosen == ours and peer not in (None, DENSE.name):
        figures.append(f"{timed[ours] / timed[peer]:.2f} of what {ADVICE[peer][0]}, the fastest without sebp-edge")
    elif chosen == peer and ours is not None:
        figures.append(f"{timed[peer] / timed[ours]:.2f} of what {ADVICE[ours][0]}")
    return f"On this machine, {words} {' and '.join(figures)}; {action}."


def _fastest(timed: dict[str, float], candidates: list[Measurement]) -> str | None:
    """The name of the fastest candidate that was timed; None if none was."""
    return min((one.variant.name for one in candidates if one.times), key=timed.__getitem__, default=None)
