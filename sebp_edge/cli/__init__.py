"""The command line: arguments in, SDK called, result printed. Nothing here is needed to embed the SDK."""

import logging
import signal
import sys

import typer

from sebp_edge.cli import adapt, adapters, analyze, bench, doctor, generate, listings, plan
from sebp_edge.interruptions import NUMBERS, Interruptions

app = typer.Typer(
    name="sebp-edge",
    help="Let a language model learn your texts, on your own machine. Nothing leaves it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(adapt.adapt)
app.command()(plan.plan)
app.command()(analyze.analyze)
app.command()(bench.bench)
app.command(cls=generate.TakesAnyPrompt)(generate.generate)
app.command()(listings.models)
app.command()(listings.recipes)
app.add_typer(adapters.app, name="adapters")
app.command()(doctor.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        from sebp_edge import __version__

        typer.echo(f"sebp-edge {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None: ...


def main() -> None:
    """The `sebp-edge` command. Who closes its terminal, or asks it to end, interrupts it as Ctrl-C does."""
    for number in NUMBERS:
        # `nohup` ignores SIGHUP.
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        # A name of a file need not be text, and a pipe need not be UTF-8.
        stream.reconfigure(errors="backslashreplace")
    # PEFT imports bitsandbytes wherever it is installed; it warns of what its layers lack, and none are used here.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        with Interruptions():
            app()
    finally:
        # How it ended is said; while Python cleans up, there is nothing to interrupt.
        for number in NUMBERS:
            signal.signal(number, signal.SIG_IGN)
