"""`sebp-edge adapt PATH...`: trains an adapter on notes and saves it."""

from pathlib import Path
from typing import Annotated

import typer

from sebp_edge.cli.console import Paths, one_sentence_errors, parse_path, print_json, quick_imports
from sebp_edge.errors import Interrupted

NOT_KEPT = 3


def adapt(
    paths: Paths,
    model: Annotated[str, typer.Option(help="A known name, a folder, or a Hub id.")] = "tiny",
    recipe: Annotated[str, typer.Option(help="A recipe's name, or a TOML file.")] = "notes",
    name: Annotated[str, typer.Option(help="What to call the adapter.")] = "default",
    out: Annotated[
        Path | None, typer.Option(parser=parse_path, metavar="FOLDER", help="Save into this new folder instead.")
    ] = None,
    load_in_4bit: Annotated[
        bool | None, typer.Option("--4bit/--no-4bit", help="Load the model in 4 bits; by default as the recipe says.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="How often to see each text, at most.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens in one example.")] = None,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    device: Annotated[str | None, typer.Option(help="cuda, mps or cpu.")] = None,
    memory: Annotated[str | None, typer.Option(help="What it may take at most, such as 8GB.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Learn the texts in PATH; keep the adapter if the loss on held-out texts falls by more than its standard error.

    Exit codes: 0 kept, 3 not kept (what was active still is), 130 interrupted, 2 a wrong option, 1 anything else.
    """
    with one_sentence_errors(as_json=as_json):
        with quick_imports():
            from sebp_edge.cli.progress import show_progress, show_result
            from sebp_edge.personalizer import Personalizer
            from sebp_edge.recipe import Recipe

        chosen = Recipe.load(recipe).replace(load_in_4bit=load_in_4bit, epochs=epochs, context_length=context)
        result = None
        try:
            with show_progress(as_json) as sink:
                personalizer = Personalizer(
                    model, recipe=chosen, device=device, memory_budget=memory, seed=seed, on_event=sink
                )
                result = personalizer.adapt(paths, name=name, out=out)
            if as_json:
                print_json(result.to_dict())
            else:
                show_result(result)
        except KeyboardInterrupt as stop:
            if result is None:
                raise
            raise Interrupted(f"Interrupted. {result.summary}") from stop
        if not result.kept:
            raise typer.Exit(NOT_KEPT)
