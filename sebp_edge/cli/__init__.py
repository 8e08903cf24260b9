"""The command line: parses arguments, calls the SDK, prints the result. The SDK can be embedded without it.

Internal: import from `sebp_edge` or `sebp_edge.research`.
"""

import logging
import os
import signal
import sys

import typer

from sebp_edge.cli import (
    adapt,
    adapters,
    analyze,
    bench,
    doctor,
    export,
    forget,
    generate,
    inspect,
    listings,
    lr_range,
    plan,
)
from sebp_edge.interruptions import SIGNALS, Interruptions

app = typer.Typer(
    name="sebp-edge",
    help="Adapt a language model to your texts, on your own machine. Your texts never leave it.",
    no_args_is_help=True,
    rich_markup_mode="markdown",  # which wraps the paragraphs of docstrings at the width of the terminal
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(adapt.adapt)
app.command()(forget.forget)
app.command()(inspect.inspect)
app.command()(plan.plan)
app.command()(analyze.analyze)
app.command()(lr_range.lr_range)
app.command()(bench.bench)
app.command(cls=generate.PromptCommand)(generate.generate)
app.command()(export.export)
app.command()(listings.models)
app.command()(listings.recipes)
app.add_typer(adapters.app, name="adapters")
app.command()(doctor.doctor)


def _print_version(requested: bool) -> None:
    if requested:
        from sebp_edge import __version__

        typer.echo(f"sebp-edge {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None: ...


def main() -> None:
    """Runs the `sebp-edge` command; SIGTERM and SIGHUP interrupt it as Ctrl-C does."""
    for signum in SIGNALS:
        # A signal that is ignored stays ignored, as SIGHUP under `nohup`.
        if signal.getsignal(signum) is signal.SIG_DFL:
            signal.signal(signum, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        # File names may contain bytes that are not text, and a pipe may have another encoding than UTF-8.
        stream.reconfigure(errors="backslashreplace")
    # PEFT imports bitsandbytes if it is installed. bitsandbytes then warns about layers that are not used here, and
    # loads torch's compiler for seconds, which no command uses.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        with Interruptions():
            app()
    finally:
        # The outcome has been reported; nothing is left to interrupt while Python shuts down.
        for signum in SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
