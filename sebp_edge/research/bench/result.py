"""The result of a benchmark: JSON-ready figures, a CSV table, and one sentence of advice, also if nothing is gained."""

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sebp_edge.errors import StorageError
from sebp_edge.events import finite
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


@dataclass(frozen=True)
class BenchResult:
    """The results of all variants for one model on one batch on one machine.

    Attributes:
        weights: "own" or "random".
        lengths: tokens of each example of the batch.
        loss_tokens: how many of these tokens are predicted.
        padding_share: share of padding in the batch padded to `context_length`.
    """

    model: str
    weights: str
    parameters: int
    method: str
    dtype: str
    device: str
    versions: dict[str, str]
    lengths: list[int]
    loss_tokens: int
    context_length: int
    padding_share: float
    measurements: list[Measurement]

    @property
    def tokens(self) -> int:
        """Real tokens of the batch."""
        return sum(self.lengths)

    @property
    def recommendation(self) -> str:
        """One sentence: the fastest variant on this machine, and how to train with it."""
        return recommend(self.measurements)

    def rows(self) -> list[dict]:
        """One row per variant: its status, its errors, its times in milliseconds, and its peak memory in bytes."""
        return [self._row(one) for one in self.measurements]

    def _row(self, one: Measurement) -> dict:
        deviation, times = one.deviation, one.times
        parts = ("forward", "backward", "step")
        seconds = {part: getattr(times, part) if times else None for part in parts}
        return {
            "variant": one.variant.name,
            "status": one.status,
            "reason": one.reason,
            "loss_error": finite(deviation.loss_error) if deviation else None,
            "gradient_error": finite(deviation.gradient_error) if deviation else None,
            **{f"{part}_ms": None if value is None else 1e3 * value for part, value in seconds.items()},
            "peak_bytes": times.peak_bytes if times else None,
            "tokens_per_second": self.tokens / times.step if times else None,
        }

    def to_dict(self) -> dict:
        """The whole result as JSON-ready values."""
        about = {key: value for key, value in vars(self).items() if key != "measurements"}
        return {**about, "tokens": self.tokens, "variants": self.rows(), "recommendation": self.recommendation}

    def write_csv(self, path: Path) -> None:
        """Writes one line per variant."""
        names = ("model", "weights", "method", "dtype", "device", "context_length", "padding_share", "tokens")
        about = {"examples": len(self.lengths), **{name: getattr(self, name) for name in names}}
        rows = [about | row for row in self.rows()]
        try:
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, rows[0])
                writer.writeheader()
                writer.writerows(rows)
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror}.") from error


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
