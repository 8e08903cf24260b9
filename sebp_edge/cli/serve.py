"""`sebp-edge serve`: serves an app in any language. `cli.main` takes a shorter way there, with fewer imports."""

from pathlib import Path
from typing import Annotated

import typer

from sebp_edge.cli.console import one_sentence_errors
from sebp_edge.cli.options import parse_path
from sebp_edge.engine.models.catalog import DEFAULT_MODEL
from sebp_edge.errors import OptionError
from sebp_edge.serve.__main__ import main


def serve(
    mcp: Annotated[
        list[Path] | None,
        typer.Option(parser=parse_path, metavar="FOLDER", help="Serve an assistant (MCP) about this folder of notes."),
    ] = None,
    model: Annotated[str, typer.Option(help="The base model, with --mcp.")] = DEFAULT_MODEL,
    may_learn: Annotated[
        bool, typer.Option("--may-learn", help="With --mcp: the assistant may have notes learnt and forgotten.")
    ] = False,
) -> None:
    """Serve an app in any language: requests, answers and events as lines of JSON on standard input and output.

    The app starts this command as its child. It ends with its input, and with the app. The guide for developers,
    sebp_edge/guide/server.md, has the protocol. With --mcp, serve an assistant that speaks the Model Context Protocol.
    """
    with one_sentence_errors():
        if not mcp:
            if may_learn or model != DEFAULT_MODEL:
                raise OptionError(
                    "--model and --may-learn go with --mcp FOLDER; an app names the model in its requests."
                )
            main()
            return
        if missing := [folder for folder in mcp if not folder.exists()]:
            raise OptionError(f"There is no folder {str(missing[0])!r}; give one with notes.")
        try:
            from sebp_edge.serve.mcp_server import run
        except ModuleNotFoundError as error:
            raise OptionError("--mcp needs the package mcp; install it with: pip install 'sebp-edge[mcp]'") from error
        run(mcp, model, may_learn=may_learn)
