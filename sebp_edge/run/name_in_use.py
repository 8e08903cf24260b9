"""Says that a name has an adapter of other texts, another model or another recipe, and proposes a name of its own."""

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from sebp_edge.basics.units import plural
from sebp_edge.errors import AdapterError
from sebp_edge.events import NameInUse
from sebp_edge.recipe import Recipe
from sebp_edge.store.adapter import Adapter
from sebp_edge.store.adapter_store import AdapterStore
from sebp_edge.store.names import check_name
from sebp_edge.store.saved import SavedAdapter
from sebp_edge.values.folder import Folder
from sebp_edge.values.model_reference import ModelReference

# Texts are other ones if less than one of so many is known.
_FEW = 10


def find_name_in_use(
    saved: SavedAdapter,
    reasons: Mapping[str, str],
    store: AdapterStore,
    reference: ModelReference,
    recipe: Recipe,
    folders: Sequence[Folder],
) -> NameInUse | None:
    """Returns the event that says why an adaptation should have another name; None if there is no reason.

    Args:
        saved: the active version of the name.
        reasons: why its "texts", "model" and "recipe" are other ones, as a sentence's predicate; empty if they are not.
        folders: those that texts were read from.
    """
    reasons = {what: reason for what, reason in reasons.items() if reason}
    if not reasons:
        return None
    name, wanted = saved.name, saved.name
    if "texts" not in reasons:
        wanted = f"{name}-{reference.name.split('/')[-1] if 'model' in reasons else recipe.name}"
    elif folders:
        path = Path(folders[0].path)
        wanted = path.stem if path.is_file() else path.name
    proposal = _free_name(wanted, store.names())
    message = (
        f"Version {saved.version} of the adapter {name!r} {'; it '.join(reasons.values())}. To keep the two apart, "
        f"give this adapter a name of its own, such as --name {shlex.quote(proposal)} (name={proposal!r})."
    )
    if "model" in reasons:
        message += (
            f" The gate cannot compare versions of two models, so a new version of {name!r} is activated only with "
            "--activate-anyway (activate_anyway=True)."
        )
    return NameInUse(name, saved.version, tuple(reasons), proposal, message)


def other_texts(adapter: Adapter, number: int, num_learnt: int, num_known: int, folders: Sequence[Folder]) -> str:
    """Returns that a version knows other texts than these, as a sentence's predicate; an empty string if it does not.

    Args:
        number: how many these are.
        num_learnt: how many of these it knows.
        num_known: how many it knows in all.
        folders: those that these were read from.
    """
    if _FEW * num_learnt >= min(number, num_known):
        return ""
    before = [path for where in adapter.wheres().values() for path in where.paths]
    if _are_related(before, (Path(folder.path) for folder in folders)):
        return ""
    found = f"only {num_learnt}" if num_learnt else "none"
    among = f"{found} of which {'is' if num_learnt < 2 else 'are'} among these {number:,}"
    return f"knows {plural(num_known, 'document')}, {among}"


def _are_related(before: Iterable[Path], now: Iterable[Path]) -> bool:
    """Whether one of the files and folders is one of the others, or in it, or around it."""
    before, now = ([Path(os.path.realpath(path)) for path in paths] for paths in (before, now))
    return any(one.is_relative_to(other) or other.is_relative_to(one) for one in before for other in now)


def _free_name(wanted: str, taken: list[str]) -> str:
    """Returns a valid name that no adapter has, like the wanted one if possible."""
    try:
        wanted = check_name(re.sub(r"[^\w. -]+", "-", wanted).strip(" .-")[:40])
    except AdapterError:
        wanted = "another"
    number, name = 1, wanted
    while name in taken:
        number += 1
        name = f"{wanted}-{number}"
    return name
