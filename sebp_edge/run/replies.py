"""Asks a model the questions of a quiz, alone and after their documents, and lets it write questions of its own."""

from collections.abc import Callable

from sebp_edge.models.architecture import longest_sequence
from sebp_edge.models.generation import answer_all
from sebp_edge.models.loading import BaseModel
from sebp_edge.questions.asking import end_ids
from sebp_edge.questions.examples import REPLY_TOKENS
from sebp_edge.questions.interview import Interview, Interviewed
from sebp_edge.questions.interviews import InterviewCache, interview_about
from sebp_edge.texts.dataset import QuizQuestion
from sebp_edge.texts.progress import Progress
from sebp_edge.texts.readers import Reading
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


def interview(
    base: BaseModel, reading: Reading, context_length: int, cache: InterviewCache, progress: Progress
) -> dict[int, Interviewed]:
    """Returns what the model in its present state wrote about each document that is a text.

    Args:
        context_length: the most tokens of a prompt and its reply, if the model has room for them.

    Raises:
        NonFiniteLogits: the model computes NaN or infinite logits.
        StorageError: the cache cannot be written.
    """
    ends = end_ids(base.tokenizer)

    def answer(prompts: list[list[int]], max_new_tokens: int) -> list[str]:
        return answer_all(base.model, base.tokenizer, prompts, ends, max_new_tokens, lambda: progress.advance(0))

    longest = min(context_length, longest_sequence(base.model) or context_length)
    texts = {number: each.content for number, each in enumerate(reading.documents) if isinstance(each.content, str)}
    return interview_about(texts, Interview(base.tokenizer, answer, longest), cache, progress)
