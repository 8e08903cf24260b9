"""Reads what a recipe trains on; says which recipe fits texts, and what to expect of a model; imports no torch."""

from collections.abc import Iterable, Sequence
from statistics import median

from sebp_edge.ask.practice import practice_reading
from sebp_edge.errors import AdapterError, TextsError
from sebp_edge.lessons.conversations import is_of_people
from sebp_edge.reading.readers import read_texts
from sebp_edge.recipe import FittingRecipe, Recipe
from sebp_edge.run.texts_comparison import made_for_others
from sebp_edge.store.adapter import Adapter
from sebp_edge.values.documents import Content, Conversation, PromptCompletion
from sebp_edge.values.model_reference import ModelReference
from sebp_edge.values.preparation_progress import SILENT, Progress
from sebp_edge.values.reading import Reading

# Below these numbers of parameters.
SMALL, MEDIUM = 500_000_000, 2_000_000_000
_WHAT_A_QUIZ_SHOWS = (
    "It reads the passage that a search finds, and answers in its words. Wrong answers sound as sure as right ones, so "
    "each names the passage that it was read in."
)


def read_for(
    recipe: Recipe, texts, memory: int | None = None, progress: Progress = SILENT, me: Sequence[str] = ()
) -> Reading:
    """Reads texts (see `read_texts`), or the practice notes if the recipe trains on these.

    Raises:
        TextsError: the recipe needs texts, and `texts` is None.
    """
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


def expectation(
    reference: ModelReference, num_parameters: int, *, is_chat: bool, has_quiz: bool = False, of_people: bool = False
) -> str:
    """Returns what was learnt, and the limits of a model of this size, in two sentences or three.

    Args:
        is_chat: whether more than half of the documents are conversations.
        has_quiz: whether it was trained to answer questions about passages.
        of_people: whether most documents are chats of people, in which the owner's words were learnt.
    """
    if has_quiz:
        return _WHAT_A_QUIZ_SHOWS
    return f"{_what_is_learnt(is_chat, of_people)} {_limits(reference, num_parameters)}"


def what_the_kind_can_do(contents: Sequence[Content], recipe: Recipe, *, has_template: bool) -> str:
    """Returns what this kind of model makes of these contents, in one or two sentences.

    Args:
        has_template: whether the model has a chat template.
    """
    if recipe.questions:
        return _WHAT_A_QUIZ_SHOWS
    if not mostly(contents, PromptCompletion | Conversation):
        return (
            "It will continue texts in your voice. It will not answer questions about them; for that, use the command "
            "`sebp-edge ask`."
        )
    if mostly_of_people(contents):
        return "It will answer messages as you do. It will not know what was not said in them."
    if not has_template:
        return (
            "This base model has no chat template: it learns to continue each prompt with its completion, and is no "
            "assistant; choose an instruct model for answers."
        )
    if recipe.chat_template or mostly(contents, Conversation):
        return "It will answer in chats, as your records do. It will not know what they do not say."
    return (
        f"The recipe {recipe.name!r} trains on prompts without the model's chat template, so it will continue prompts, "
        "and not answer in chats; the recipe 'instruct' uses the template."
    )


def mostly_of_people(contents: Iterable[Content]) -> bool:
    """Returns whether most contents are chats of people."""
    found = list(map(is_of_people, contents))
    return 2 * sum(found) > len(found)


def _what_is_learnt(is_chat: bool, of_people: bool) -> str:
    if of_people:
        return "It writes as you do in chats, but do not rely on it for what was said or is true."
    if is_chat:
        return "Expect answers in the format and tone of your examples, but do not rely on the facts in them."
    return "Expect the style and vocabulary of your texts when it continues one, but do not rely on it for their facts."


def _limits(reference: ModelReference, num_parameters: int) -> str:
    if reference.kind == "bundled":
        return (
            f"The model {reference.name!r} is a demonstrator: it writes sentences, knows nothing and follows no "
            "instructions, so use a larger model for real work."
        )
    in_words = f"{num_parameters / 1e9:.1f} billion" if num_parameters >= 1e9 else f"{num_parameters / 1e6:.0f} million"
    size = f"A model of this size ({in_words} parameters)"
    if num_parameters < SMALL:
        return f"{size} loses the thread after a few sentences, and does not answer questions or reason reliably."
    if num_parameters < MEDIUM:
        return f"{size} answers simple questions, but makes up facts and does not reason reliably in several steps."
    return f"{size} writes coherent pages, but still makes up names, numbers and dates; check them."
