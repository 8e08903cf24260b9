"""Arguments and options that several commands share."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from typer.models import OptionInfo

from sebp_edge.cli.console import one_sentence_errors
from sebp_edge.cli.owner import ask_for_owner
from sebp_edge.errors import OptionError, OwnerUnknown
from sebp_edge.reading.find_files import given_path
from sebp_edge.recipe import Recipe
from sebp_edge.values.folder import Folder


def parse_path(text: str) -> Path:
    """Parses a path; refuses an empty one, as from an unset variable, which would mean the current folder."""
    if not text:
        raise typer.BadParameter("the path is empty; write . for the current folder.")
    return Path(text)


def path_option(help: str, metavar: str = "FILE") -> OptionInfo:
    """An option whose value is a path."""
    return typer.Option(parser=parse_path, metavar=metavar, help=help)


def parse_name(text: str) -> str:
    """Parses a name; refuses an empty one, as from an unset variable, which would mean the default."""
    if not text:
        raise typer.BadParameter("the value is empty; leave the option out for the default.")
    return text


def name_option(help: str, **options) -> OptionInfo:
    """An option whose value is a name."""
    # typer 0.27 names an option after its metavar if that is the parameter's name in capitals.
    return typer.Option(parser=parse_name, metavar="TEXT", help=help, **options)


def select(paths: list[Path], include: list[str] | None, exclude: list[str] | None) -> list:
    """Returns the paths with the patterns of the files to read."""
    return [Folder(path, tuple(include or ()), tuple(exclude or ())) for path in paths]


Include = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Read only files that match, as in .gitignore; may be repeated."),
]
Exclude = Annotated[
    list[str] | None, typer.Option(metavar="PATTERN", help="Leave out files and folders that match; may be repeated.")
]
Device = Annotated[str | None, name_option("Device: cuda, mps or cpu; by default the best available one.")]
Me = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Your name in chats and mails, whose words are learnt; may be repeated."),
]
Polite = Annotated[
    bool,
    typer.Option(
        "--polite",
        help="Give way to other programs: low priority, half the cores; wait on battery power, or while they need "
        "memory or the GPU.",
    ),
]
Threads = Annotated[int | None, typer.Option(help="Number of threads that compute on the CPU.")]
GpuShare = Annotated[
    int | None, typer.Option("--gpu-share", metavar="PERCENT", help="Compute on the GPU for so much of the time only.")
]
AdapterModel = Annotated[str | None, name_option("Base model; by default the adapter's.")]
Version = Annotated[int | None, typer.Option(help="Version of the adapter; by default the active one.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
MostMemory = Annotated[str | None, typer.Option(help="Memory budget, such as 8GB; by default unlimited.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]
FreeMemory = Annotated[str | None, typer.Option(help="Memory budget, such as 8GB; by default the free memory.")]


class Request:
    """What the options of an adaptation ask for.

    Attributes:
        texts: the paths, with the patterns of the files to read; None if the recipe needs none.
        settings: arguments of `Personalizer`: model, recipe, device, seed and me.
        as_json: whether to print JSON.
    """

    def __init__(
        self,
        paths: Annotated[
            list[Path] | None,
            typer.Argument(parser=parse_path, metavar="PATH", help="Files or folders with your texts."),
        ] = None,
        include: Include = None,
        exclude: Exclude = None,
        model: Annotated[
            str, name_option("Base model: a name, folder, GGUF file, Hub id, ollama:NAME or lmstudio:NAME.")
        ] = "tiny",
        recipe: Annotated[
            str | None, typer.Option(help="Name of a recipe, or a TOML file.", show_default="one that fits the texts")
        ] = None,
        epochs: Annotated[int | None, typer.Option(help="Maximum number of epochs.")] = None,
        context: Annotated[int | None, typer.Option(help="Context length in tokens.")] = None,
        seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
        me: Me = None,
        device: Device = None,
        as_json: Json = False,
    ):
        chosen = Recipe.load(recipe).replace(epochs=epochs, context_length=context)
        self.settings = {"model": model, "recipe": chosen, "device": device, "seed": seed, "me": tuple(me or ())}
        self.texts = select(paths, include, exclude) if paths else None
        for folder in self.texts or ():
            given_path(folder)  # before libraries are imported
        self.as_json = as_json


def takes_request(*, epochs: bool = True) -> Callable[[Callable], Callable]:
    """Decorates a command that gets a `Request` as its first argument; gives it the options of one.

    Prints an error as one sentence. The command's own options stand before --json, the last one.

    Args:
        epochs: whether it has --epochs.
    """

    def decorate(command: Callable) -> Callable:
        shared = [each for each in inspect.signature(Request).parameters.values() if epochs or each.name != "epochs"]
        _, *own = inspect.signature(command).parameters.values()

        @functools.wraps(command)
        def run(**given) -> None:
            others = {each.name: given.pop(each.name) for each in own}
            with one_sentence_errors(as_json=given["as_json"], takes_time=True):
                request = Request(**given)
                if not (request.texts or request.settings["recipe"].questions or others.get("resume") is not None):
                    raise OptionError("No PATH was given; give files or folders with your texts.")
                try:
                    command(request, **others)
                except OwnerUnknown as error:
                    request.settings["me"] = ask_for_owner(error, as_json=request.as_json)
                    request.texts = error.reading
                    command(request, **others)

        run.__signature__ = inspect.Signature([*shared[:-1], *own, shared[-1]])
        return run

    return decorate
