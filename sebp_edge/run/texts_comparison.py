"""Compares an adaptation with the active version of its name: texts (by hashes), model, recipe; imports no torch.

Proposes another name if they are other ones.
"""

import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path

from sebp_edge.basics.units import plural
from sebp_edge.engine.models.files_digest import files_digest
from sebp_edge.errors import AdapterError
from sebp_edge.events import NameInUse
from sebp_edge.recipe import Recipe
from sebp_edge.store.adapter import Adapter
from sebp_edge.store.adapter_store import AdapterStore
from sebp_edge.store.known_texts import KnownTexts
from sebp_edge.store.names import check_name
from sebp_edge.store.record import AdapterRecord
from sebp_edge.store.saved import SavedAdapter
from sebp_edge.values.folder import Folder
from sebp_edge.values.model_reference import ModelReference
from sebp_edge.values.reading import Reading

# Values of a recipe that decide what a version's weights are for: with others, no training can learn on from it.
_OF_THE_WEIGHTS = {"load_in_4bit", "r", "lora_alpha", "chat_template", "questions"}
# Values of a recipe that do not change what is learnt; and the method, which is compared by itself.
_NOT_COMPARED = {"name", "description", "margin", "method"}
# Values that a recipe may leave open; the version's own are then used.
_OPEN = {"r", "load_in_4bit"}
# Texts are other ones if less than one of so many is known.
_FEW = 10


@dataclass(frozen=True)
class TextsComparison:
    """An adaptation beside the active version of its name.

    Attributes:
        saved: the active version; None if it cannot be read.
        known: what it has learnt; None if that is not known.
        hashes: the hash of each document's content, by the document's number.
        obstacle: why no training can learn on from it, as a sentence's predicate; empty if one can.
        changes: the values of the recipe that are not the version's: the key, its setting ("epochs = 3"), and the
            recipe's. A training learns on from it nevertheless, unless there is an obstacle.
        name_in_use: says that the name has an adapter of other texts, another model or another recipe; None otherwise.
    """

    saved: SavedAdapter | None
    version: int
    known: KnownTexts | None
    hashes: list[str]
    obstacle: str
    changes: tuple[tuple[str, str, str], ...] = ()
    name_in_use: NameInUse | None = None

    @cached_property
    def learnt(self) -> set[int]:
        """The numbers of the documents whose content the version has learnt."""
        known = {*self.known.texts, *self.known.gone} if self.known else set()
        return {number for number, each in enumerate(self.hashes) if each in known}

    @property
    def warning(self) -> str:
        """What `name_in_use` says; empty if it is None."""
        return self.name_in_use.message if self.name_in_use else ""

    @property
    def num_missing(self) -> int:
        """The number of texts that the version has learnt and that are not there: gone, or changed."""
        return len({*self.known.texts, *self.known.gone} - set(self.hashes)) if self.known else 0

    def is_unchanged(self, *, sync: bool) -> bool:
        """Whether the version has learnt all documents already, and with `sync` no others."""
        has_learnt_all = not self.obstacle and len(self.learnt) == len(self.hashes)
        return has_learnt_all and not (sync and self.num_missing)


def compare_with_active(
    store: AdapterStore, name: str, reference: ModelReference, recipe: Recipe, seed: int, reading: Reading
) -> TextsComparison | None:
    """Compares an adaptation with the active version of its name; returns None if no version is active."""
    adapter = store.adapter(name)
    version = adapter.active()
    if version is None:
        return None
    saved, known, reasons, differing = None, None, {}, []
    try:
        saved = adapter.open(version)
        known = KnownTexts.read(saved.path)
        states = saved.judged_states()
    except AdapterError:
        obstacle = "has damaged files, or was made by a newer sebp-edge"
    else:
        reasons, differing = made_for_others(adapter, saved, reference, reading), list(_differing(saved.record, recipe))
        if saved.record.trained_on_all and states == [saved.path]:
            obstacle = "has lost its judged state"
        else:
            obstacle = _obstacle(saved.record, known, reasons["model"], differing, recipe, seed)
    compared = TextsComparison(saved, version, known, _hashes(reading, known), obstacle, tuple(differing))
    if saved is None:
        return compared
    reasons["recipe"] = _other_recipe(saved.record, differing, recipe)
    return replace(compared, name_in_use=find_name_in_use(saved, reasons, store, reference, recipe, reading.folders))


