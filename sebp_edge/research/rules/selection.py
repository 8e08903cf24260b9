"""Rules for `sparsify(model, rows=...)` that approximate gradients: they drop rows of dL/dY which carry gradient.

    TopN           the n rows of largest norm
    Threshold      the rows whose norm is not far below the others'
    Energy         the rows of largest norm, as many as hold a share of the norm

A rule selects rows in each layer separately, from that layer's dL/dY, and counts what it drops. Layers that
are computed together (q, k and v with LoRA) share one selection, by their common norm. Selecting and counting never
wait for the device.
Shapes: N rows, M columns, A rows kept.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sebp_edge.engine.sparse.rows.row_rule import DroppedRows, RowRule
from sebp_edge.errors import OptionError
from sebp_edge.ops import ActiveRows, Selector, detect, row_norms, select_rows
from sebp_edge.research.rules import row_rules

logger = logging.getLogger(__name__)


class _Rule(RowRule):
    def begin(self, model: nn.Module) -> "AppliedRule":
        return AppliedRule(model, self)


@dataclass(frozen=True)
class TopN(_Rule):
    """Keeps the n rows of largest norm in each layer (Topchii et al.), the first of equal ones, and never a zero row.

    Attributes:
        n: the number of rows to keep; a layer with fewer non-zero rows keeps all of them.

    Raises:
        OptionError: n is not a whole number of 1 or more.
    """

    n: int

    def __post_init__(self):
        _require(_is_whole(self.n) and self.n >= 1, f"TopN got n={self.n!r}; expected a whole number, 1 or more")


@dataclass(frozen=True)
class Threshold(_Rule):
    """Keeps the rows whose norm is at least epsilon times the median norm of the layer's non-zero rows.

    Without an epsilon, each layer keeps all non-zero rows in its first backward passes and derives one from them
    (`NormHistogram`): the knee of the distribution of row norms, as in the paper, but relative to the median.

    Attributes:
        epsilon: relative to the median norm; None to derive it.
        max_lost: the largest share of the sum of squared norms that any backward pass of any layer may drop; if epsilon
            would drop more, the largest of these rows are kept. 0 drops nothing, 1 sets no limit.
        calibration_passes: the number of backward passes of a layer from which epsilon is derived.

    Raises:
        OptionError: epsilon, max_lost or calibration_passes is out of range.
    """

    epsilon: float | None = None
    max_lost: float = 1e-3
    calibration_passes: int = 8

    def __post_init__(self):
        _require(
            self.epsilon is None or (_is_number(self.epsilon) and self.epsilon > 0),
            f"Threshold got epsilon={self.epsilon!r}; expected a number above 0, relative to the median norm, or None",
        )
        _require(
            _is_number(self.max_lost) and 0 <= self.max_lost <= 1,
            f"Threshold got max_lost={self.max_lost!r}; expected a share of the energy, from 0 to 1",
        )
        _require(
            _is_whole(self.calibration_passes) and self.calibration_passes >= 1,
            f"Threshold got calibration_passes={self.calibration_passes!r}; expected a whole number, 1 or more",
        )


@dataclass(frozen=True)
class Energy(_Rule):
    """Keeps the rows of largest norm in each layer, as many as hold all but a share of the squared norm.

    The number is an exponential moving average over the layer's backward passes, rounded up, so that a single batch
    does not change it much.

    Attributes:
        max_lost: the share of the squared norm that may be dropped; 0 drops nothing.
        decay: the weight of earlier passes in the average; 0 takes the number of each pass by itself.

    Raises:
        OptionError: max_lost or decay is out of range.
    """

    max_lost: float = 0.01
    decay: float = 0.9

    def __post_init__(self):
        _require(
            _is_number(self.max_lost) and 0 <= self.max_lost < 1,
            f"Energy got max_lost={self.max_lost!r}; expected a share of the energy, from 0 to below 1",
        )
        _require(
            _is_number(self.decay) and 0 <= self.decay < 1,
            f"Energy got decay={self.decay!r}; expected a number from 0 to below 1",
        )


class AppliedRule:
    """A rule at work in one sparsified model, with a state for each layer."""

    def __init__(self, model: nn.Module, rule: TopN | Threshold | Energy):
        self._rule = rule
        self._names = {layer: name for name, layer in model.named_modules()}
        self._selectors: dict[tuple[nn.Module, ...], _LayerSelector] = {}
        logger.info("Gradients are approximations, with %s; `dropped()` reports what each layer drops.", rule)

    def selector(self, layers: Sequence[nn.Module]) -> Selector:
        """Returns the selector of these layers' rows in the backward pass; the same object each time."""
        layers = tuple(layers)
        if layers not in self._selectors:
            names = tuple(self._names[layer] for layer in layers)
            self._selectors[layers] = _SELECTORS[type(self._rule)](names, self._rule)
        return self._selectors[layers]

    def dropped(self) -> list[DroppedRows]:
        """Returns what was dropped so far, by layer. Waits for the device."""
        return [selector.dropped() for selector in self._selectors.values() if selector.passes]


