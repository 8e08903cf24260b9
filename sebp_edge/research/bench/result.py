"""The result of a benchmark: JSON-ready figures, a CSV table, and a recommendation."""

import csv
from dataclasses import dataclass
from pathlib import Path

from sebp_edge.errors import StorageError
from sebp_edge.events import finite
from sebp_edge.research.bench.advice import recommend
from sebp_edge.research.bench.compare import Measurement


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
