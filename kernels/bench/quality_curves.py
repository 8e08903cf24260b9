"""Plots the results of `selection_quality` as one SVG: training loss over ten parts of each training, mean over seeds.

    python kernels/bench/quality_curves.py CSV... SVG

The dense curve is wide and grey, and the exact curve thin and on top, so that both are visible.
"""

import argparse
import csv
from html import escape
from pathlib import Path
from statistics import mean

from selection_quality import PARTS

# Colours that can be told apart with any colour vision (Okabe and Ito), and line widths.
LINES = {
    "dense": ("#b0b0b0", 7),
    "published": ("#d55e00", 2),
    "top n": ("#e69f00", 2),
    "threshold": ("#0072b2", 3.5),
    "exact": ("#000000", 1.2),
}
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, ACROSS = 260, 170, 40, 24, 10, 3

Curves = dict[str, list[float]]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", type=Path, nargs="+")
    parser.add_argument("svg", type=Path)
    options = parser.parse_args(arguments)
    options.svg.write_text(draw(read(options.csv)), encoding="utf-8")


def read(files: list[Path]) -> dict[str, Curves]:
    """Reads the curves: by model and texts, then by variant."""
    found: dict[str, dict[str, list[list[float]]]] = {}
    rows = (row for file in files for row in csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
    for row in rows:
        curve = [float(row[f"train_{part}"]) for part in range(PARTS)]
        found.setdefault(f"{row['model']}, {row['texts']}", {}).setdefault(row["variant"], []).append(curve)
    return {
        name: {variant: [mean(part) for part in zip(*curves, strict=True)] for variant, curves in variants.items()}
        for name, variants in found.items()
    }


def draw(panels: dict[str, Curves]) -> str:
    rows = -(-len(panels) // ACROSS)
    size = ACROSS * WIDTH, rows * HEIGHT + 24
    parts = [
        panel(name, curves, number % ACROSS * WIDTH, number // ACROSS * HEIGHT)
        for number, (name, curves) in enumerate(panels.items())
    ]
    for number, (variant, (colour, width)) in enumerate(LINES.items()):
        x, y = LEFT + 130 * number, size[1] - 10
        parts.append(f'<path d="M{x},{y - 4}h24" stroke="{colour}" stroke-width="{width}"/>')
        parts.append(f'<text x="{x + 30}" y="{y}">{variant}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" font-family="sans-serif"'
    paper = '<rect width="100%" height="100%" fill="#fff"/><style>text{fill:#222}</style>'
    return "\n".join([f'{head} font-size="12" fill="none">', paper, *parts, "</svg>\n"])


def panel(name: str, curves: Curves, x: float, y: float) -> str:
    """The curves of one model, on their own scale."""
    values = [value for curve in curves.values() for value in curve]
    low, high = min(values), max(values)
    height, step = HEIGHT - TOP - BOTTOM, (WIDTH - LEFT - 10) / (PARTS - 1)

    def point(number: int, value: float) -> str:
        return f"{LEFT + number * step:.1f},{TOP + (high - value) / ((high - low) or 1) * height:.1f}"

    lines = []
    for variant, (colour, width) in LINES.items():
        points = " ".join(point(number, value) for number, value in enumerate(curves.get(variant, [])))
        lines.append(f'<polyline points="{points}" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"/>')
    axis = f'<path d="M{LEFT - 4},{TOP}v{height}h{WIDTH - LEFT - 6}" stroke="#888"/>'
    title = f'<text x="{LEFT}" y="{TOP - 8}">{escape(name)}</text>'
    ends = (
        f'<text x="{LEFT - 8}" y="{label_y}" text-anchor="end">{value:.2f}</text>'
        for label_y, value in ((TOP + 8, high), (TOP + height, low))
    )
    return "\n".join([f'<g transform="translate({x},{y})">', title, axis, *ends, *lines, "</g>"])


if __name__ == "__main__":
    main()
