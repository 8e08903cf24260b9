"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer


def parse_path(text: str) -> Path:
    """Parses a path; refuses an empty one, as from an unset variable, which would mean the current folder."""
    if not text:
        raise typer.BadParameter("the path is empty; write . for the current folder.")
    return Path(text)


Paths = Annotated[
    list[Path], typer.Argument(parser=parse_path, metavar="PATH", help="Files or folders with your texts.")
]
ModelName = Annotated[
    str, typer.Option(help="Base model: a name, folder, GGUF file, Hub id, ollama:NAME or lmstudio:NAME.")
]
RecipeName = Annotated[str, typer.Option(help="Name of a recipe, or a TOML file.")]
Epochs = Annotated[int | None, typer.Option(help="Maximum number of epochs.")]
Context = Annotated[int | None, typer.Option(help="Context length in tokens.")]
Seed = Annotated[int, typer.Option(help="Random seed.")]
Device = Annotated[str | None, typer.Option(help="Device: cuda, mps or cpu; by default the best available one.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]
