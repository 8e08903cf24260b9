"""Plots a benchmark as one SVG file: bars of time and memory, readable on light and dark backgrounds.

`plot.svg` is the template, and `sebp_edge.basics.pages.chart` lays out the bars.
"""

import textwrap
from pathlib import Path

from sebp_edge.basics.pages import chart
from sebp_edge.basics.pages.render import render
from sebp_edge.basics.units import gigabytes, percent
from sebp_edge.errors import StorageError
from sebp_edge.research.bench.compare import Measurement
from sebp_edge.research.bench.result import BenchResult

KINDS = {"forward": "forward", "backward": "backward", "update": "update", "whole": "one graph replay"}


def write_plot(result: BenchResult, path: Path) -> None:
    """Writes the plot as a self-contained SVG file."""
    try:
        path.write_text(draw(result), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}.") from error


def draw(result: BenchResult) -> str:
    """The plot as an SVG document."""
    times = [(one.variant.name, *_times(one)) for one in result.measurements]
    shown = {kind for _, parts, _ in times for kind in parts}
    has_peaks = any(one.times and one.times.peak_bytes for one in result.measurements)
    memory = [(one.variant.name, *_memory(one)) for one in result.measurements] if has_peaks else []
    return render(
        Path(__file__).with_name("plot.svg"),
        {"percent": percent},
        figures=chart,
        result=result,
        kinds={kind: words for kind, words in KINDS.items() if kind in shown},
        times=chart.stacked_bars(times),
        memory=chart.stacked_bars(memory),
        advice=textwrap.wrap(result.recommendation, 100, break_long_words=False, break_on_hyphens=False),
    )


def _times(one: Measurement) -> tuple[dict[str, float], str]:
    """The seconds of a step's parts, and the words for the whole."""
    times = one.times
    if times is None:
        return {}, one.status
    if times.forward is None or times.backward is None:
        parts = {"whole": times.step}
    else:
        update = max(0.0, times.step - times.forward - times.backward)
        parts = {"forward": times.forward, "backward": times.backward, "update": update}
    return parts, f"{1e3 * times.step:,.1f} ms"


def _memory(one: Measurement) -> tuple[dict[str, float], str]:
    if one.times is None:
        return {}, one.status
    return {"memory": one.times.peak_bytes}, gigabytes(one.times.peak_bytes)
