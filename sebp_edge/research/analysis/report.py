"""Renders an analysis of gradients as one HTML page with tables and figures.

The page contains none of the user's text and loads nothing. `report.html` is the template, and `basics.pages.chart`
lays out the figures.
"""

from pathlib import Path

from sebp_edge.basics.pages import chart
from sebp_edge.basics.pages.render import mark, render
from sebp_edge.basics.units import percent

MARK = mark("analyze")


def render_page(analysis) -> str:
    """Returns the HTML page of an `Analysis`; every inserted value is escaped."""
    filters = {"percent": percent, "power": chart.power_of_10}
    return render(
        Path(__file__).with_name("report.html"),
        filters,
        mark=MARK,
        analysis=analysis,
        figures=chart,
        scale_of=lambda sparsity: chart.Scale.of([*sparsity.examples, *sparsity.projections]),
    )
