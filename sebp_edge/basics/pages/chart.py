"""Lays out the figures of pages in SVG units; the templates only print the numbers."""

import math
from itertools import groupby
from typing import NamedTuple


class Frame(NamedTuple):
    """The size of a figure, and the margins around its plot; the height is that of the plot."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int

    @property
    def plot(self) -> int:
        """The plot's width."""
        return self.width - self.left - self.right


# Of heat maps and histograms, of curves of a training, and of intervals, whose height is that of a row.
FRAME = Frame(320, 150, 30, 14, 6, 32)
CURVES = Frame(480, 150, 48, 12, 10, 34)
INTERVALS = Frame(480, 30, 86, 12, 0, 32)
# Each colour of a heat map covers a quarter of a decade; smaller norms get the lowest colour.
LEVELS = 12
LEVELS_PER_DECADE = 4
MIN_ROW_HEIGHT, MAX_ROW_HEIGHT = 3, 14


class Tick(NamedTuple):
    """A label at a position along an axis."""

    position: float
    label: str


def power_of_10(exponent: float) -> str:
    """Formats a power of 10, such as 10⁻² or 10⁻¹·⁵."""
    return "10" + f"{exponent:g}".translate(str.maketrans("-.0123456789", "⁻·⁰¹²³⁴⁵⁶⁷⁸⁹"))


class Scale(NamedTuple):
    """The colour scale of several heat maps; level 0 begins at 10^lowest, and smaller norms belong to it too."""

    lowest: float

    @classmethod
    def of(cls, maps: list) -> "Scale":
        """The scale whose top level contains the largest norm."""
        top = max(norm for one in maps for row in one.norms for norm in row)
        return cls(math.floor(math.log10(top) * LEVELS_PER_DECADE + 1 - LEVELS) / LEVELS_PER_DECADE)

    def level(self, norm: float) -> int | None:
        """The level of a norm, from 0; None if the norm is exactly zero."""
        if norm == 0:
            return None
        return min(LEVELS - 1, max(0, math.floor((math.log10(norm) - self.lowest) * LEVELS_PER_DECADE)))

    @property
    def decades(self) -> list[Tick]:
        """Ticks at the whole powers of 10, in levels from the start of the scale."""
        first, last = math.ceil(self.lowest), math.floor(self.lowest + LEVELS / LEVELS_PER_DECADE)
        return [Tick((power - self.lowest) * LEVELS_PER_DECADE, power_of_10(power)) for power in range(first, last + 1)]


def map_figure(heat_map, scale: Scale, num_positions: int) -> dict:
    """Lays out a `HeatMap`, with the first block at the bottom.

    All cells of one level form one SVG path, in units of one bin by one block.
    """
    rows, columns = len(heat_map.blocks), len(heat_map.norms[0])
    row = min(MAX_ROW_HEIGHT, max(MIN_ROW_HEIGHT, FRAME.height / rows))
    paths: dict[int, str] = {}
    for index, norms in enumerate(reversed(heat_map.norms)):
        begin = 0
        for level, run in groupby(map(scale.level, norms)):
            width = len(list(run))
            if level is not None:
                paths[level] = paths.get(level, "") + f"M{begin} {index}h{width}v1h{-width}z"
            begin += width
    step = -(-rows // 6)
    return {
        "title": heat_map.title,
        "height": FRAME.top + rows * row + FRAME.bottom,
        "plot_height": rows * row,
        "columns": columns,
        "rows": rows,
        "paths": dict(sorted(paths.items())),
        "blocks": [
            Tick((rows - number - 0.5) * row, str(block))
            for number, block in enumerate(heat_map.blocks)
            if number % step == 0
        ],
        "positions": [
            Tick(FRAME.plot * position / (columns * heat_map.positions), str(position))
            for position in (0, num_positions // 2, num_positions)
        ],
    }


def histogram_figure(histogram: tuple[tuple[float, int], ...], knee: float) -> dict:
    """Lays out a histogram with bins a tenth of a decade wide; heights are log counts, zero at half a count.

    `below` is the share of the non-zero rows or elements to the left of the knee, whose bars are dropped.
    """
    first, last = histogram[0][0], max(histogram[-1][0] + 0.1, math.log10(knee))
    unit = FRAME.plot / (last - first)
    max_count = max(count for _, count in histogram)

    def height(count: float) -> float:
        return FRAME.height * math.log(2 * count) / math.log(2 * max_count * 1.1)

    # The knee lies on the edge of a bin, up to rounding.
    dropped = {begin: begin + 0.05 < math.log10(knee) for begin, _ in histogram}
    total = sum(count for _, count in histogram)
    step = -(-(math.floor(last) - math.ceil(first)) // 5) or 1
    decades = range(math.ceil(first), math.floor(last) + 1)
    return {
        "bars": [
            {"x": (begin - first) * unit, "width": 0.1 * unit, "height": height(count), "dropped": dropped[begin]}
            for begin, count in histogram
            if count
        ],
        "knee_x": (math.log10(knee) - first) * unit,
        "knee": knee,
        "below": sum(count for begin, count in histogram if dropped[begin]) / total,
        "magnitudes": [Tick((decade - first) * unit, power_of_10(decade)) for decade in decades if decade % step == 0],
        "counts": [Tick(height(10**power), f"{10**power:,}") for power in range(int(math.log10(max_count)) + 1)],
    }


def curve_figure(curve) -> dict | None:
    """Lays out a `Curve` of a training report; returns None if it has no step.

    The loss by step is a line, the validation losses are points on another one.
    """
    if not curve.losses or len(curve.steps) != len(curve.losses):
        return None
    last = max(*curve.steps, *curve.evaluated_after, 1)
    low, high, ticks = _axis([*curve.losses, *curve.validation])

    def place(step: float, loss: float) -> tuple[float, float]:
        return CURVES.plot * step / last, CURVES.height * (high - loss) / (high - low)

    line = [place(step, loss) for step, loss in zip(curve.steps, curve.losses, strict=True)]
    points = [place(step, loss) for step, loss in zip(curve.evaluated_after, curve.validation, strict=False)]
    steps = sorted({0, last // 2, last})
    return {
        "line": _path(line),
        "validation": _path(points),
        "points": points,
        "steps": [Tick(CURVES.plot * step / last, f"{step:,}") for step in steps],
        "losses": [Tick(place(0, loss)[1], label) for loss, label in ticks],
    }


class Interval(NamedTuple):
    """A loss as a point, with its interval as a line."""

    name: str
    loss: float
    x: float
    lowest: float
    highest: float
    y: float


def interval_figure(tested, version: int | None, compared_with: int | None) -> dict | None:
    """Lays out the test losses of `Tested` below each other; returns None if one is not finite."""
    rows = [("base model", tested.base)]
    if tested.active:
        rows.append((f"version {compared_with}", tested.active))
    rows.append((f"version {version}" if version else "this adapter", tested.adapted))
    if any(loss.loss is None for _, loss in rows):
        return None
    spans = [(loss.loss if loss.lowest is None else loss.lowest, loss.highest or loss.loss) for _, loss in rows]
    low, high, ticks = _axis([end for span in spans for end in span])

    def place(loss: float) -> float:
        return INTERVALS.plot * (loss - low) / (high - low)

    return {
        "intervals": [
            Interval(name, loss.loss, place(loss.loss), *map(place, span), INTERVALS.height * (number + 0.5))
            for number, ((name, loss), span) in enumerate(zip(rows, spans, strict=True))
        ],
        "losses": [Tick(place(loss), label) for loss, label in ticks],
        "height": INTERVALS.height * len(rows),
    }


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
