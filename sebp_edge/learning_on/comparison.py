"""Compares an adaptation with the active version of its name: texts (by hashes), model, recipe; imports no torch."""

import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path

from sebp_edge.adapters.known_texts import KnownTexts
from sebp_edge.adapters.names import check_name
from sebp_edge.adapters.store import AdapterRecord, AdapterStore, SavedAdapter
from sebp_edge.errors import AdapterError
from sebp_edge.events import NameInUse
from sebp_edge.models.catalog import ModelReference
from sebp_edge.models.files_digest import files_digest
from sebp_edge.recipe import Recipe
from sebp_edge.texts.documents import content_hash
from sebp_edge.texts.readers import Reading

# Values of a recipe that decide what a version's weights are for: with others, no training can learn on from it.
_OF_THE_WEIGHTS = {"load_in_4bit", "r", "lora_alpha", "chat_template", "merge_for", "questions"}
# Values of a recipe that do not change what is learnt; and the method, which is compared by itself.
_NOT_COMPARED = {"name", "description", "margin", "method"}
# Values that a recipe may leave open; the version's own are then used.
_OPEN = {"r", "load_in_4bit"}
# Texts are other ones if they share less than a tenth of their documents with those that the version knows.
_FEW = 10


@dataclass(frozen=True)
class TextsComparison:
    """An adaptation beside the active version of its name.

    Attributes:
        saved: the active version; None if it cannot be read.
        version: its number.
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
    def num_known(self) -> int:
        """The number of texts that the version has learnt."""
        return len({*self.known.texts, *self.known.gone}) if self.known else 0

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
    """Compares an adaptation with the active version of its name; returns None if no version is active.

    Raises:
        AdapterError: the name is not valid.
        StorageError: the store cannot be read.
    """
    version = store.active_version(name)
    if version is None:
        return None
    saved, known, other_model, differing = None, None, "", []
    try:
        saved = store.open(name, version)
        known = KnownTexts.read(saved.path)
        states = store.judged_states(saved)
    except AdapterError:
        obstacle = "has damaged files, or was made by a newer sebp-edge"
    else:
        other_model = _other_model(saved.record, known, reference)
        differing = list(_differing(saved.record, recipe))
        if saved.record.trained_on_all and states == [saved.path]:
            obstacle = "has lost its judged state"
        else:
            obstacle = _obstacle(saved.record, known, other_model, differing, recipe, seed)
    salt = known.salt if known else b""
    hashes = [content_hash(document.content, salt) for document in reading.documents]
    compared = TextsComparison(saved, version, known, hashes, obstacle, tuple(differing))
    if saved is None:
        return compared
    differs = {
        "texts": _other_texts(compared, store, reading),
        "model": other_model,
        "recipe": _other_recipe(saved.record, differing, recipe),
    }
    return replace(compared, name_in_use=_name_in_use(compared, differs, store, reference, recipe, reading))


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
        if key not in _NOT_COMPARED and not (key in _OPEN and now is None) and before != now:
            yield key, _setting(key, before), _setting(key, now)


def _setting(key: str, value) -> str:
    """Returns a value of a recipe as its file has it."""
    return f"no {key}" if value is None else f"{key} = {json.dumps(value)}"


def _other_recipe(record: AdapterRecord, differing: list[tuple[str, str, str]], recipe: Recipe) -> str:
    """Returns that a version was made with another recipe, or an empty string; other epochs make no other recipe."""
    before = record.recipe["name"]
    if record.recipe["method"] != recipe.method or (differing and before != recipe.name):
        return f"was trained with the recipe {before!r}, and this recipe is {recipe.name!r}"
    fixed = [each for each in differing if each[0] in _OF_THE_WEIGHTS]
    return _was_trained_with(*fixed[0][1:]) if fixed else ""


def _other_texts(compared: TextsComparison, store: AdapterStore, reading: Reading) -> str:
    """Returns that a version knows other texts, or an empty string."""
    learnt, number = len(compared.learnt), len(compared.hashes)
    if compared.known is None or _FEW * learnt >= min(number, compared.num_known):
        return ""
    before = [path for where in store.wheres(compared.saved.name).values() for path in where.paths]
    if _are_related(before, (Path(folder.path) for folder in reading.folders)):
        return ""
    found = f"only {learnt}" if learnt else "none"
    verb = "is" if learnt < 2 else "are"
    return f"knows {_documents(compared.num_known)}, {found} of which {verb} among these {number:,}"


def _documents(number: int) -> str:
    return f"{number:,} document{'s' * (number != 1)}"


def _are_related(before: Iterable[Path], now: Iterable[Path]) -> bool:
    """Whether one of the files and folders is one of the others, or in it, or around it."""
    before, now = ([Path(os.path.realpath(path)) for path in paths] for paths in (before, now))
    return any(one.is_relative_to(other) or other.is_relative_to(one) for one in before for other in now)


def _name_in_use(
    compared: TextsComparison,
    differs: dict[str, str],
    store: AdapterStore,
    reference: ModelReference,
    recipe: Recipe,
    reading: Reading,
) -> NameInUse | None:
    reasons = {what: reason for what, reason in differs.items() if reason}
    if not reasons:
        return None
    name = compared.saved.name
    if "texts" in reasons:
        wanted = name
        if reading.folders:
            path = Path(reading.folders[0].path)
            wanted = path.stem if path.is_file() else path.name
    else:
        wanted = f"{name}-{reference.name.split('/')[-1] if 'model' in reasons else recipe.name}"
    proposal = _free_name(wanted, store.names())
    message = (
        f"Version {compared.version} of the adapter {name!r} {'; it '.join(reasons.values())}. To keep the two apart, "
        f"give this adapter a name of its own, such as --name {shlex.quote(proposal)} (name={proposal!r})."
    )
    if "model" in reasons:
        message += (
            f" The gate cannot compare versions of two models, so a new version of {name!r} is activated only with "
            "--keep-anyway (keep_anyway=True)."
        )
    return NameInUse(name, compared.version, tuple(reasons), proposal, message)


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
