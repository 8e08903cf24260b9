"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer


def parse_path(text: str) -> Path:
    """Parses a path; refuses an empty one, as from an unset variable, which would mean the current folder."""
    if not text:
        raise typer.BadParameter("the path is empty; write . for the current folder.")
    return Path(text)


def select(paths: list[Path], include: list[str] | None, exclude: list[str] | None) -> list:
    """Returns the paths with the patterns of the files to read."""
    from sebp_edge.texts.folders import Folder

    return [Folder(path, tuple(include or ()), tuple(exclude or ())) for path in paths]


Paths = Annotated[
    list[Path], typer.Argument(parser=parse_path, metavar="PATH", help="Files or folders with your texts.")
]
Include = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Read only files that match, as in .gitignore; may be repeated."),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Leave out files and folders that match; may be repeated."),
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
