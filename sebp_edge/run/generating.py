"""Generates text with the model in use."""

import re
from collections.abc import Callable
from functools import partial

from sebp_edge.ask.wording import prompt_for
from sebp_edge.engine.models.completion import Completion, complete_text
from sebp_edge.engine.models.generation import generate_text
from sebp_edge.engine.models.sampling import Sampling
from sebp_edge.lessons.prompts import Messages, check_prompt, encode_prompt, encode_texts
from sebp_edge.run.call import Call
from sebp_edge.run.model_in_use import AdapterChoice
from sebp_edge.values.documents import check_text

# The most characters before a completion that the model reads, about 1,000 tokens.
_MAX_CHARACTERS = 4096
_SPACE = re.compile(r"\s")


def generate(
    call: Call,
    prompt: str | Messages,
    choice: AdapterChoice,
    sampling: Sampling,
    on_text: Callable[[str], None] | None,
) -> str:
    """Continues a text, or answers messages; see `Personalizer.generate`."""
    check_prompt(prompt)
    with call.generating(choice) as (base, decoder, rendered_as):
        if rendered_as == "question" and isinstance(prompt, str):
            encoded = prompt_for(prompt, base.tokenizer)
        else:
            encoded = encode_prompt(prompt, base.tokenizer, chat=rendered_as == "chat")
        options = {"decoder": decoder, "on_text": on_text, "check": call.check}
        return generate_text(base.model, base.tokenizer, *encoded, sampling, **options)


def complete(
    call: Call,
    before: str,
    choice: AdapterChoice,
    max_new_tokens: int,
    min_probability: float,
    on_text: Callable[[str], None] | None,
) -> Completion:
    """Completes a text; see `Personalizer.complete`."""
    check_text(before, "before")
    with call.generating(choice) as (base, decoder, _):
        limit = getattr(base.model.config, "max_position_embeddings", None)
        encode = partial(encode_texts, tokenizer=base.tokenizer)
        most = _MAX_CHARACTERS
        while limit is not None and most > 16 and len(encode([_end_of(before, most)])[0]) + max_new_tokens > limit:
            most //= 2
        options = {"on_text": on_text, "check": call.signal.check}
        rest = (_end_of(before, most), max_new_tokens, min_probability)
        return complete_text(decoder, base.vocabulary, encode, *rest, **options)


def _end_of(text: str, most: int) -> str:
    """Returns the last words of a text, with at most so many characters, and half as many at least.

    They begin at the same word until the text has grown by a half, since a decoder keeps what a text begins with.
    """
    half = most // 2
    begin = max(0, -(-(len(text) - most) // half) * half)
    space = _SPACE.search(text, begin, begin + half // 2) if begin else None
    return text[begin if space is None else space.start() :]
