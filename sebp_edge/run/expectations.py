"""Says what to expect of an adapted model, and what a model of its size will not do."""

from collections.abc import Iterable, Sequence

from sebp_edge.basics.units import parameters
from sebp_edge.lessons.conversations import is_of_people
from sebp_edge.recipe import Recipe
from sebp_edge.run.fitting_recipe import mostly
from sebp_edge.values.documents import Content, Conversation, PromptCompletion
from sebp_edge.values.model_reference import ModelReference

# Below these numbers of parameters.
SMALL, MEDIUM = 500_000_000, 2_000_000_000
_WHAT_A_QUIZ_SHOWS = (
    "It reads the passage that a search finds, and answers in its words. Wrong answers sound as sure as right ones, so "
    "each names the passage that it was read in."
)


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
    size = f"A model of this size ({parameters(num_parameters)} parameters)"
    if num_parameters < SMALL:
        return f"{size} loses the thread after a few sentences, and does not answer questions or reason reliably."
    if num_parameters < MEDIUM:
        return f"{size} answers simple questions, but makes up facts and does not reason reliably in several steps."
    return f"{size} writes coherent pages, but still makes up names, numbers and dates; check them."
