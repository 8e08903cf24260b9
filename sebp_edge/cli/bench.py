"""`sebp-edge bench [PATH...]`: times every variant of a training step on this machine."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from sebp_edge.basics.files import check_output_file
from sebp_edge.basics.units import gigabytes, percent
from sebp_edge.cli.console import err, one_sentence_errors, out, print_json, print_note, print_table, quick_imports
from sebp_edge.cli.options import Device, Json, parse_path, path_option
from sebp_edge.errors import OptionError

# Bytes that identify earlier tables and plots, which may be overwritten: column names, colours.
TABLE_MARK, PLOT_MARK = b"examples,model,weights,method,", b"--forward: #8bb8e8; --backward: #2f6fb3;"


def bench(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            parser=parse_path, metavar="PATH", help="Files or folders with your texts; by default short texts."
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="Name, folder, Hub id or config.json of the base model.")] = "tiny",
    recipe: Annotated[str, typer.Option(help="Name of a recipe, or a TOML file.")] = "notes",
    padding: Annotated[str | None, typer.Option(help="Share of the batch that is padding, such as 90%.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens that each text is padded to.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Texts per batch.")] = 4,
    device: Device = None,
    as_json: Json = False,
    csv: Annotated[Path | None, path_option("Also write the table to this CSV file.")] = None,
    plot: Annotated[Path | None, path_option("Also write a plot to this SVG file.")] = None,
) -> None:
    """Time a training step in each variant: dense padded, drop-in, dynamic padding, packed, hoisted, captured graph.

    Variants whose loss or gradients differ from the dense fp32 model's are refused, not timed.

    Only the lengths of your texts are used. Without the model's weights, random weights of its shape are timed.
    """
    with one_sentence_errors(as_json=as_json, takes_time=True):
        with quick_imports():
            from sebp_edge.research.bench.plot import write_plot
            from sebp_edge.research.bench.run import run_bench
            from sebp_edge.research.bench.workload import parse_share

        if padding is not None and context is not None:
            raise OptionError("--padding sets the context length itself; leave out --context or --padding.")
        # Checked before any timing.
        if plot is not None and plot.suffix.lower() != ".svg":
            raise OptionError(f"The plot is an SVG file, so its name {plot.name!r} must end in .svg.")
        for path, mark in ((csv, TABLE_MARK), (plot, PLOT_MARK)):
            if path is not None:
                check_output_file(path, mark, "benchmark")
        share = None if padding is None else parse_share(padding)
        with err.status("") as status:
            result = run_bench(
                model,
                paths or None,
                recipe=recipe,
                context_length=context,
                padding=share,
                batch_size=batch,
                device=device,
                on_event=lambda notice: print_note(notice.message),
                on_progress=status.update,
            )
        if csv is not None:
            result.write_csv(csv)
        if plot is not None:
            write_plot(result, plot)
        if as_json:
            print_json({"event": "bench", **result.to_dict()})
        else:
            show_bench(result)


def show_bench(result) -> None:
    """Prints what was timed, a row per variant, why some variants have no times, and the recommendation."""
    texts = f"{len(result.lengths)} texts of {result.lengths[0]} to {result.lengths[-1]} tokens"
    out.print(
        f"[bold]{escape(result.model)}[/] ({result.method}, {result.dtype}, {result.weights} weights) "
        f"on {escape(result.device)}: {texts}, padded to {result.context_length:,}, "
        f"{percent(result.padding_share, 0)} padding"
    )
    rows = result.rows()
    table = [["variant", "forward", "backward", "step", "vs dense", "peak", "tokens/s", "error"]]
    table += [_cells(row, rows[0]["step_ms"]) for row in rows]
    if not any(row["peak_bytes"] for row in rows):
        table = [[*cells[:5], *cells[6:]] for cells in table]
    print_table(table[0], table[1:])
    for row in rows:
        if row["reason"]:
            out.print(f"{row['variant']}, {row['status']}: {row['reason']}.", style="dim", markup=False)
    out.print(f"[bold]{escape(result.recommendation)}[/]")


def _cells(row: dict, dense_ms: float | None) -> list[str]:
    step = row["step_ms"]
    error = "-" if row["gradient_error"] is None else f"{row['gradient_error']:.1e}"
    if step is None:
        return [row["variant"], "-", "-", row["status"], "-", "-", "-", error]
    return [
        row["variant"],
        _milliseconds(row["forward_ms"]),
        _milliseconds(row["backward_ms"]),
        _milliseconds(step),
        "-" if dense_ms is None else f"{step / dense_ms:.2f}",
        gigabytes(row["peak_bytes"] or 0),
        f"{row['tokens_per_second']:,.0f}",
        error,
    ]


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f} ms" if value < 100 else f"{value:,.0f} ms"
