"""Asks a model the questions of a quiz, alone and after their documents."""

from collections.abc import Callable

from sebp_edge.models.generation import answer_all
from sebp_edge.models.loading import BaseModel
from sebp_edge.questions.asking import end_ids
from sebp_edge.questions.examples import REPLY_TOKENS
from sebp_edge.texts.dataset import QuizQuestion
from sebp_edge.training.quiz import Replies


def ask_quiz(base: BaseModel, quiz: tuple[QuizQuestion, ...], check: Callable[[], None]) -> Replies:
    """Returns the replies of the model in its present state, the likeliest token each time.

    Args:
        check: is called after each token; may raise a KeyboardInterrupt to stop.

    Raises:
        NonFiniteLogits: the model computes NaN or infinite logits.
    """
    with_document = [question for question in quiz if question.with_document is not None]
    prompts = [list(question.alone) for question in quiz] + [list(question.with_document) for question in with_document]
    ends = end_ids(base.tokenizer)
    replies = answer_all(base.model, base.tokenizer, prompts, ends, REPLY_TOKENS, check)
    after = dict(zip(with_document, replies[len(quiz) :], strict=True))
    return Replies(tuple(replies[: len(quiz)]), tuple(after.get(question) for question in quiz))
