"""Turns measurements into one sentence of advice, which also says if this project gains nothing."""

from collections.abc import Iterable

from sebp_edge.insight.bench.compare import Measured
from sebp_edge.insight.bench.ways import DENSE

# Our fastest way is recommended if it takes at most this many times as long as the fastest other one.
AS_FAST = 1.05
# By way: the beginning of the sentence, and how to train that way.
WORDS = {
    "dense padded": ("the dense padded step is the fastest:", "there is too little padding to gain from"),
    "drop-in": ("the drop-in takes", "put `sparsify(model)` around your training loop"),
    "dynamic padding": ("dynamic padding takes", "pad to the longest text of each batch"),
    "packed": ("packing takes", "put the texts of a batch into one row"),
    "hoisted": ("hoisted rows take", "`sebp-edge adapt` trains that way"),
    "graph": ("captured graphs take", "`sebp-edge adapt` trains that way"),
}


def recommend(measured: Iterable[Measured]) -> str:
    """One sentence on the fastest way, compared with dense padding and the fastest way without this project."""
    measured = list(measured)
    timed = {one.way.name: one.times.step for one in measured if one.times}
    rival = _fastest(timed, [one for one in measured if not one.way.ours])
    ours = _fastest(timed, [one for one in measured if one.way.ours])
    if not timed:
        return "On this machine nothing could be timed; a smaller model, shorter texts or less padding may fit."
    chosen = ours if rival is None or (ours and timed[ours] <= AS_FAST * timed[rival]) else rival
    words, action = WORDS[chosen]
    if chosen == DENSE.name:
        return f"On this machine {words} {action}."
    figures = []
    if DENSE.name in timed:
        figures.append(f"{timed[chosen] / timed[DENSE.name]:.2f} of the dense padded step's time")
    else:
        figures.append(f"{1e3 * timed[chosen]:,.0f} ms a step, where the dense padded one does not run")
    if chosen == ours and rival not in (None, DENSE.name):
        figures.append(f"{timed[ours] / timed[rival]:.2f} of what {WORDS[rival][0]}, the fastest without sebp-edge")
    elif chosen == rival and ours is not None:
        figures.append(f"{timed[rival] / timed[ours]:.2f} of what {WORDS[ours][0]}")
    return f"On this machine {words} {', and '.join(figures)}; {action}."


def _fastest(timed: dict[str, float], candidates: list[Measured]) -> str | None:
    """The name of the fastest candidate that was timed; None if none was."""
    return min((one.way.name for one in candidates if one.times), key=timed.__getitem__, default=None)
