"""`sebp-edge plan PATH...`: predicts an adaptation's memory and time without loading the model."""

from typing import Annotated

import typer

from sebp_edge.cli.console import Paths, one_sentence_errors, out, print_json, print_table, quick_imports

DESCRIPTIONS = {
    "weights": "the base model's",
    "adapter": "what is trained, and its copies",
    "gradients": "of what is trained",
    "optimizer": "AdamW's moments",
    "activations": "kept for the backward pass",
    "loss": "logits, a chunk at a time",
    "graphs": "cuBLAS, pieces too small, with folds other graphs",
    "context": "the process besides; on a GPU an estimate, measured when it trains",
    "reserve": "what the count may be wrong by",
}


def plan(
    paths: Paths,
    model: Annotated[str, typer.Option(help="A known name, a folder, or a Hub id.")] = "tiny",
    recipe: Annotated[str, typer.Option(help="A recipe's name, or a TOML file.")] = "notes",
    memory: Annotated[str | None, typer.Option(help="What it may take at most; by default what is free.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Plan for a GPU with so much memory that is not here: 8GB.")] = None,
    epochs: Annotated[int | None, typer.Option(help="How often to see each text, at most.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens in one example.")] = None,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    device: Annotated[str | None, typer.Option(help="cuda, mps or cpu.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Show how the texts in PATH would be learnt: where the memory goes, and about how long it takes.

    Nothing is loaded; of a model that is neither on this machine nor known by name, only its config is downloaded.
    Exit code 1: nothing fits.
    """
    with one_sentence_errors(as_json=as_json):
        with quick_imports():
            from sebp_edge.errors import OptionError
            from sebp_edge.personalizer import Personalizer
            from sebp_edge.recipe import Recipe

        if gpu is not None and device is not None:
            raise OptionError("--gpu plans for a GPU that is not here, and --device names one that is; give only one.")
        chosen = Recipe.load(recipe).replace(epochs=epochs, context_length=context)
        personalizer = Personalizer(model, recipe=chosen, device=device, memory_budget=memory, seed=seed)
        result = personalizer.plan(paths, gpu=gpu)
        if as_json:
            print_json({"event": "plan", **result.to_dict()})
        else:
            show_plan(result)


def show_plan(result) -> None:
    """Prints where the memory goes, the total, and the neighbouring plans."""
    from dataclasses import asdict

    from rich.markup import escape

    from sebp_edge.units import gigabytes

    chosen = result.chosen
    parts = [[name, gigabytes(size), DESCRIPTIONS[name]] for name, size in asdict(chosen.footprint).items() if size]
    print_table(["memory", "duration_suffix", "for"], parts)
    budget = gigabytes(result.budget) + (" that other programs leave" if result.requested_budget else "")
    out.print(
        f"[bold]{escape(result.model)}[/] on {result.device}: {chosen.description}: at most [bold]{gigabytes(chosen.peak)}[/] of "
        f"{budget}{duration_suffix(chosen.seconds)}"
    )
    if result.gpu is not None:
        four_bits = " It needs pip install 'sebp-edge[4bit]' there." if chosen.dtype == "nf4" else ""
        out.print(
            f"  This plan is for an NVIDIA GPU of {gigabytes(result.gpu)} with bf16 (Ampere or later) that is not here "
            f"and runs nothing else; its speed is not known.{escape(four_bits)}"
        )
    if chosen.host_memory:
        out.print(f"  and of the host's memory {gigabytes(chosen.host_memory)}", style="dim")
    for word, other in (("larger", result.larger), ("smaller", result.smaller), ("also fits", result.full)):
        if other is not None:
            out.print(
                f"  {word}: {other.description}: {gigabytes(other.peak)}{duration_suffix(other.seconds)}", style="dim"
            )


def duration_suffix(seconds: float | None) -> str:
    """The duration as a suffix to a plan; empty if it is unknown."""
    from sebp_edge.units import duration

    return "" if seconds is None else f", about {duration(seconds)}"
