"""Lays out the figures of a version's page in SVG units; the template only prints the numbers."""

import math
from dataclasses import dataclass

from sebp_edge.adapters.training_report import Curve, Tested

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 480, 48, 12, 10, 34
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - LEFT - RIGHT, 150
LABELS, ROW = 86, 30


@dataclass(frozen=True)
class Tick:
    """A label at a position along an axis."""

    position: float
    label: str


@dataclass(frozen=True)
class CurveFigure:
    """One training: the loss by step as a line, the validation losses as points on another one."""

    line: str
    validation: str
    points: list[tuple[float, float]]
    steps: list[Tick]
    losses: list[Tick]


def curve_figure(curve: Curve) -> CurveFigure | None:
    """Lays out a curve; returns None if it has no step."""
    if not curve.losses or len(curve.steps) != len(curve.losses):
        return None
    last = max(*curve.steps, *curve.evaluated_after, 1)
    low, high, ticks = _axis([*curve.losses, *curve.validation])

    def place(step: float, loss: float) -> tuple[float, float]:
        return PLOT_WIDTH * step / last, PLOT_HEIGHT * (high - loss) / (high - low)

    line = [place(*each) for each in zip(curve.steps, curve.losses, strict=True)]
    points = [place(*each) for each in zip(curve.evaluated_after, curve.validation, strict=False)]
    steps = sorted({0, last // 2, last})
    return CurveFigure(
        line=_path(line),
        validation=_path(points),
        points=points,
        steps=[Tick(PLOT_WIDTH * step / last, f"{step:,}") for step in steps],
        losses=[Tick(place(0, loss)[1], label) for loss, label in ticks],
    )


@dataclass(frozen=True)
class Interval:
    """A loss as a point, with its interval as a line."""

    name: str
    loss: float
    x: float
    lowest: float
    highest: float
    y: float


@dataclass(frozen=True)
class IntervalFigure:
    """The test losses below each other."""

    intervals: list[Interval]
    losses: list[Tick]
    height: float


def interval_figure(tested: Tested, version: int | None, compared_with: int | None) -> IntervalFigure | None:
    """Lays out the test losses; returns None if one is not finite."""
    rows = [("base model", tested.base)]
    if tested.active:
        rows.append((f"version {compared_with}", tested.active))
    rows.append((f"version {version}" if version else "this adapter", tested.adapted))
    if any(loss.loss is None for _, loss in rows):
        return None
    spans = [(loss.loss if loss.lowest is None else loss.lowest, loss.highest or loss.loss) for _, loss in rows]
    low, high, ticks = _axis([end for span in spans for end in span])
    width = WIDTH - LABELS - RIGHT

    def place(loss: float) -> float:
        return width * (loss - low) / (high - low)

    return IntervalFigure(
        intervals=[
            Interval(name, loss.loss, place(loss.loss), *map(place, span), ROW * (number + 0.5))
            for number, ((name, loss), span) in enumerate(zip(rows, spans, strict=True))
        ],
        losses=[Tick(place(loss), label) for loss, label in ticks],
        height=ROW * len(rows),
    )


def _path(points: list[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) if points else ""


def _axis(values: list[float]) -> tuple[float, float, list[tuple[float, str]]]:
    """Returns the ends of an axis that has all values, and its ticks at round numbers."""
    low, high = min(values), max(values)
    spread = max(high - low, 1e-3 * max(1.0, abs(high)))
    low, high = low - 0.06 * spread, high + 0.06 * spread
    power = 10.0 ** math.floor(math.log10((high - low) / 2))
    step = max(power * factor for factor in (1, 2, 5) if power * factor <= (high - low) / 2)
    digits = max(0, -math.floor(math.log10(step)))
    first, last = math.ceil(low / step), math.floor(high / step)
    return low, high, [(number * step, f"{number * step:.{digits}f}") for number in range(first, last + 1)]
