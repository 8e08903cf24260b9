"""Asks a model the questions of a quiz."""

from collections.abc import Callable
from itertools import chain

from sebp_edge.models.generation import answer_all
from sebp_edge.models.loading import BaseModel
from sebp_edge.questions.asking import end_ids
from sebp_edge.questions.quiz import REPLY_TOKENS
from sebp_edge.texts.dataset import Quiz
from sebp_edge.training.quiz import Replies


def ask_quiz(base: BaseModel, quiz: Quiz, check: Callable[[], None]) -> Replies:
    """Returns the replies of the model in its present state, the likeliest token each time.

    Args:
        check: is called after each token; may raise a KeyboardInterrupt to stop.

    Raises:
        NonFiniteLogits: the model computes NaN or infinite logits.
    """
    notes, general = quiz.about_notes, quiz.general
    kinds = ([q.found for q in notes], [q.right for q in notes], [q.alone for q in notes], [q.alone for q in general])
    prompts = list(dict.fromkeys(chain(*kinds)))  # the passage that is found is the right one mostly
    replies = answer_all(
        base.model, base.tokenizer, [*map(list, prompts)], end_ids(base.tokenizer), REPLY_TOKENS, check
    )
    reply_to = dict(zip(prompts, replies, strict=True))
    return Replies(*(tuple(reply_to[prompt] for prompt in kind) for kind in kinds))
