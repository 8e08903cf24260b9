"""`sebp-edge lr-range PATH...`: finds learning rates to try, by a short training in which the rate grows."""

from typing import Annotated

import typer

from sebp_edge.cli.base_model import personalizing
from sebp_edge.cli.console import out, print_json, print_table
from sebp_edge.cli.options import FreeMemory, Request, takes_request

MAX_ROWS = 20


@takes_request(epochs=False)
def lr_range(
    request: Request,
    lowest: Annotated[float, typer.Option(help="Learning rate of the first step.")] = 1e-6,
    highest: Annotated[float, typer.Option(help="Learning rate of the last step.")] = 1.0,
    steps: Annotated[int, typer.Option(help="Number of steps.")] = 100,
    memory: FreeMemory = None,
) -> None:
    """Test which learning rates fit the texts in PATH: the loss of one short training in which the rate grows.

    Trains with the recipe's settings until the loss diverges. Saves nothing.
    """
    with personalizing(request.as_json, memory_budget=memory, **request.settings) as personalizer:
        found = personalizer.lr_range(request.texts, lowest=lowest, highest=highest, steps=steps)
    if request.as_json:
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
