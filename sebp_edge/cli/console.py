"""How the command line speaks: to people with rich, to programs in JSON lines, and in one sentence when it fails."""

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Iterator

import typer
from rich.console import Console
from rich.table import Table

from sebp_edge.errors import SebpEdgeError

out = Console(highlight=False)
err = Console(stderr=True, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def one_sentence_errors(*, as_json: bool = False) -> Iterator[None]:
    """Turns every deliberate error into its sentence and its exit code; Ctrl-C exits with 130."""
    try:
        quiet_libraries()
        yield
    except SebpEdgeError as error:
        _fail(type(error).__name__, str(error), error.exit_code, as_json)
    except KeyboardInterrupt:
        _fail("Interrupted", "Interrupted; nothing was changed.", 130, as_json)
    except BrokenPipeError:
        # The reading program went away; there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None


def _fail(kind: str, message: str, exit_code: int, as_json: bool) -> None:
    if as_json:
        print_json({"event": "error", "error": kind, "message": message})
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
    sys.stdout.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
    sys.stdout.flush()


def print_table(columns: list[str], rows: list[list[str]]) -> None:
    """A plain table that fits a narrow window by folding its cells; tab-separated lines on a pipe."""
    if not out.is_terminal:
        for row in rows:
            out.print("\t".join(row), soft_wrap=True, markup=False)
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(_escaped, row))
    out.print(table)
