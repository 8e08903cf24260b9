"""Plots a benchmark as one SVG file: bars of time and memory, readable on light and dark backgrounds."""

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

from sebp_edge.errors import StorageError
from sebp_edge.research.bench.compare import Measurement
from sebp_edge.research.bench.result import BenchResult
from sebp_edge.units import gigabytes, percent

WIDTH, MARGIN, LABEL, FIGURE = 720, 24, 130, 110
BAR, GAP, LINE = 18, 10, 22
KINDS = {"forward": "forward", "backward": "backward", "update": "update", "whole": "one graph replay"}
STYLE = """
  svg { --ground: #ffffff; --text: #1f2328; --faint: #59636e; --forward: #8bb8e8; --backward: #2f6fb3;
        --update: #b58900; --whole: #7d5ba6; --memory: #4f9d69; }
  @media (prefers-color-scheme: dark) {
    svg { --ground: #0d1117; --text: #e6edf3; --faint: #9198a1; --forward: #4d7fb0; --backward: #8ec2ff;
          --update: #d9a520; --whole: #b392e6; --memory: #6cc28b; }
  }
  text { font: 13px system-ui, sans-serif; fill: var(--text); }
  .faint { fill: var(--faint); }
  .title { font-weight: 600; }
"""


def write_plot(result: BenchResult, path: Path) -> None:
    """Writes the plot as a self-contained SVG file.

    Raises:
        StorageError: the file cannot be written.
    """
    try:
        path.write_text(draw(result), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}.") from error


def draw(result: BenchResult) -> str:
    """The plot as an SVG document."""
    page = _SvgShapes()
    page.text(f"{result.model}, {result.method}, {result.dtype}: one training step on {result.device}", "title")
    page.text(
        f"{len(result.lengths)} texts of {result.lengths[0]} to {result.lengths[-1]} tokens padded to "
        f"{result.context_length}, {percent(result.padding_share, 0)} padding",
        "faint",
    )
    bars = [_time_bar(one) for one in result.measurements]
    shown = {kind for bar in bars for kind, _ in bar.parts}
    page.legend({kind: words for kind, words in KINDS.items() if kind in shown})
    page.bars(bars)
    if any(one.times and one.times.peak_bytes for one in result.measurements):
        page.text("Peak GPU memory of torch's allocator, weights included", "title")
        page.bars([_memory_bar(one) for one in result.measurements])
    for line in _folded(result.recommendation, 100):
        page.text(line)
    return page.document()


class _PlottedBar(NamedTuple):
    """The bar of one variant: its parts from left to right as (kind, size in any unit), and the text after them."""

    label: str
    parts: list[tuple[str, float]]
    figure: str


def _time_bar(one: Measurement) -> _PlottedBar:
    times = one.times
    if times is None:
        return _PlottedBar(one.variant.name, [], one.status)
    if times.forward is None or times.backward is None:
        parts = [("whole", times.step)]
    else:
        update = max(0.0, times.step - times.forward - times.backward)
        parts = [("forward", times.forward), ("backward", times.backward), ("update", update)]
    return _PlottedBar(one.variant.name, parts, f"{1e3 * times.step:,.1f} ms")


def _memory_bar(one: Measurement) -> _PlottedBar:
    if one.times is None:
        return _PlottedBar(one.variant.name, [], one.status)
    return _PlottedBar(one.variant.name, [("memory", one.times.peak_bytes)], gigabytes(one.times.peak_bytes))


def _folded(text: str, width: int) -> Iterator[str]:
    line = ""
    for word in text.split():
        if line and len(line) + len(word) >= width:
            yield line
            line = word
        else:
            line = f"{line} {word}".lstrip()
    yield line


class _SvgShapes:
    """Collects SVG shapes from top to bottom."""

    def __init__(self):
        self._shapes: list[str] = []
        self._y = MARGIN

    def text(self, words: str, kind: str = "") -> None:
        self._put(f'<text class="{kind}" x="{MARGIN}" y="{self._y + BAR - 4}">{escape(words)}</text>')
        self._y += LINE

    def legend(self, kinds: dict[str, str]) -> None:
        x = MARGIN
        for kind, words in kinds.items():
            self._put(f'<rect x="{x}" y="{self._y + 4}" width="12" height="12" fill="var(--{kind})"/>')
            self._put(f'<text class="faint" x="{x + 18}" y="{self._y + BAR - 4}">{escape(words)}</text>')
            x += 40 + 8 * len(words)
        self._y += LINE + GAP

    def bars(self, bars: list[_PlottedBar]) -> None:
        """Draws bars in proportion to the longest one."""
        full = WIDTH - 2 * MARGIN - LABEL - FIGURE
        longest = max((sum(size for _, size in bar.parts) for bar in bars), default=0) or 1
        for bar in bars:
            self._bar(bar, full / longest)
        self._y += GAP

    def _bar(self, bar: _PlottedBar, scale: float) -> None:
        x = float(MARGIN + LABEL)
        self._put(f'<text x="{MARGIN}" y="{self._y + BAR - 4}">{escape(bar.label)}</text>')
        for kind, size in bar.parts:
            geometry = f'x="{x:.1f}" y="{self._y}" width="{scale * size:.1f}" height="{BAR}"'
            self._put(f'<rect {geometry} fill="var(--{kind})"/>')
            x += scale * size
        kind = "" if bar.parts else "faint"
        self._put(f'<text class="{kind}" x="{x + 8:.1f}" y="{self._y + BAR - 4}">{escape(bar.figure)}</text>')
        self._y += BAR + GAP

    def document(self) -> str:
        height = self._y + MARGIN
        size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
        ground = '<rect width="100%" height="100%" fill="var(--ground)"/>'
        shapes = "\n".join(self._shapes)
        head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>'
        return f"{head}\n<style>{STYLE}</style>\n{ground}\n{shapes}\n</svg>\n"

    def _put(self, shape: str) -> None:
        self._shapes.append(shape)
