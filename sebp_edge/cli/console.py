"""How the command line speaks: to people with rich, to programs in JSON lines, and in one sentence when it fails."""

import contextlib
import errno
import gc
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from sebp_edge.errors import SebpEdgeError
from sebp_edge.events import JsonLines


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # rich would end the process, whatever it is at.
        raise


for stream in ("stdout", "stderr"):
    # A service may have none.
    if getattr(sys, stream) is None:
        setattr(sys, stream, Path(os.devnull).open("w"))  # noqa: SIM115

# Lines are folded at words on a terminal, and left whole on a pipe.
out = _Console(highlight=False, soft_wrap=not sys.stdout.isatty())
err = _Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())

# The least width of a table's last column, in characters.
LAST_COLUMN = 20
# What an output that cannot be written to says: a full disk, a terminal that was closed.
NO_OUTPUT = (errno.ENOSPC, errno.EIO)


def given_path(text: str) -> Path:
    """A path of the command line; an empty one, as from a variable that is not set, would be the current folder."""
    if not text:
        raise typer.BadParameter("the path is empty; write . for the current folder.")
    return Path(text)


Paths = Annotated[
    list[Path], typer.Argument(parser=given_path, metavar="PATH...", help="Files or folders with your texts.")
]


@contextlib.contextmanager
def one_sentence_errors(*, as_json: bool = False) -> Iterator[None]:
    """Turns every deliberate error into its sentence and its exit code; Ctrl-C exits with 130.

    An output that nobody reads, or that a full disk does not take, is no error of ours either.
    """
    try:
        quiet_libraries()
        yield
    except SebpEdgeError as error:
        _fail(type(error).__name__, str(error), error.exit_code, as_json)
    except KeyboardInterrupt:
        _fail("Interrupted", "Interrupted; nothing was changed.", 130, as_json)
    except BrokenPipeError:
        # The reading program went away; there is nobody left to tell.
        forget_output()
        raise typer.Exit(1) from None
    except OSError as error:
        if error.errno not in NO_OUTPUT:
            raise
        forget_output()
        _fail("StorageError", f"The output could not be written: {error.strerror}.", 1, as_json=False)


def forget_output() -> None:
    """Nothing more is written to a standard output that takes nothing, not even what it still holds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Imports what takes seconds, without looking for garbage meanwhile, at every later collection and at the exit.

    What libraries make when they are imported stays for good. Only for a process of our own. On a terminal a line says
    so meanwhile, and is gone afterwards.
    """
    gc.disable()
    try:
        with err.status("starting", spinner="line"):
            yield
    finally:
        gc.freeze()
        gc.enable()


def _fail(kind: str, message: str, exit_code: int, as_json: bool) -> None:
    # Who asked may be gone.
    with contextlib.suppress(OSError):
        if as_json:
            print_json({"event": "error", "error": kind, "message": message})
    with contextlib.suppress(OSError):
        err.print(f"[bold red]sebp-edge:[/] {_escaped(message)}")
    raise typer.Exit(exit_code) from None


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def quiet_libraries() -> None:
    """Keeps the libraries' own warnings and progress bars away from the user; our own messages remain."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def print_json(record: dict) -> None:
    """One JSON object on one line of the standard output."""
    JsonLines(sys.stdout).write(record)


def print_table(columns: list[str], rows: list[list[str]]) -> None:
    """A plain table whose last column is folded; a line for each cell in a narrow window; tabs on a pipe."""
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
