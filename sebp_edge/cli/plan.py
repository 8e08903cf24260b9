"""`sebp-edge plan PATH...`: predicts the memory and time of an adaptation without loading the model."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape

from sebp_edge.basics.units import duration, gigabytes, sizes_apart
from sebp_edge.cli.base_model import prepared
from sebp_edge.cli.console import out, print_json, print_table
from sebp_edge.cli.options import FreeMemory, Request, name_option, takes_request
from sebp_edge.errors import OptionError
from sebp_edge.events import PreparationProgress

DESCRIPTIONS = {
    "weights": "base model",
    "adapter": "trained weights and their copies",
    "gradients": "of the trained weights",
    "optimizer": "AdamW's moments",
    "activations": "saved for the backward pass",
    "loss": "logits of one chunk",
    "graphs": "CUDA graphs, cuBLAS, fragmentation",
    "context": "the rest of the process; on a GPU estimated, measured when training",
    "reserve": "margin of error",
}


@takes_request()
def plan(
    request: Request,
    name: Annotated[str | None, name_option("Name of the adapter, which may be learnt on from.")] = None,
    memory: FreeMemory = None,
    gpu: Annotated[
        str | None, typer.Option(help="Plan for another machine's GPU with this much memory, such as 8GB.")
    ] = None,
) -> None:
    """Plan an adaptation to the texts in PATH: memory by purpose, and the estimated time.

    Loads no model. If the model is neither on this machine nor known by name, only its config is downloaded.

    Exit code 1 if nothing fits.
    """
    if gpu is not None and request.settings["device"] is not None:
        raise OptionError("--gpu plans for another machine and --device for this one; give only one of them.")
    result = prepared("plan", request, name, memory_budget=memory, hides=PreparationProgress, gpu=gpu)
    if request.as_json:
        print_json({"event": "plan", **result.to_dict()})
    else:
        show_plan(result)


def show_plan(result) -> None:
    """Prints the memory by purpose, the total, and the neighbouring plans."""
    chosen = result.chosen
    parts = [[name, gigabytes(size), DESCRIPTIONS[name]] for name, size in asdict(chosen.footprint).items() if size]
    print_table(["memory", "size", "for"], parts)
    peak, budget = sizes_apart(chosen.peak, result.budget)
    if result.requested_budget is not None:
        budget = f"the {budget} that other programs leave"
    out.print(
        f"[bold]{escape(result.model)}[/] on {result.device}, recipe {escape(chosen.recipe.name)}: "
        f"{chosen.description}; at most [bold]{peak}[/] of {budget}{_duration(chosen.seconds)}"
    )
    if result.gpu is not None:
        four_bits = " It needs pip install 'sebp-edge[4bit]' there." if chosen.dtype == "nf4" else ""
        out.print(
            f"  This plan assumes an NVIDIA GPU with {gigabytes(result.gpu)} and bf16 (Ampere or later) that runs no "
            f"other programs; its speed is unknown.{escape(four_bits)}"
        )
    if chosen.host_memory:
        out.print(f"  host memory: {gigabytes(chosen.host_memory)}", style="dim")
    for word, other in (("larger", result.larger), ("smaller", result.smaller), ("also fits", result.full)):
        if other is not None:
            size, _ = sizes_apart(other.peak, chosen.peak)
            out.print(f"  {word}: {other.description}; {size}{_duration(other.seconds)}", style="dim")


def _duration(seconds: float | None) -> str:
    return "" if seconds is None else f", about {duration(seconds)}"
