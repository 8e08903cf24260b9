"""Reads what a recipe trains on, and says which recipe fits texts; imports no torch."""

from collections.abc import Sequence
from statistics import median

from sebp_edge.ask.practice import practice_reading
from sebp_edge.errors import AdapterError, TextsError
from sebp_edge.reading.readers import read_texts
from sebp_edge.recipe import FittingRecipe, Recipe
from sebp_edge.run.texts_comparison import made_for_others
from sebp_edge.store.adapter import Adapter
from sebp_edge.values.documents import Content, Conversation, PromptCompletion
from sebp_edge.values.model_reference import ModelReference
from sebp_edge.values.preparation_progress import SILENT, Progress
from sebp_edge.values.reading import Reading


def read_for(
    recipe: Recipe, texts, memory: int | None = None, progress: Progress = SILENT, me: Sequence[str] = ()
) -> Reading:
    """Reads texts (see `read_texts`), or the practice notes if the recipe trains on these."""
    if recipe.questions:
        return practice_reading()
    if texts is None:
        raise TextsError("No texts were given; give files or folders with your texts.")
    return read_texts(texts, memory, progress, me)


def choose_recipe(asked: Recipe, reading: Reading, reference: ModelReference, adapter: Adapter | None = None) -> Recipe:
    """Returns the recipe that was asked for.

    If none was: the active version's, if that is of these texts and this model; else "chat" if most texts are
    conversations; else the model's recipe for notes.

    Args:
        reference: the base model.
        adapter: the adapter that is learnt on from.
    """
    if not isinstance(asked, FittingRecipe):
        return asked
    is_chat = mostly([document.content for document in reading.documents], Conversation)
    active = _recipe_of_active(adapter, reading, reference) if adapter else None
    return asked.or_bundled(active or ("chat" if is_chat else notes_recipe(reference)))


def notes_recipe(reference: ModelReference) -> str:
    """Returns the name of the recipe for notes that fits a model: the bundled one, which is small, has its own."""
    return "tiny" if reference.kind == "bundled" else "notes"


def fitting_recipe(contents: Sequence[Content], num_tokens: Sequence[int], reference: ModelReference) -> str:
    """Returns the name of the bundled recipe that fits documents with these numbers of tokens, and a model."""
    if mostly(contents, Conversation):
        return "chat"
    if mostly(contents, PromptCompletion | Conversation):
        return "instruct"
    is_long = median(num_tokens or [0]) > 4 * Recipe.load("notes").context_length
    return "long" if is_long else notes_recipe(reference)


def mostly(contents: Sequence[Content], kind) -> bool:
    """Returns whether most contents are of a kind."""
    return 2 * sum(isinstance(content, kind) for content in contents) > len(contents)


def _recipe_of_active(adapter: Adapter, reading: Reading, reference: ModelReference) -> str | None:
    """Returns the name of the active version's recipe; None if no training with a bundled one can learn on from it."""
    try:
        version = adapter.active()
        saved = adapter.open(version) if version else None
        if saved is None or any(made_for_others(adapter, saved, reference, reading).values()):
            return None
    except AdapterError:
        return None
    name = saved.record.recipe["name"]
    recipe = Recipe.load(name) if name in Recipe.names() else None
    return name if recipe and recipe.method == "lora" and not recipe.questions else None
