"""`sebp-edge analyze PATH...`: shows how sparse the gradients on these texts are."""

from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from sebp_edge.basics.files import check_output_file
from sebp_edge.basics.pages.render import write
from sebp_edge.basics.units import percent, plural
from sebp_edge.cli.base_model import personalizing
from sebp_edge.cli.console import out, print_json, print_table, quick_imports
from sebp_edge.cli.options import Request, path_option, takes_request

HTML = "sebp-edge-analysis.html"


@takes_request(epochs=False)
def analyze(
    request: Request,
    examples: Annotated[int, typer.Option(min=1, help="Maximum number of examples to analyze.")] = 16,
    html: Annotated[
        Path | None, path_option(f"Write the report to this file; by default {HTML}, with --json none.")
    ] = None,
) -> None:
    """Show how sparse the gradients on the texts in PATH are, by layer: as a table, and by projection as an HTML file.

    Analyzes the base model without an adapter and trains nothing. --model may also be a folder with an encoder (BERT,
    RoBERTa, DistilBERT). Overwrites an earlier analysis, but no other file.
    """
    with quick_imports():
        from sebp_edge.research.analysis import analysis as research

    page = html or (None if request.as_json else Path(HTML))
    if page is not None:
        check_output_file(page, research.MARK.encode(), "analysis")
    with personalizing(request.as_json, lists_left_out=False, **request.settings) as personalizer:
        analysis = research.analyze(personalizer, request.texts, examples=examples)
    if page is not None:
        write(analysis.to_html(), page)
    if request.as_json:
        print_json(analysis.to_dict() | {"html": page and str(page)})
    else:
        show_analysis(analysis)
        out.print(f"written to {page}", markup=False)


def show_analysis(analysis) -> None:
    """Prints what each loss saves and would lose, and a row for each group of layers; the page and JSON have all."""
    rows = []
    for sparsity in analysis.losses:
        name = f"[bold]Loss on {sparsity.loss}:[/] " if len(analysis.losses) > 1 else ""
        exact, dropped, _ = sparsity.summary  # the third compares with the paper's procedure
        out.print(f"{name}{exact}")
        out.print(dropped)
        for layers, projections in sparsity.grouped().items():
            shares = [fmean(getattr(one, share) for one in projections) for share in ("zero", "below_knee", "top_rows")]
            rows.append([sparsity.loss, layers, *map(percent, shares)])
    print_table(["loss on", "layers", "zero rows", "below the knee", "rows with 99 %"], rows)
    if analysis.has_new_head:
        out.print(f"The model has no classification head; a new one was drawn with seed {analysis.seed}.")
    analyzed, total = analysis.analyzed, analysis.texts
    out.print(
        f"Analyzed {analyzed.examples} of {plural(total.examples, 'example')}, {analyzed.tokens:,} of "
        f"{plural(total.tokens, 'token')}; padded to {analysis.context_length} tokens, "
        f"{percent(analyzed.padding_share)} of the rows are padding."
    )
