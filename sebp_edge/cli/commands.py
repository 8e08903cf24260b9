"""The commands of `sebp-edge`, by name."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext

import typer
from rich import columns
from rich.table import Table
from typer.core import TyperGroup

from sebp_edge.basics.version import __version__
from sebp_edge.cli import (
    adapt,
    adapters,
    analyze,
    ask,
    client,
    doctor,
    export,
    forget,
    generate,
    inspect,
    listings,
    plan,
    serve,
)
from sebp_edge.cli.console import invalid_options_as_json


class _Folding(Table):
    def add_row(self, *args, **options) -> None:
        super().add_row(*args, **options)
        for column in self.columns:
            column.overflow = "fold"


def _fold_words_of_help() -> None:
    """Lets the tables of help fold words that typer would cut, which has no setting for it."""
    from typer import rich_utils

    rich_utils.Table = columns.Table = _Folding


class _Commands(TyperGroup):
    """All commands. If one was called with --json, invalid options are printed as JSON, too."""

    def main(self, args: Sequence[str] | None = None, **options):
        given = sys.argv[1:] if args is None else args
        if not given or {"-h", "--help"} & {*given}:
            _fold_words_of_help()
        return super().main(args, obj="--json" in given, **options)

    def make_context(self, *args, obj: bool, **options) -> typer.Context:
        with invalid_options_as_json() if obj else nullcontext():
            return super().make_context(*args, obj=obj, **options)

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
_FIRST, _MORE = {"rich_help_panel": "Start here"}, {"rich_help_panel": "More"}
app.command(cls=adapt.AdaptCommand, **_FIRST)(adapt.adapt)
app.command(cls=generate.PromptCommand, **_FIRST)(ask.ask)
app.command(**_FIRST)(inspect.inspect)
app.command(cls=generate.PromptCommand, **_FIRST)(generate.generate)
app.command(**_FIRST)(forget.forget)
app.command(**_FIRST)(export.export)
app.add_typer(adapters.app, name="adapters", **_MORE)
app.add_typer(listings.jobs_app, name="jobs", **_MORE)
app.add_typer(client.app, name="client", **_MORE)
for command in (listings.models, listings.recipes, plan.plan, doctor.doctor, serve.serve):
    app.command(**_MORE)(command)
app.command(rich_help_panel="For researchers")(analyze.analyze)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"sebp-edge {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None: ...
