"""Output of the command line: rich text for people, JSON lines for programs, one-sentence errors."""

import contextlib
import errno
import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import typer
from rich.console import Console
from rich.table import Table

from sebp_edge.errors import SebpEdgeError
from sebp_edge.events import JsonLines


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # rich would exit the process, whatever it is doing.
        raise


for stream in ("stdout", "stderr"):
    # A service may have no standard streams.
    if getattr(sys, stream) is None:
        setattr(sys, stream, Path(os.devnull).open("w"))  # noqa: SIM115

# Lines are wrapped at words on a terminal, but not on a pipe.
out = _Console(highlight=False, soft_wrap=not sys.stdout.isatty())
err = _Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())

# Minimum width of a table's last column, in characters.
LAST_COLUMN = 20
# Errors of an output that cannot be written: a full disk, a closed terminal.
OUTPUT_ERRNOS = (errno.ENOSPC, errno.EIO)


@contextlib.contextmanager
def one_sentence_errors(*, as_json: bool = False) -> Iterator[None]:
    """Prints each deliberate error as one sentence and exits with its code; Ctrl-C exits with 130.

    If the standard output cannot be written (a closed pipe, a full disk), the command also ends without a traceback.
    """
    try:
        silence_libraries()
        with _interrupts_despite_libraries():
            yield
    except SebpEdgeError as error:
        _fail(type(error).__name__, str(error), error.exit_code, as_json)
    except KeyboardInterrupt:
        _fail("Interrupted", "Interrupted; nothing was changed.", 130, as_json)
    except BrokenPipeError:
        # The reader is gone, so nobody would see a message.
        discard_output()
        raise typer.Exit(1) from None
    except OSError as error:
        if error.errno not in OUTPUT_ERRNOS:
            raise
        discard_output()
        _fail("StorageError", f"The output could not be written: {error.strerror}.", 1, as_json=False)


@contextlib.contextmanager
def _interrupts_despite_libraries() -> Iterator[None]:
    """Raises KeyboardInterrupt for unexpected errors after Ctrl-C, since native code may replace it by its own."""
    received = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.default_int_handler(number, frame)

    # A background job ignores SIGINT, and only the main thread may change handlers.
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception as error:
        if received and not isinstance(error, SebpEdgeError | OSError | typer.Exit):
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def discard_output() -> None:
    """Discards all further output to the standard output, and what it has buffered."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Speeds up slow imports: disables garbage collection during them, then excludes their objects from it.

    Objects created on import live until the exit, so checking them is wasted work. This changes the whole process, so
    it is only for the command line's own. A terminal shows a status line meanwhile.
    """
    gc.disable()
    try:
        with err.status("starting", spinner="line"):
            yield
    finally:
        gc.freeze()
        gc.enable()


def _fail(kind: str, message: str, exit_code: int, as_json: bool) -> None:
    # Either stream may be closed.
    with contextlib.suppress(OSError):
        if as_json:
            print_json({"event": "error", "error": kind, "message": message})
    with contextlib.suppress(OSError):
        err.print(f"[bold red]sebp-edge:[/] {_escaped(message)}")
    raise typer.Exit(exit_code) from None


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def silence_libraries() -> None:
    """Hides the libraries' warnings and progress bars; our own messages remain."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def print_json(record: dict) -> None:
    """Prints one JSON object on one line of the standard output."""
    JsonLines(sys.stdout).write(record)


def printable(text: str) -> str:
    """Replaces unprintable characters: files from others may contain control sequences for a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


def print_table(columns: list[str], rows: list[list[str]]) -> None:
    """Prints a table whose last column wraps; in a narrow window one cell per line, on a pipe tab-separated rows."""
    if not out.is_terminal:
        for row in rows:
            typer.echo("\t".join(row))  # rich would turn the tabs into spaces
        return
    widths = [max(map(len, cells)) + 2 for cells in zip(columns, *rows, strict=True)]
    if sum(widths[:-1]) + min(widths[-1], LAST_COLUMN) > out.width:
        for row in rows:
            for column, cell in zip(columns, row, strict=True):
                out.print(f"{column:<{max(map(len, columns)) + 2}}{cell}", markup=False)
            out.print()
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns[:-1]:
        table.add_column(column, no_wrap=True)
    table.add_column(columns[-1], overflow="fold")
    for row in rows:
        table.add_row(*map(_escaped, row))
    out.print(table)
