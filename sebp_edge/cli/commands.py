"""The commands of `sebp-edge`, by name."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext

import typer
from typer.core import TyperGroup

from sebp_edge.basics.version import __version__
from sebp_edge.cli import (
    adapt,
    adapters,
    analyze,
    ask,
    bench,
    doctor,
    export,
    forget,
    generate,
    inspect,
    jobs,
    listings,
    lr_range,
    plan,
    serve,
)
from sebp_edge.cli.console import invalid_options_as_json


class _Commands(TyperGroup):
    """All commands. If one was called with --json, invalid options are printed as JSON, too."""

    def main(self, args: Sequence[str] | None = None, **options):
        as_json = "--json" in (sys.argv[1:] if args is None else args)
        return super().main(args, obj=as_json, **options)

    def make_context(self, *given, obj: bool, **options) -> typer.Context:
        with invalid_options_as_json() if obj else nullcontext():
            return super().make_context(*given, obj=obj, **options)

    def invoke(self, ctx: typer.Context):
        with invalid_options_as_json() if ctx.obj else nullcontext():
            return super().invoke(ctx)


app = typer.Typer(
    name="sebp-edge",
    cls=_Commands,
    help="Adapt a language model to your texts, on your own machine. Your texts never leave it.",
    no_args_is_help=True,
    rich_markup_mode="markdown",  # which wraps the paragraphs of docstrings at the width of the terminal
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=adapt.AdaptCommand)(adapt.adapt)
app.command()(forget.forget)
app.command()(inspect.inspect)
app.command()(plan.plan)
app.command()(analyze.analyze)
app.command()(lr_range.lr_range)
app.command()(bench.bench)
app.command(cls=generate.PromptCommand)(generate.generate)
app.command(cls=generate.PromptCommand)(ask.ask)
app.command()(export.export)
app.command()(listings.models)
app.command()(listings.recipes)
app.add_typer(adapters.app, name="adapters")
app.add_typer(jobs.app, name="jobs")
app.command()(serve.serve)
app.command()(doctor.doctor)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"sebp-edge {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None: ...
