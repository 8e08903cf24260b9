"""`sebp-edge client ts FOLDER`: writes a client of `sebp-edge serve` for apps in another language."""

import json
import shlex
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from sebp_edge.basics.files import storage_errors
from sebp_edge.basics.version import __version__
from sebp_edge.cli.console import one_sentence_errors, out
from sebp_edge.cli.options import parse_path

app = typer.Typer(help="Write a client for an app in another language.", no_args_is_help=True)
_PACKAGE = {"name": "sebp-edge", "version": __version__, "license": "Apache-2.0", "engines": {"node": ">=20"}}
_PACKAGE |= {"main": "./client.js", "types": "./client.d.ts"}


@app.command()
def ts(
    folder: Annotated[Path, typer.Argument(parser=parse_path, metavar="FOLDER", help="The new folder to write.")],
) -> None:
    """Write the client for Node and Electron as an npm package, with types: npm install FOLDER."""
    with one_sentence_errors(), storage_errors("Cannot write", folder, "; choose a new folder"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as temporary:
            for name in ("client.js", "client.d.ts", "messages.d.ts"):
                (Path(temporary) / name).write_bytes(files("sebp_edge.serve").joinpath(name).read_bytes())
            (Path(temporary) / "package.json").write_text(json.dumps(_PACKAGE, indent=2) + "\n", encoding="ascii")
            Path(temporary).chmod(0o755)
            Path(temporary).rename(folder)
        command = shlex.join(["npm", "install", str(folder.absolute())])
        out.print(f"The package is written; add it to an app with: {command}", markup=False)