def made_for_others(adapter: Adapter, saved: SavedAdapter, reference: ModelReference, reading: Reading) -> dict:
    """Returns why a version is of other "texts" and of another "model", as a sentence's predicates, or empty strings.

    Raises an AdapterError if its list of texts is damaged.
    """
    known, texts = KnownTexts.read(saved.path), ""
    if known is not None:
        learnt, hashes = {*known.texts, *known.gone}, _hashes(reading, known)
        texts = other_texts(adapter, len(hashes), sum(map(learnt.__contains__, hashes)), len(learnt), reading.folders)
    return {"texts": texts, "model": _other_model(saved.record, known, reference)}


def _hashes(reading: Reading, known: KnownTexts | None) -> list[str]:
    return [document.hash(known.salt if known else b"") for document in reading.documents]


def _obstacle(
    record: AdapterRecord,
    known: KnownTexts | None,
    other_model: str,
    differing: list[tuple[str, str, str]],
    recipe: Recipe,
    seed: int,
) -> str:
    """Returns why no training can learn on from a version, or an empty string."""
    if record.recipe.get("method") == "full":
        return "trained all weights, and keeps no judged state of them"
    if recipe.method == "full":
        return "is an adapter, and this recipe trains all weights"
    # Of an earlier sebp-edge.
    if record.recipe.get("merge_for"):
        return "was trained for a quantisation, and adapters are not any more"
    if record.recipe.get("load_in_fp8"):
        return "was trained on weights in FP8, and adapters are not any more"
    if known is None:
        return "does not say which texts it has learnt"
    if record.verdict in (None, "not judged"):
        return "was not judged"
    if other_model:
        return other_model
    if fixed := [each for each in differing if each[0] in _OF_THE_WEIGHTS]:
        return _was_trained_with(*fixed[0][1:])
    if record.seed != seed:
        return f"was trained with the seed {record.seed}, and this seed is {seed}"
    return ""


def _was_trained_with(before: str, now: str) -> str:
    return f"was trained with {before}, and this recipe has {now}"


def _other_model(record: AdapterRecord, known: KnownTexts | None, reference: ModelReference) -> str:
    """Returns that a version was made for another base model, or an empty string."""
    digest = files_digest(reference)
    # The same files are the same model under any name; those of one that is not downloaded yet are compared later.
    is_same = record.base_model == reference.public_name
    if (known is not None and digest == known.base) or (is_same and (known is None or digest is None)):
        return ""
    if is_same:
        return f"was made for other files of the model {record.base_model}, which have changed since"
    return f"was made for the model {record.base_model}, and this one is {reference.public_name}"


def _differing(record: AdapterRecord, recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """Yields the values in which a version's recipe and this one differ: the key, and the setting in both."""
    # A version that was saved before a value was added to recipes was made with its default.
    defaults = {field.name: field.default for field in fields(recipe)}
    for key, now in asdict(recipe).items():
        before = record.recipe.get(key, defaults[key])
        is_open = (key in _OPEN and now is None) or (key == "learning_rate" and before in recipe.learning_rates)
        if key not in _NOT_COMPARED and not is_open and before != now:
            yield key, _setting(key, before), _setting(key, now)


def _setting(key: str, value) -> str:
    """Returns a value of a recipe as its file has it."""
    return f"no {key}" if value is None else f"{key} = {json.dumps(value)}"


def _other_recipe(record: AdapterRecord, differing: list[tuple[str, str, str]], recipe: Recipe) -> str:
    """Returns that a version was made with another recipe, or an empty string; other epochs make no other recipe."""
    before, methods = record.recipe["name"], (record.recipe["method"], recipe.method)
    fixed = [each[1:] for each in differing if each[0] in _OF_THE_WEIGHTS]
    if methods[0] != methods[1]:
        fixed = [tuple(_setting("method", method) for method in methods)]
    if (differing or fixed) and before != recipe.name:
        return f"was trained with the recipe {before!r}, and this recipe is {recipe.name!r}"
    return _was_trained_with(*fixed[0]) if fixed else ""


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
