"""`sebp-edge adapt PATH...`: trains an adapter on texts and saves it."""

from pathlib import Path
from typing import Annotated

import typer

from sebp_edge.cli.console import one_sentence_errors, print_json, quick_imports
from sebp_edge.cli.options import (
    Context,
    Device,
    Epochs,
    Exclude,
    Include,
    Json,
    ModelName,
    Paths,
    RecipeName,
    Seed,
    parse_path,
    select,
)
from sebp_edge.errors import Interrupted

NOT_KEPT = 3


def adapt(
    paths: Paths,
    include: Include = None,
    exclude: Exclude = None,
    model: ModelName = "tiny",
    recipe: RecipeName = "notes",
    name: Annotated[str, typer.Option(help="Name of the adapter.")] = "default",
    out: Annotated[
        Path | None, typer.Option(parser=parse_path, metavar="FOLDER", help="Save into this new folder instead.")
    ] = None,
    load_in_4bit: Annotated[
        bool | None, typer.Option("--4bit/--no-4bit", help="Load the model in 4 bits; by default as in the recipe.")
    ] = None,
    epochs: Epochs = None,
    context: Context = None,
    keep_anyway: Annotated[
        bool, typer.Option("--keep-anyway", help="Activate the adapter whatever the gate says.")
    ] = False,
    keep_samples: Annotated[
        bool, typer.Option("--keep-samples", help="Save the samples, which contain your text, for the adapter's page.")
    ] = False,
    seed: Seed = 0,
    device: Device = None,
    memory: Annotated[str | None, typer.Option(help="Memory budget, such as 8GB; by default unlimited.")] = None,
    as_json: Json = False,
) -> None:
    """Train an adapter on the texts in PATH; activate it if it is better than the base and the active version.

    Exit codes: 0 kept, 3 saved but not kept (the active version stays), 130 interrupted, 2 invalid option, 1 any other
    error.
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
                result = personalizer.adapt(
                    select(paths, include, exclude),
                    name=name,
                    out=out,
                    keep_anyway=keep_anyway,
                    keep_samples=keep_samples,
                )
            if as_json:
                print_json(result.to_dict())
            else:
                show_result(result)
        except KeyboardInterrupt as stop:
            if result is None:
                raise
            raise Interrupted(f"Interrupted after the training. {result.summary}") from stop
        if not (result.kept or keep_anyway):
            raise typer.Exit(NOT_KEPT)
