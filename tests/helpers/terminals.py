"""A terminal in place of what the command line writes to, or of what a process reads from and reports to."""

import contextlib
import io
import os

from command import process
from rich.console import Console


def draw_on_terminal(patch, *modules, width, stream="out", is_terminal=True):
    """Lets these modules write to it; returns what it gets."""
    drawn = io.StringIO()
    terminal = Console(file=drawn, force_terminal=is_terminal, width=width, color_system=None, highlight=False)
    for module in modules:
        patch.setattr(module, stream, terminal)
    return drawn


def run_on_terminal(*arguments, typed):
    """Runs a command to which this is typed; returns its exit code, its output, and what else the terminal shows."""
    import pty  # which Windows lacks

    ours, theirs = pty.openpty()
    with process(*arguments, stdin=theirs, stderr=theirs) as one:
        os.close(theirs)
        os.write(ours, typed.encode())
        shown = read_to_the_end(ours)
        output, _ = one.communicate(timeout=200)
    return one.returncode, output, shown


def read_to_the_end(terminal):
    """Returns all that a terminal shows until the process on its other side has ended; closes it."""
    shown = b""
    with contextlib.suppress(OSError):  # how Linux says that the other side is closed
        while part := os.read(terminal, 65536):
            shown += part
    os.close(terminal)
    return shown.decode()