class _LayerSelector:
    """Selects the rows of one layer, or of layers computed together, and counts them on the device.

    A rule says in `_choose` which rows are selected by their squared norms.
    """

    epsilon: Tensor | float | None = None

    def __init__(self, names: tuple[str, ...], rule: TopN | Threshold | Energy):
        self.passes = 0
        self._names, self._rule = names, rule
        self._rows = self._active = self._kept = self._lost = 0

    def __call__(self, douts_NM: tuple[Tensor, ...]) -> ActiveRows:
        if len(douts_NM[0]) == 0:
            return detect(douts_NM)
        energy_N = row_norms(*douts_NM)
        selected = self._choose(energy_N)
        self._count(energy_N, selected)
        return selected

    def dropped(self) -> DroppedRows:
        return DroppedRows(
            layers=self._names,
            passes=self.passes,
            rows=self._rows,
            active=int(self._active),
            kept=int(self._kept),
            lost_energy=float(self._lost) / self.passes,
            epsilon=None if self.epsilon is None else float(self.epsilon),
        )

    def _count(self, energy_N: Tensor, selected: ActiveRows) -> None:
        # Counts the rows that were actually selected: those beyond the capacity are dropped.
        is_row_A = torch.arange(len(selected.ids), device=energy_N.device) < selected.count
        times_N = torch.zeros_like(energy_N, dtype=torch.int64).index_add_(0, selected.ids, is_row_A.long())
        self.passes += 1
        self._rows += len(energy_N)
        self._active = self._active + (energy_N != 0).sum()
        self._kept = self._kept + selected.count
        self._lost = self._lost + row_rules.lost_share(energy_N, times_N > 0)


class _TopNSelector(_LayerSelector):
    def _choose(self, energy_N: Tensor) -> ActiveRows:
        return select_rows(row_rules.largest(energy_N, self._rule.n), capacity=self._rule.n)


class _ThresholdSelector(_LayerSelector):
    """Derives epsilon from the first passes if it is not given."""

    def __init__(self, names: tuple[str, ...], rule: Threshold):
        super().__init__(names, rule)
        self.epsilon = rule.epsilon
        self._histogram: row_rules.NormHistogram | None = None

    def _choose(self, energy_N: Tensor) -> ActiveRows:
        if self.epsilon is None:
            self._histogram = self._histogram or row_rules.NormHistogram(energy_N.device)
            self._histogram.add(energy_N)
            if self.passes + 1 == self._rule.calibration_passes:
                self.epsilon = self._histogram.epsilon(self._rule.max_lost)
            return select_rows(energy_N != 0)
        return select_rows(row_rules.above_threshold(energy_N, self.epsilon, self._rule.max_lost))


class _EnergySelector(_LayerSelector):
    _average: Tensor | None = None

    def _choose(self, energy_N: Tensor) -> ActiveRows:
        # In fp32 a share of 1 could exclude small rows, whose energy is lost in the sum.
        if self._rule.max_lost == 0:
            return select_rows(energy_N != 0)
        number = row_rules.num_top_rows(energy_N, 1 - self._rule.max_lost).to(energy_N.dtype)
        if self._average is not None:
            number = self._rule.decay * self._average + (1 - self._rule.decay) * number
        self._average = number
        return select_rows(row_rules.largest(energy_N, number.ceil()))


_SELECTORS = {TopN: _TopNSelector, Threshold: _ThresholdSelector, Energy: _EnergySelector}


def _is_whole(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _require(is_valid: bool, message: str) -> None:
    if not is_valid:
        raise OptionError(f"{message}.")
