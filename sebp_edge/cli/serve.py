"""`sebp-edge serve`: serves an app in any language. `cli.main` takes a shorter way there, with fewer imports."""

from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from sebp_edge.cli.base_model import choose_model
from sebp_edge.cli.console import one_sentence_errors
from sebp_edge.cli.options import name_option, path_option
from sebp_edge.engine.models.catalog import DEFAULT_MODEL
from sebp_edge.errors import OptionError
from sebp_edge.serve.__main__ import main

# Where --http listens by default: "sebp" on a telephone.
PORT = 7327


def serve(
    port: Annotated[
        int | None, typer.Argument(min=0, max=65535, metavar="[PORT]", help=f"Port of --http, by default {PORT}.")
    ] = None,
    http: Annotated[bool, typer.Option("--http", help="Serve apps on this machine by HTTP, as OpenAI does.")] = False,
    folder: Annotated[
        list[Path] | None, path_option("With --http: answer from this folder; may be repeated.", "PATH")
    ] = None,
    origin: Annotated[
        list[str] | None,
        typer.Option("--origin", metavar="ORIGIN", help="With --http: let pages of this origin in; may be repeated."),
    ] = None,
    mcp: Annotated[
        list[Path] | None, path_option("Serve an assistant (MCP) about this folder of notes.", "FOLDER")
    ] = None,
    model: Annotated[
        str | None, name_option("The base model, with --http or --mcp.", show_default=DEFAULT_MODEL)
    ] = None,
    may_learn: Annotated[
        bool, typer.Option("--may-learn", help="With --mcp: the assistant may have notes learnt and forgotten.")
    ] = False,
) -> None:
    """Serve an app in any language: requests, answers and events as lines of JSON on standard input and output.

    The app starts this command as its child. It ends with its input, and with the app. The guide for developers,
    sebp_edge/guide/server.md, has the protocol. With --http [PORT], serve apps on this machine that speak OpenAI's
    protocol. With --mcp, serve an assistant that speaks the Model Context Protocol.
    """
    with one_sentence_errors():
        if http and mcp:
            raise OptionError("--http and --mcp do not go together; start one server for each.")
        if not http and (port is not None or folder or origin):
            raise OptionError("A port, --folder and --origin go with --http.")
        if may_learn and not mcp:
            raise OptionError("--may-learn goes with --mcp FOLDER.")
        if missing := [each for each in (*(mcp or ()), *(folder or ())) if not each.exists()]:
            raise OptionError(f"There is no folder {str(missing[0])!r}; give one with notes.")
        if http:
            base = str(choose_model(None, None, model)[0]["model"])
            with _extra("http", "starlette"):
                from sebp_edge.serve.http.door import run as serve_http

            serve_http(PORT if port is None else port, folder or [], base, origin or [])
        elif mcp:
            with _extra("mcp", "mcp"):
                from sebp_edge.serve.mcp_server import run as serve_mcp
            serve_mcp(mcp, model or DEFAULT_MODEL, may_learn=may_learn)
        elif model is not None:
            raise OptionError("--model goes with --http or --mcp FOLDER; an app names the model in its requests.")
        else:
            main()


@contextmanager
def _extra(name: str, package: str):
    """Context that imports the packages of an extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise OptionError(
            f"--{name} needs the package {package}; install it with: pip install 'sebp-edge[{name}]'"
        ) from error
