"""Compares texts with those that the active version of an adapter has learnt, by their hashes; imports no torch."""

from dataclasses import asdict, dataclass, fields
from functools import cached_property

from sebp_edge.adapters.known_texts import KnownTexts
from sebp_edge.adapters.store import AdapterRecord, AdapterStore, SavedAdapter
from sebp_edge.errors import AdapterError
from sebp_edge.models.catalog import ModelReference
from sebp_edge.models.files_digest import files_digest
from sebp_edge.recipe import Recipe
from sebp_edge.texts.documents import content_hash
from sebp_edge.texts.readers import Reading

# Values of a recipe that do not change what is learnt.
_OF_NO_EFFECT = {"name", "description", "margin"}
# Values that a recipe may leave open; the version's own are then used.
_OPEN = {"r", "load_in_4bit"}


@dataclass(frozen=True)
class TextsComparison:
    """The texts beside those of the active version.

    Attributes:
        saved: the active version; None if it cannot be read.
        version: its number.
        known: what it has learnt; None if that is not known.
        hashes: the hash of each document's content, by the document's number.
        obstacle: why no training can learn on from it, as the end of a sentence; empty if one can.
    """

    saved: SavedAdapter | None
    version: int
    known: KnownTexts | None
    hashes: list[str]
    obstacle: str

    @cached_property
    def learnt(self) -> set[int]:
        """The numbers of the documents whose content the version has learnt."""
        known = {*self.known.texts, *self.known.gone} if self.known else set()
        return {number for number, each in enumerate(self.hashes) if each in known}

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
    """Compares documents with those of the active version; returns None if no version is active.

    Raises:
        AdapterError: the name is not valid.
        StorageError: the store cannot be read.
    """
    version = store.active_version(name)
    if version is None:
        return None
    saved = known = None
    try:
        saved = store.open(name, version)
        known = KnownTexts.read(saved.path)
        states = store.judged_states(saved)
    except AdapterError:
        obstacle = "its files are damaged, or of a newer sebp-edge"
    else:
        if saved.record.trained_on_all and states == [saved.path]:
            obstacle = "its judged state is missing"
        else:
            obstacle = _obstacle(saved.record, known, reference, recipe, seed)
    salt = known.salt if known else b""
    hashes = [content_hash(document.content, salt) for document in reading.documents]
    return TextsComparison(saved, version, known, hashes, obstacle)


def _obstacle(
    record: AdapterRecord, known: KnownTexts | None, reference: ModelReference, recipe: Recipe, seed: int
) -> str:
    """Returns why no training can learn on from a version, or an empty string."""
    if recipe.method == "full" or record.recipe.get("method") == "full":
        return "all weights were trained, of which no judged state is kept"
    if known is None:
        return "it does not say which texts it has learnt"
    if record.verdict in (None, "not judged"):
        return "it was not judged"
    if record.base_model != reference.public_name or known.base != files_digest(reference):
        return f"the files of its base model, {record.base_model}, differ"
    if (differing := _differing(record, recipe)) is not None:
        return f"its recipe has another {differing}"
    if record.seed != seed:
        return f"its seed is {record.seed}"
    return ""


def _differing(record: AdapterRecord, recipe: Recipe) -> str | None:
    """Returns the name of the first value in which two recipes differ, if they do."""
    # A version that was saved before a value was added to recipes was made with its default.
    defaults = {field.name: field.default for field in fields(recipe)}
    for key, value in asdict(recipe).items():
        is_open = key in _OPEN and value is None
        if key not in _OF_NO_EFFECT and not is_open and record.recipe.get(key, defaults[key]) != value:
            return key
    return None
