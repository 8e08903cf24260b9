"""Renders an analysis of gradients as one HTML page: its tables and figures, with the paper's tables beside them.

The page contains none of the user's text and loads nothing. `report.html` is the template, and `basics.pages.chart`
lays out the figures.
"""

from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from sebp_edge.basics.pages import chart
from sebp_edge.basics.pages.render import mark, render
from sebp_edge.basics.units import percent
from sebp_edge.research.analysis import paper
from sebp_edge.research.analysis.gradient_sparsity import LayerRows

MARK = mark("analyze")


def render_page(analysis) -> str:
    """Returns the HTML page of an `Analysis`; every inserted value is escaped."""
    filters = {"percent": percent, "power": chart.power_of_10, "share": _share}
    return render(
        Path(__file__).with_name("report.html"),
        filters,
        mark=MARK,
        analysis=analysis,
        figures=chart,
        scale_of=lambda sparsity: chart.Scale.of([*sparsity.examples, *sparsity.projections]),
        paper_tables=[(table, _paper_rows(table, analysis)) for table in paper.TABLES],
    )


def _share(value: float) -> str:
    """Formats a share as the paper does: two decimals, or three below 0.01."""
    return f"{value:.3f}" if 0 < value < 0.01 else f"{value:.2f}"


def _paper_rows(table: paper.PaperTable, analysis) -> list[tuple[str, list[tuple]]]:
    """The rows of one of the paper's tables, by group: (name, two values of these texts, the paper's values)."""
    lengths, layers = analysis.analyzed, analysis.losses[0].layers
    padding = [
        (
            f"to {context}",
            lengths.padding_share if context == analysis.context_length else None,
            None,
            table.padding(context),
        )
        for context in sorted({*table.contexts, analysis.context_length}, reverse=True)
    ]
    ours = (lengths.mean, lengths.longest, lengths.shortest)
    return [
        ("Tokens per sample", list(zip(paper.STATISTICS, ours, [None] * 3, table.tokens, strict=True))),
        ("Share of padding, if padded", padding),
        ("Sparsity per layer, intermediate", _by_statistic(layers, paper.INTERMEDIATE, table.intermediate)),
        ("Sparsity per layer, output", _by_statistic(layers, paper.OUTPUT, table.output)),
    ]


def _by_statistic(layers: tuple[LayerRows, ...], names: tuple[str, ...], printed: paper.Rows) -> list[tuple]:
    grouped = [layer for layer in layers if layer.projection in names]
    zero = _statistics([layer.zero / layer.rows for layer in grouped])
    with_epsilon = _statistics([layer.below_epsilon for layer in grouped])
    return list(zip(paper.STATISTICS, zero, with_epsilon, printed, strict=True))


def _statistics(shares: list[float]) -> list[float | None]:
    """The values of `paper.STATISTICS`; None if there are no layers."""
    statistics: tuple[Callable, ...] = (fmean, max, min)
    return [of(shares) if shares else None for of in statistics]
