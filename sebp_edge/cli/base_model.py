"""Opens what a command works with: a Personalizer, an adapter and its base model; imports torch late."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from sebp_edge.cli.console import err, quick_imports, without_collection
from sebp_edge.engine.models.catalog import DEFAULT_MODEL, resolve
from sebp_edge.recipe import Recipe
from sebp_edge.run.base_models import find_base_model
from sebp_edge.store.adapter_store import AdapterStore


def personalizer_class(model: str | Path) -> type:
    """Returns Personalizer; imported late, since its libraries take seconds. Refuses an unknown model before."""
    resolve(model)
    with quick_imports():
        from sebp_edge.personalizer import Personalizer

    return Personalizer


@contextmanager
def personalizing(as_json: bool, *, hides: type | tuple = (), lists_left_out: bool = True, **settings) -> Iterator:
    """Context with a Personalizer, whose progress is shown.

    Args:
        hides: the events that are not.
    """
    make = personalizer_class(settings["model"])
    with quick_imports():
        from sebp_edge.cli.progress import show_progress

    with show_progress(as_json, hides=hides, lists_left_out=lists_left_out) as sink:
        yield make(**settings, on_event=sink)


def prepared(
    kind: Literal["plan", "inspect"], request, name: str | None, *, memory_budget, hides=(), politeness=None, **options
):
    """Returns what `Personalizer.plan` or `inspect` does; without torch if the model and this machine are known.

    Args:
        politeness: how a training would give way, if that changes its speed.
    """
    with without_collection("starting"):
        from sebp_edge.cli.progress import show_progress
        from sebp_edge.run import without_torch

    settings = request.settings | {"memory_budget": memory_budget}
    if politeness is None:
        with show_progress(request.as_json, hides=hides) as sink:
            found = getattr(without_torch, kind)(request.texts, name, sink, **settings, **options)
        if found is not None:
            return found
    with personalizing(request.as_json, hides=hides, politeness=politeness, **settings) as personalizer:
        found = getattr(personalizer, kind)(request.texts, name=name, **options)
        if politeness is None:
            from sebp_edge.engine.memory.shape_reader import keep_shape
            from sebp_edge.engine.memory.this_machine import keep_device

            keep_device(personalizer.device)
            keep_shape(personalizer.reference)
        return found


def choose_model(
    adapter: str | Path | None, version: int | None, model: str | None, load_in_4bit: bool | None = None
) -> tuple[dict, str | Path | None]:
    """Returns the settings of a Personalizer, and the adapter to use with it; imports no torch.

    Args:
        adapter: the name or folder that was asked for, if any.
        model: the base model that was asked for; by default the adapter's.
        load_in_4bit: by default as in the adapter's training.
    """
    store = AdapterStore()
    if adapter is None and model is None:
        adapter = None if store.adapter("default").active() is None else "default"
        if adapter is None:
            err.print(f"No adapter 'default' is active; using the base model {DEFAULT_MODEL!r}.", style="dim")
    record = store.find(adapter, version).record if adapter else None
    base = model or (find_base_model(store, record) if record else DEFAULT_MODEL)
    if load_in_4bit is None:
        load_in_4bit = record is not None and record.recipe.get("load_in_4bit", False)
    recipe = Recipe.load("notes").replace(load_in_4bit=load_in_4bit)
    return {"model": base, "recipe": recipe, "store": store}, adapter
