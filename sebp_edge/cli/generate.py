"""`sebp-edge generate PROMPT`: text out, with an adapter."""

import re
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperCommand

from sebp_edge.cli.console import err, given_path, one_sentence_errors, out, print_json, quick_imports
from sebp_edge.errors import AdapterError

# A list, front matter: an option has no space before its "=".
_BEGINS_WITH_DASH = re.compile(r"-[^=]*\s|---")


class TakesAnyPrompt(TyperCommand):
    """Also a prompt that begins with a dash."""

    def parse_args(self, ctx, args: list[str]) -> list[str]:
        texts = [] if "--" in args else [argument for argument in args if _BEGINS_WITH_DASH.match(argument)]
        options = [argument for argument in args if argument not in texts]
        return super().parse_args(ctx, [*options, "--", *texts] if texts else args)


def generate(
    prompt: Annotated[str, typer.Argument(help="The first words, or a question to a chat adapter.")],
    name: Annotated[str | None, typer.Option(help="The adapter; without --model 'default', if there is one.")] = None,
    version: Annotated[int | None, typer.Option(help="Of the adapter; by default the active one.")] = None,
    adapter: Annotated[
        Path | None, typer.Option(parser=given_path, metavar="FOLDER", help="The folder of an adapter saved elsewhere.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The base model; by default the adapter's.")] = None,
    load_in_4bit: Annotated[
        bool | None, typer.Option("--4bit/--no-4bit", help="Load it in 4 bits; by default as the adapter was trained.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="The most tokens to write.")] = 120,
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")] = 0.7,
    top_p: Annotated[float, typer.Option(min=0.01, max=1, help="Share of probability to draw from.")] = 0.9,
    seed: Annotated[int | None, typer.Option(help="Makes the text repeatable.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda, mps or cpu.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Continue PROMPT in the voice that was learnt."""
    with one_sentence_errors(as_json=as_json):
        with quick_imports():
            from sebp_edge.adapters.store import AdapterStore
            from sebp_edge.models.catalog import DEFAULT_MODEL
            from sebp_edge.personalizer import Personalizer
            from sebp_edge.recipe import Recipe

        if adapter is not None and (name is not None or version is not None):
            raise AdapterError("--adapter names a folder by itself; leave out --name and --version.")
        store = AdapterStore()
        chosen = adapter or name or ("default" if version is not None else None)
        if chosen is None and model is None and store.active_version("default") is not None:
            chosen = "default"
        if chosen is None and model is None:
            err.print(f"No adapter 'default' is active, so this is the base model {DEFAULT_MODEL!r}.", style="dim")
        record = store.find(chosen, version)[1] if chosen else None
        base = model or (_base_of(record) if record else DEFAULT_MODEL)
        trained_in_4bit = record is not None and record.recipe.get("load_in_4bit", False)
        precision = {"load_in_4bit": trained_in_4bit if load_in_4bit is None else load_in_4bit}
        personalizer = Personalizer(base, recipe=Recipe.load("notes").replace(**precision), store=store, device=device)
        if not as_json and out.is_terminal:
            out.print(prompt, end="", style="bold", markup=False)
        text = personalizer.generate(
            prompt,
            adapter=chosen,
            version=version,
            max_new_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            on_text=None if as_json else lambda piece: typer.echo(piece, nl=False),
        )
        if as_json:
            print_json({"event": "text", "prompt": prompt, "text": text})
        else:
            typer.echo()


def _base_of(record) -> str:
    """The name that loads an adapter's base model."""
    if "/" not in record.base_model:
        # A folder of the user's own: adapters hold its name, never its path.
        raise AdapterError(
            f"The adapter was made for the model in a folder {record.base_model!r}; give that folder with --model."
        )
    return record.model
