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
from signal import default_int_handler
from types import FrameType
from typing import TextIO

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sebp_edge.basics.files import cache_folder
from sebp_edge.basics.interruptions import SIGNALS, Interruptions
from sebp_edge.basics.schema import schema_hash
from sebp_edge.basics.version import __version__
from sebp_edge.cli.early_signals import exit_interrupted
from sebp_edge.errors import Interrupted, OptionError, SebpEdgeError, StorageError
from sebp_edge.events import Event, JsonLines, Started, new_job
from sebp_edge.values.documents import printable_lines


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # rich would exit the process, whatever it is doing.
        raise


# Lines are wrapped at words on a terminal, but not on a pipe; ":apple:" in a text is no emoji.
out = _Console(highlight=False, emoji=False, soft_wrap=not sys.stdout.isatty())
err = _Console(stderr=True, highlight=False, emoji=False, soft_wrap=not sys.stderr.isatty())

# Its public subclass is for one kind of invalid option.
UsageError = typer.BadParameter.__base__

# Minimum width of a table's last column, in characters.
LAST_COLUMN = 20
# Errors of an output that cannot be written: a full disk or quota, a closed terminal, a stream for reading only.
OUTPUT_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
# The exit code of a training whose adapter is not active.
NOT_BETTER = 3
# The id of what this command does, in all its messages.
JOB = new_job()
# The exit code if the reader of the output has gone away: what shells report of a program that SIGPIPE has ended.
READER_GONE = 141


