"""`sebp-edge models`, `recipes` and `jobs`: list models, recipes or trainings that can go on, or show one."""

import re
from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from sebp_edge.basics.units import gigabytes, percent
from sebp_edge.cli.console import one_sentence_errors, out, print_json, print_note, print_table, quick_imports, say
from sebp_edge.cli.options import Json, parse_path
from sebp_edge.engine.models.catalog import CATALOG, resolve
from sebp_edge.engine.models.hub_cache import cached_folder, cached_models
from sebp_edge.engine.models.installed import LM_STUDIO, OLLAMA
from sebp_edge.engine.models.local_models import find_local_models
from sebp_edge.errors import ModelError
from sebp_edge.recipe import Recipe
from sebp_edge.store.adapter_store import AdapterStore
from sebp_edge.values.documents import printable

# The lines of a list on a terminal; a terminal has 24 lines at least.
MAX_ROWS = 13

Models = Annotated[
    list[str] | None,
    typer.Argument(metavar="[MODEL|FOLDER]...", help="Models to show, or folders whose models are listed too."),
]
Recipes = Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Recipes to show.")]
jobs_app = typer.Typer(invoke_without_command=True)


def models(chosen: Models = None, as_json: Json = False) -> None:
    """List the models on this machine, and those that are known by name; any folder or Hub id works too.

    With a MODEL, show what is known of it.
    """
    with one_sentence_errors(as_json=as_json):
        named = [name for name in chosen or () if _is_model(name)]
        folders = [parse_path(name) for name in chosen or () if name not in named]
        if named and not folders:
            found = [_describe(name) for name in named]
        else:
            found = sorted(map(_describe, CATALOG), key=lambda record: not record["on_this_machine"])
            there = [record for record in found if record["on_this_machine"]]
            found[len(there) : len(there)] = map(_describe, [*named, *find_local_models(folders)])
        if as_json:
            for record in found:
                print_json({"event": "model", **record})
        elif named and not folders:
            _show_models(found)
        else:
            _list_models(found)


def _is_model(name: str) -> bool:
    """Whether a name is that of a model, and not of a folder with models."""
    if name.lower() in CATALOG or name in cached_models():
        return True
    try:
        return resolve(name).is_gguf
    except ModelError:
        if name.startswith((OLLAMA, LM_STUDIO)):
            raise
        return False


def _describe(name: str) -> dict:
    """Returns what is known of a model: a catalog's entry, or a model on this machine."""
    entry = CATALOG.get(name.lower())
    if entry is not None:
        is_local = entry.repository is None or cached_folder(entry.repository) is not None
        return {"name": name.lower(), "on_this_machine": is_local, **asdict(entry)}
    with quick_imports():
        from sebp_edge.cli.local_model import describe_model

    return {"on_this_machine": True, **describe_model(name)}


def _state(record: dict) -> str:
    """Returns whether a model can be used, in a few words."""
    if "repository" not in record:
        return "not usable" if record["problem"] else "fits" if record["fits"] else "too large"
    if record["repository"] is None:
        return "bundled"
    return "downloaded" if record["on_this_machine"] else "not downloaded"


def _size(record: dict) -> str:
    billions = record["parameters"]
    if billions is None:
        return "?"
    return f"{billions:.1f} B" if billions >= 1 else f"{billions * 1000:.0f} M"


def _list_models(found: list[dict]) -> None:
    """Prints a line for each model on this machine, and in a paragraph the others."""
    rows = [[printable(record["name"]), _size(record), _state(record)] for record in found]
    there = [row for row, record in zip(rows, found, strict=True) if record["on_this_machine"]]
    if not out.is_terminal:
        print_table(["name", "parameters", "state"], rows)
        return
    shown = there if len(there) <= MAX_ROWS else there[: MAX_ROWS - 1]
    columns = ["on this machine", "parameters", ""]
    others = [max(len(column), *(len(row[number]) for row in shown)) for number, column in enumerate(columns) if number]
    for row in shown:
        name = Text(row[0])
        name.truncate(max(1, out.width - sum(others) - 2 * len(columns)), overflow="ellipsis")
        row[0] = name.plain
    print_table(columns, shown)
    if len(there) > len(shown):
        out.print(f"and {len(there) - len(shown):,} more (--json lists them all)", style="dim")
    others = ", ".join(f"{name} ({size})" for name, size, _ in rows[len(there) :])
    others = re.sub(r"(\S+) (\([^)]+\)), \1-instruct \2", r"\1[-instruct] \2", others)
    if others:
        out.print(f"Downloaded once you name them: {others}.", markup=False)
    out.print("sebp-edge models NAME shows the licence, and why a model does not fit.", style="dim")


def _show_models(found: list[dict]) -> None:
    for record in found:
        known = {"name": record["name"], "parameters": _size(record), "state": _state(record)}
        for key in ("repository", "licence", "description", "open_alternative", "problem"):
            known[key.replace("_", " ")] = record.get(key)
        if record.get("size"):
            known["files"] = gigabytes(record["size"])
        print_table(["", ""], [[key, printable(value)] for key, value in known.items() if value])


def recipes(chosen: Recipes = None, as_json: Json = False) -> None:
    """List the recipes for your texts; with a NAME, show its values."""
    with one_sentence_errors(as_json=as_json):
        found = [Recipe.load(name) for name in chosen or Recipe.names()]
        if as_json:
            for recipe in found:
                rates = {"learning_rate": recipe.learning_rates[-1], "learning_rates": recipe.learning_rates}
                print_json({"event": "recipe", **asdict(recipe), **rates})
        elif chosen:
            for recipe in found:
                values = asdict(recipe.with_defaults())
                values["learning_rate"] = " below 200 million parameters, then ".join(map(str, recipe.learning_rates))
                values = {values.pop("name"): values.pop("description")} | values
                print_table(["", ""], [[key, str(value)] for key, value in values.items() if value is not None])
        else:
            print_table(["name", "for"], [[recipe.name, recipe.description] for recipe in found])
            if out.is_terminal:
                out.print("sebp-edge recipes NAME shows its values.", style="dim")


@jobs_app.callback()
def jobs(context: typer.Context, as_json: Json = False) -> None:
    """List the trainings that run, are paused, or were stopped or killed; `adapt --resume JOB` goes on with one."""
    if context.invoked_subcommand is not None:
        return
    with one_sentence_errors(as_json=as_json):
        stored = AdapterStore().jobs
        found = [job.to_dict() for job in stored.list()]
        for sentence in stored.damaged():
            print_note(sentence)
        if as_json:
            for job in found:
                print_json({"event": "stored_job"} | job)
            return
        if not found:
            out.print("No training runs, is paused or was interrupted.")
            return
        rows = [
            [
                *(job[key] for key in ("id", "adapter", "kind", "state")),
                percent(job["progress"], 0),
                gigabytes(job["size"]),
                printable(job["begun"][:16].replace("T", " ")),
            ]
            for job in found
        ]
        print_table(["job", "adapter", "command", "state", "done", "size", "begun (UTC)"], rows)


@jobs_app.command("remove")
def remove_job(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Job, as `sebp-edge jobs` lists it.")], as_json: Json = False
) -> None:
    """Delete a job with its checkpoint; versions that it has saved stay."""
    with one_sentence_errors(as_json=as_json):
        AdapterStore().jobs.remove(job)
        say({"event": "removed_job", "id": job}, f"The job {job} is deleted.", as_json=as_json)
