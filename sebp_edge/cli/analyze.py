"""`sebp-edge analyze PATH...`: shows how sparse the gradients on these texts are."""

from pathlib import Path
from typing import Annotated

import typer

from sebp_edge.cli.console import Paths, one_sentence_errors, out, parse_path, print_json, print_table, quick_imports

HTML = "sebp-edge-analysis.html"


def analyze(
    paths: Paths,
    model: Annotated[str, typer.Option(help="A known name, a folder, or a Hub id.")] = "tiny",
    recipe: Annotated[str, typer.Option(help="A recipe's name, or a TOML file; for its context.")] = "notes",
    examples: Annotated[int, typer.Option(min=1, help="How many to look at, at most.")] = 16,
    context: Annotated[int | None, typer.Option(help="Tokens that each example is padded to.")] = None,
    seed: Annotated[int, typer.Option(help="Draws the examples.")] = 0,
    device: Annotated[str | None, typer.Option(help="cuda, mps or cpu.")] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            parser=parse_path, metavar="FILE", help=f"Where to draw it; by default {HTML} here, with --json nowhere."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Show how sparse the gradients of the texts in PATH are: by layer and projection, in a table and in one HTML file.

    The model is looked at as it is, and nothing is trained. A file that is no analysis is never overwritten.
    """
    with one_sentence_errors(as_json=as_json):
        with quick_imports():
            from sebp_edge.cli.progress import show_progress
            from sebp_edge.files import check_output_file
            from sebp_edge.insight.report import MARK, write
            from sebp_edge.personalizer import Personalizer
            from sebp_edge.recipe import Recipe

        page = html or (None if as_json else Path(HTML))
        if page is not None:
            check_output_file(page, MARK.encode(), "analysis")
        chosen = Recipe.load(recipe).replace(context_length=context)
        with show_progress(as_json) as sink:
            personalizer = Personalizer(model, recipe=chosen, device=device, seed=seed, on_event=sink)
            analysis = personalizer.analyze(paths, examples=examples)
        if page is not None:
            write(analysis, page)
        if as_json:
            print_json(analysis.to_dict() | {"html": page and str(page)})
        else:
            show_analysis(analysis)
            out.print(f"drawn in {page}", markup=False)


def show_analysis(analysis) -> None:
    """Prints a table and a summary for each loss."""
    for sparsity in analysis.losses:
        if len(analysis.losses) > 1:
            out.print(f"[bold]with a loss on {sparsity.loss}[/]")
        columns = ["layers", "projection", "zero", "below knee", "norm² there", "hold 99%"]
        rows = [
            [
                layers,
                one.projection,
                *map("{:.1%}".format, (one.zero, one.below_knee, one.energy_below_knee, one.top_rows)),
            ]
            for layers, projections in sparsity.grouped().items()
            for one in projections
        ]
        print_table(columns, rows)
        for sentence in sparsity.summary:
            out.print(sentence)
    analyzed, total = analysis.analyzed, analysis.texts
    out.print(
        f"Looked at {analyzed.examples} of {total.examples:,} examples, {analyzed.tokens:,} of {total.tokens:,} tokens; "
        f"padded to {analysis.context_length}, {analyzed.padding_share:.1%} of their rows is padding."
    )