@contextlib.contextmanager
def one_sentence_errors(*, as_json: bool = False, takes_time: bool = False) -> Iterator[None]:
    """Prints each deliberate error as one sentence and exits with its code; Ctrl-C exits with 130.

    Ends without a traceback if the standard output cannot be written, too (a closed pipe, a full disk).

    Args:
        takes_time: whether JSON begins with a line that says at once that the command has started.
    """
    try:
        with _interruptible():
            if as_json and takes_time:
                print_json(Started(__version__, schema_hash()))
            # Hides the libraries' warnings and progress bars; our own messages remain.
            warnings.simplefilter("ignore")
            os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
            yield
    except SebpEdgeError as error:
        _fail(error, as_json)
    except KeyboardInterrupt as interrupt:
        if isinstance(interrupt.__cause__, OSError):  # an event could not be written, and nothing was kept
            raise typer.Exit(_report_failed_output(interrupt.__cause__)) from None
        _fail(Interrupted("Interrupted; nothing was changed."), as_json)
    except OSError as error:
        raise typer.Exit(_report_failed_output(error)) from None


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Makes signals raise a KeyboardInterrupt; afterwards the outcome is known, so the command's own ignore them.

    Raises KeyboardInterrupt for unexpected errors after a signal, too, since native code may replace it by its own.
    """
    handlers = {signum: signal.getsignal(signum) for signum in SIGNALS}
    # A background job ignores SIGINT, a host program may have handlers of its own, and only the main thread has any.
    handlers = {s: handler for s, handler in handlers.items() if handler in (exit_interrupted, default_int_handler)}
    if threading.current_thread() is not threading.main_thread():
        handlers = {}
    received = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        default_int_handler(number, frame)

    try:
        for signum in handlers:
            signal.signal(signum, interrupt)
        with Interruptions() as interruptions:
            yield
            interruptions.drop()
    except Exception as error:
        if received and not isinstance(error, SebpEdgeError | OSError | typer.Exit):
            raise KeyboardInterrupt from error
        raise
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, signal.SIG_IGN if handler is exit_interrupted else handler)


@contextlib.contextmanager
def reporting_failed_outputs() -> Iterator[None]:
    """Exits without a traceback if an output cannot be written, by what precedes a command too, such as its help.

    Writes what is buffered, since Python would print its own message if that fails at its exit.
    """
    exit_code = 0
    try:
        yield
    except SystemExit as exit:
        exit_code = exit.code
        if isinstance(exit.__context__, BrokenPipeError):  # for which typer and rich exit with 1
            exit_code = READER_GONE
            discard_output()
    except OSError as error:
        exit_code = _report_failed_output(error)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            exit_code = exit_code or _report_failed_output(error)
            discard_output(stream)
    if exit_code:
        # Unloading the libraries takes most of a second, and sometimes ends in an abort, with another exit code.
        os._exit(exit_code)
    sys.exit(exit_code)


def _report_failed_output(error: OSError) -> int:
    """Prints why the standard output cannot be written, and returns the exit code; raises other errors again."""
    if isinstance(error, BrokenPipeError):
        discard_output()
        return READER_GONE
    if error.errno not in OUTPUT_ERRNOS:
        raise error
    discard_output()
    print_error(f"The output could not be written: {error.strerror}.")
    return StorageError.exit_code


def discard_output(stream: TextIO | None = None) -> None:
    """Discards all further output to a stream, and what it has buffered; by default to the standard output."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, (stream or sys.stdout).fileno())
    os.close(null)


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Speeds up slow imports: disables garbage collection during them, then excludes their objects from it.

    Objects created on import live until the exit, so checking them is wasted work. This changes the whole process, so
    it is only for the command line's own. A terminal shows a status line meanwhile.
    """
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        # Else torch makes a folder on import whose name in the system's temporary folder others can predict.
        folder = cache_folder() / "torch"
        with contextlib.suppress(OSError):  # torch then uses the temporary folder
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    with without_collection("starting"):
        yield


@contextlib.contextmanager
def without_collection(status: str) -> Iterator[None]:
    """Context without garbage collection, from which objects that are made in it are excluded; shows a status line."""
    gc.disable()
    try:
        with err.status(status, spinner="line"):
            yield
    finally:
        gc.freeze()
        gc.enable()


def _fail(error: SebpEdgeError, as_json: bool) -> None:
    if as_json:
        _print_json_error(error)
    print_error(str(error))
    raise typer.Exit(error.exit_code) from None


def _print_json_error(error: SebpEdgeError) -> None:
    try:
        print_json(error.to_dict())
    except OSError:
        discard_output()


@contextlib.contextmanager
def invalid_options_as_json() -> Iterator[None]:
    """Prints an invalid option as JSON, too; typer prints it for people, and exits with 2."""
    try:
        yield
    except UsageError as error:
        _print_json_error(OptionError(error.format_message()))
        raise


def print_error(message: str) -> None:
    """Prints an error to the standard error."""
    try:
        err.print(f"[bold red]sebp-edge:[/] {escape(message)}")
    except OSError:
        discard_output(sys.stderr)


def print_note(message: object) -> None:
    """Prints something that the user should know to the standard error."""
    err.print(f"note: {message}", style="yellow", markup=False)


def print_json(record: Event | dict) -> None:
    """Prints an event, a result, an error or an entry of a list as a message, on one line of the standard output."""
    JsonLines(sys.stdout, JOB).write(record)


def say(record: Event | dict, sentence: str, *, as_json: bool) -> None:
    """Prints what was done: for programs as a message, for people as a sentence."""
    print_json(record) if as_json else out.print(sentence, markup=False)


def print_chunk(chunk: str, *, as_json: bool) -> None:
    """Prints a piece of a text that is being written."""
    if as_json:
        print_json({"event": "text", "text": chunk})
    else:
        typer.echo(printable_lines(chunk) if out.is_terminal else chunk, nl=False)


def hanging(console: Console, words: str, indent: int = 0) -> Text:
    """Returns an entry of a list, whose further lines are indented deeper; on a pipe it is one line."""
    lines = Text(words).wrap(console, max(1, console.width - 4)) if console.is_terminal else [Text(words)]
    return Text(" " * indent) + Text("\n" + " " * 4).join(lines)


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
        table.add_row(*map(escape, row))
    out.print(table)
