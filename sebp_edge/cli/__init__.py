"""The command line: parses arguments, calls the SDK, prints the result. The SDK can be embedded without it.

Internal: import from `sebp_edge` or `sebp_edge.research`.

Imports nothing that takes time, so that a signal finds its handler from the beginning.
"""

import os
import signal
import sys

from sebp_edge.basics.interruptions import SIGNALS
from sebp_edge.cli.early_signals import exit_interrupted


def main() -> None:
    """Runs the `sebp-edge` command; SIGTERM and SIGHUP interrupt it as Ctrl-C does."""
    if sys.argv[1:] == ["serve"]:
        from sebp_edge.serve.__main__ import main as serve  # only standard library, since it moves the streams away

        serve()
    for signum in SIGNALS:
        # A signal that is ignored stays ignored, as SIGHUP under `nohup`.
        if signal.getsignal(signum) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(signum, exit_interrupted)
    _open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        # File names may contain bytes that are not text, and a pipe may have another encoding than UTF-8.
        stream.reconfigure(errors="backslashreplace")

    if sys.argv[1:2] == ["ask"] and not {"-h", "--help"} & {*sys.argv} and sys.stderr.isatty():
        print("- reading", end="\r", file=sys.stderr, flush=True)  # the spinner's first frame, while it is imported

    from sebp_edge.cli import commands, console

    with console.reporting_failed_outputs():
        commands.app()


def _open_missing_streams() -> None:
    """Opens the null device in place of closed standard streams: a service may have none.

    Otherwise the next file that is opened would take the number of a standard stream.
    """
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115
