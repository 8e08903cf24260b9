"""`sebp-edge lr-range PATH...`: finds learning rates to try, by a short training in which the rate grows."""

from typing import Annotated

import typer

from sebp_edge.cli.console import one_sentence_errors, out, print_json, print_table, quick_imports
from sebp_edge.cli.options import Context, Device, Exclude, Include, Json, ModelName, Paths, RecipeName, Seed, select

MAX_ROWS = 20


def lr_range(
    paths: Paths,
    include: Include = None,
    exclude: Exclude = None,
    model: ModelName = "tiny",
    recipe: RecipeName = "notes",
    lowest: Annotated[float, typer.Option(help="Learning rate of the first step.")] = 1e-6,
    highest: Annotated[float, typer.Option(help="Learning rate of the last step.")] = 1.0,
    steps: Annotated[int, typer.Option(help="Number of steps.")] = 100,
    memory: Annotated[str | None, typer.Option(help="Memory budget, such as 8GB; by default the free memory.")] = None,
    context: Context = None,
    seed: Seed = 0,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Test which learning rates fit the texts in PATH: the loss of one short training in which the rate grows.

    Trains with the recipe's settings until the loss diverges. Saves nothing.
    """
    with one_sentence_errors(as_json=as_json):
        with quick_imports():
            from sebp_edge.cli.progress import show_progress
            from sebp_edge.personalizer import Personalizer
            from sebp_edge.recipe import Recipe

        chosen = Recipe.load(recipe).replace(context_length=context)
        with show_progress(as_json) as sink:
            personalizer = Personalizer(
                model, recipe=chosen, device=device, memory_budget=memory, seed=seed, on_event=sink
            )
            found = personalizer.lr_range(select(paths, include, exclude), lowest=lowest, highest=highest, steps=steps)
        if as_json:
            print_json(found.to_dict())
        else:
            show_range(found)


def show_range(found) -> None:
    """Prints the loss at some of the rates, evenly chosen, and the summary."""
    every = -(-len(found.steps) // MAX_ROWS) or 1
    marks = {found.begins: "begins to fall", found.steepest: "steepest", found.lowest: "lowest"}
    rows = [
        [f"{step.learning_rate:.1e}", f"{step.loss:.3f}", f"{step.smoothed:.3f}", marks.get(step.learning_rate, "")]
        for number, step in enumerate(found.steps)
        if number % every == 0 or step.learning_rate in marks
    ]
    print_table(["learning rate", "loss", "smoothed", ""], rows)
    out.print(found.summary)
