"""Lays out the figures of a report in SVG units; the template only prints the numbers."""

import math
from dataclasses import dataclass

from sebp_edge.insight.heat_maps import HeatMap

# Each colour of a heat map covers a quarter of a decade; smaller norms get the lowest colour.
LEVELS = 12
LEVELS_PER_DECADE = 4
WIDTH, LEFT, RIGHT, BOTTOM, TOP = 320, 30, 14, 32, 6
PLOT = WIDTH - LEFT - RIGHT
MAP_HEIGHT, MIN_ROW_HEIGHT, MAX_ROW_HEIGHT = 150, 3, 14
HISTOGRAM_HEIGHT = 150


@dataclass(frozen=True)
class Tick:
    """A label at a position along an axis."""

    position: float
    label: str


def power_of_10(exponent: float) -> str:
    """Formats a power of 10, such as 10⁻² or 10⁻¹·⁵."""
    return "10" + f"{exponent:g}".translate(str.maketrans("-.0123456789", "⁻·⁰¹²³⁴⁵⁶⁷⁸⁹"))


@dataclass(frozen=True)
class Scale:
    """The colour scale of several heat maps; level 0 begins at 10^lowest, and smaller norms belong to it too."""

    lowest: float

    @classmethod
    def of(cls, maps: list[HeatMap]) -> "Scale":
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


@dataclass(frozen=True)
class MapFigure:
    """A heat map; all cells of one level form one SVG path, in units of one bin by one block."""

    title: str
    height: float
    plot_height: float
    columns: int
    rows: int
    paths: dict[int, str]
    blocks: list[Tick]
    positions: list[Tick]


def map_figure(heat_map: HeatMap, scale: Scale, num_positions: int) -> MapFigure:
    """Lays out a heat map, with the first block at the bottom."""
    rows, columns = len(heat_map.blocks), len(heat_map.norms[0])
    row = min(MAX_ROW_HEIGHT, max(MIN_ROW_HEIGHT, MAP_HEIGHT / rows))
    paths: dict[int, str] = {}
    for index, norms in enumerate(reversed(heat_map.norms)):
        levels = [scale.level(norm) for norm in norms]
        for begin, end, level in _runs(levels):
            if level is not None:
                paths[level] = paths.get(level, "") + f"M{begin} {index}h{end - begin}v1h{begin - end}z"
    step = -(-rows // 6)
    return MapFigure(
        title=heat_map.title,
        height=TOP + rows * row + BOTTOM,
        plot_height=rows * row,
        columns=columns,
        rows=rows,
        paths=dict(sorted(paths.items())),
        blocks=[
            Tick((rows - number - 0.5) * row, str(block))
            for number, block in enumerate(heat_map.blocks)
            if number % step == 0
        ],
        positions=[
            Tick(PLOT * position / (columns * heat_map.positions), str(position))
            for position in (0, num_positions // 2, num_positions)
        ],
    )


def _runs(levels: list[int | None]) -> list[tuple[int, int, int | None]]:
    """Runs of equal levels, as (begin, end, level)."""
    changes = [index for index in range(1, len(levels)) if levels[index] != levels[index - 1]]
    begins, ends = [0, *changes], [*changes, len(levels)]
    return [(begin, end, levels[begin]) for begin, end in zip(begins, ends, strict=True)]


@dataclass(frozen=True)
class Bar:
    """One bin of the histogram; `dropped` if it is below the knee."""

    x: float
    width: float
    height: float
    dropped: bool


@dataclass(frozen=True)
class HistogramFigure:
    """A histogram of magnitudes, its knee, and the share of them to the left of it.

    Attributes:
        below: share of the non-zero rows or elements to the left of the knee.
        magnitudes, counts: the ticks of both axes.
    """

    bars: list[Bar]
    knee_x: float
    knee: float
    below: float
    magnitudes: list[Tick]
    counts: list[Tick]


def histogram_figure(histogram: tuple[tuple[float, int], ...], knee: float) -> HistogramFigure:
    """Lays out a histogram with bins a tenth of a decade wide; heights are log counts, zero at half a count."""
    first, last = histogram[0][0], max(histogram[-1][0] + 0.1, math.log10(knee))
    unit = PLOT / (last - first)
    max_count = max(count for _, count in histogram)

    def height(count: float) -> float:
        return HISTOGRAM_HEIGHT * math.log(2 * count) / math.log(2 * max_count * 1.1)

    # The knee lies on the edge of a bin, up to rounding.
    dropped = {begin: begin + 0.05 < math.log10(knee) for begin, _ in histogram}
    total = sum(count for _, count in histogram)
    step = -(-(math.floor(last) - math.ceil(first)) // 5) or 1
    decades = range(math.ceil(first), math.floor(last) + 1)
    return HistogramFigure(
        bars=[
            Bar((begin - first) * unit, 0.1 * unit, height(count), dropped[begin])
            for begin, count in histogram
            if count
        ],
        knee_x=(math.log10(knee) - first) * unit,
        knee=knee,
        below=sum(count for begin, count in histogram if dropped[begin]) / total,
        magnitudes=[Tick((decade - first) * unit, power_of_10(decade)) for decade in decades if decade % step == 0],
        counts=[Tick(height(10**power), f"{10**power:,}") for power in range(int(math.log10(max_count)) + 1)],
    )
