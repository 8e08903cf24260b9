"""Asks a model the questions of a quiz, and the base model those whose replies it teaches."""

import json
from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import chain

from sebp_edge.ask.make_quiz import REPLY_TOKENS
from sebp_edge.ask.wording import end_ids, prompt_for
from sebp_edge.basics.files import keep, read_kept
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
    """Returns the base model's likeliest replies to bundled questions, without what it says after them.

    They are kept in the cache folder, since they never change.
    """
    tokens, ends = [list(prompt_for(each, base.tokenizer).input_ids) for each in questions], end_ids(base.tokenizer)
    key = {"model": base.fingerprint, "precision": base.precision, "ends": ends, "max_new_tokens": max_new_tokens}
    known = read_kept("replies", key) or {}
    digests = [sha256(json.dumps(each).encode()).hexdigest() for each in tokens]
    new = {digest: prompt for digest, prompt in zip(digests, tokens, strict=True) if digest not in known}
    if new:
        replies = answer_all(base.model, base.tokenizer, [*new.values()], ends, max_new_tokens, check)
        known |= zip(new, (reply.strip() for reply in replies), strict=True)
        keep("replies", key, known)
    return [known[digest] for digest in digests]
