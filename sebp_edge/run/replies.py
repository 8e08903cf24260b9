"""Asks a model the questions of a quiz."""

from collections.abc import Callable, Sequence
from itertools import chain

from sebp_edge.ask.make_quiz import REPLY_TOKENS
from sebp_edge.ask.wording import end_ids, prompt_for
from sebp_edge.engine.models.generation import answer_all
from sebp_edge.engine.models.loading import BaseModel
from sebp_edge.engine.training.quiz import Replies
from sebp_edge.values.dataset import Quiz


def ask_quiz(base: BaseModel, quiz: Quiz, check: Callable[[], None]) -> Replies:
    """Returns the replies of the model in its present state, the likeliest token each time.

    Args:
        check: is called after each token; may raise a KeyboardInterrupt to stop.

    Raises:
        NonFiniteLogits: the model computes NaN or infinite logits.
    """
    notes, general = quiz.about_notes, quiz.general
    kinds = ([q.found for q in notes], [q.right for q in notes], [q.alone for q in notes], [q.alone for q in general])
    # The passage that is found is the right one mostly.
    prompts = [prompt for prompt in dict.fromkeys(chain.from_iterable(kinds)) if prompt]
    replies = answer_all(
        base.model, base.tokenizer, [*map(list, prompts)], end_ids(base.tokenizer), REPLY_TOKENS, check
    )
    reply_to = {(): "", **dict(zip(prompts, replies, strict=True))}
    return Replies(*(tuple(reply_to[prompt] for prompt in kind) for kind in kinds))


def reply_to(base: BaseModel, max_new_tokens: int, check: Callable[[], None], questions: Sequence[str]) -> list[str]:
    """Returns the model's likeliest replies to questions, without what it says after them."""
    tokens, ends = [list(prompt_for(each, base.tokenizer).input_ids) for each in questions], end_ids(base.tokenizer)
    replies = answer_all(base.model, base.tokenizer, tokens, ends, max_new_tokens, check)
    return [reply.strip() for reply in replies]
