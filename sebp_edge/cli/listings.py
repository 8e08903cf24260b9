"""`sebp-edge models` and `sebp-edge recipes`: list the known models and recipes."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sebp_edge.cli.console import one_sentence_errors, print_json, print_table, printable, quick_imports
from sebp_edge.cli.options import Json, parse_path
from sebp_edge.units import gigabytes

Folders = Annotated[
    list[Path] | None,
    typer.Argument(parser=parse_path, metavar="[FOLDER]...", help="Folders whose models are listed too."),
]


def models(folders: Folders = None, as_json: Json = False) -> None:
    """List the models known by name, and those of other programs on this machine; any folder or Hub id works too."""
    with one_sentence_errors(as_json=as_json):
        from sebp_edge.models.catalog import CATALOG
        from sebp_edge.models.hub import cached_folder
        from sebp_edge.models.local_models import find_local_models

        rows, local_models = [], find_local_models(folders or [])
        for name, entry in CATALOG.items():
            is_local = entry.repository is None or cached_folder(entry.repository) is not None
            record = {"name": name, "on_this_machine": is_local, **asdict(entry)}
            if as_json:
                print_json(record)
            state = "downloaded" if is_local else "not downloaded"
            rows.append([name, _size(entry.parameters), state, entry.licence, entry.description])
        for name in local_models:
            with quick_imports():
                from sebp_edge.insight.local_models import describe_model

            model = describe_model(name)
            if as_json:
                print_json({"on_this_machine": True, **asdict(model)})
            fit = "can be adapted here" if model.fits else "does not fit into the free memory"
            size = "?" if model.parameters is None else _size(model.parameters)
            about = [model.name, size, gigabytes(model.size), model.licence or "?", model.problem or fit]
            rows.append([printable(cell) for cell in about])
        if not as_json:
            print_table(["name", "parameters", "weights", "licence", "description"], rows)


def _size(billions: float) -> str:
    return f"{billions:.1f} B" if billions >= 1 else f"{billions * 1000:.0f} M"


def recipes(as_json: Json = False) -> None:
    """List the recipes and their values."""
    with one_sentence_errors(as_json=as_json):
        from sebp_edge.recipe import Recipe

        bundled = [Recipe.load(name) for name in Recipe.names()]
        if as_json:
            for recipe in bundled:
                print_json(asdict(recipe))
            return
        columns = ["name", "method", "r", "learning rate", "epochs", "tokens/step", "context", "description"]
        print_table(
            columns,
            [
                [
                    recipe.name,
                    recipe.method,
                    str(recipe.with_defaults().r) if recipe.method == "lora" else "-",
                    f"{recipe.learning_rate:g}",
                    str(recipe.epochs),
                    str(recipe.batch_tokens),
                    str(recipe.context_length),
                    recipe.description,
                ]
                for recipe in bundled
            ],
        )
