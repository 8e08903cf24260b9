"""Generates text with the model in use: continues texts, completes words, and answers questions from texts."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from sebp_edge.ask.answer import Answer, checked
from sebp_edge.ask.passages import Passage
from sebp_edge.ask.searched_texts import SearchedTexts
from sebp_edge.ask.wording import prompt_for, shown
from sebp_edge.engine.models.architecture import longest_sequence
from sebp_edge.engine.models.completion import Completion, complete_text
from sebp_edge.engine.models.generation import Generation, generate_text
from sebp_edge.engine.models.loading import BaseModel
from sebp_edge.engine.models.sampling import Sampling
from sebp_edge.errors import BaseModelMismatch, TextsError
from sebp_edge.lessons.prompts import EncodedPrompt, Messages, check_prompt, encode_prompt, encode_texts
from sebp_edge.recipe import READER
from sebp_edge.run.asking import find_reader, quote
from sebp_edge.run.model_call import ModelCall
from sebp_edge.run.model_in_use import AdapterChoice, Current
from sebp_edge.values.documents import check_text

# The most characters before a completion that the model reads, about 1,000 tokens.
_MAX_CHARACTERS = 4096
_SPACE = re.compile(r"\s")
# A passage that does not fit into the model's context is cut, but not to fewer characters.
_MIN_CHARACTERS = 100

Turn = tuple[str, str]


def generate(
    call: ModelCall,
    prompt: str | Messages,
    choice: AdapterChoice,
    sampling: Sampling,
    on_text: Callable[[str], None] | None,
) -> Generation:
    """Continues a text, or answers messages; see `Personalizer.generate`."""
    check_prompt(prompt)
    with call.generating(choice) as (base, decoder, rendered_as):
        if rendered_as == "question" and isinstance(prompt, str):
            encoded = prompt_for(prompt, base.tokenizer)
        else:
            encoded = encode_prompt(prompt, base.tokenizer, chat=rendered_as == "chat")
        options = {"decoder": decoder, "on_text": on_text, "check": call.check}
        return generate_text(base.model, base.tokenizer, encoded.input_ids, encoded.end_ids, sampling, **options)


def complete(
    call: ModelCall,
    before: str,
    choice: AdapterChoice,
    max_new_tokens: int,
    min_probability: float,
    on_text: Callable[[str], None] | None,
) -> Completion:
    """Completes a text; see `Personalizer.complete`."""
    check_text(before, "before")
    with call.generating(choice) as (base, decoder, _):
        limit = longest_sequence(base.model)
        encode = partial(encode_texts, tokenizer=base.tokenizer)
        most = _MAX_CHARACTERS
        while limit is not None and most > 16 and len(encode([_end_of(before, most)])[0]) + max_new_tokens > limit:
            most //= 2
        options = {"on_text": on_text, "check": call.signal.check}
        end = _end_of(before, most)
        return complete_text(decoder, base.vocabulary, encode, end, max_new_tokens, min_probability, **options)


def _end_of(text: str, most: int) -> str:
    """Returns the last words of a text, with at most so many characters, and half as many at least.

    They begin at the same word until the text has grown by a half, since a decoder keeps what a text begins with.
    """
    half = most // 2
    begin = max(0, -(-(len(text) - most) // half) * half)
    space = _SPACE.search(text, begin, begin + half // 2) if begin else None
    return text[begin if space is None else space.start() :]


def ask(
    call: ModelCall,
    question: str,
    searched: SearchedTexts,
    texts,
    before: Sequence[Turn],
    choice: AdapterChoice,
    sampling: Sampling,
    num_passages: int,
    on_text: Callable[[str], None] | None,
) -> Answer:
    """Answers a question; see `Personalizer.ask`."""
    index = searched.index(texts, call.progress)
    quotation, reader = quote(question, index, num_passages, before[-1][0] if before else ""), choice
    if choice.adapter is Current.ADAPTER:
        found = find_reader(call.store, call.reference)
        reader = found and AdapterChoice(READER, found.version)
    if quotation.is_final or reader is None:
        return quotation
    call.signal.check()
    try:
        with call.generating(reader, once=reader is not choice) as (base, decoder, _):
            prompt, passages = _prompt(question, quotation.sources, before[-1:], base, sampling.max_new_tokens)
            options = {"decoder": decoder, "check": call.check}
            ids = (prompt.input_ids, prompt.end_ids)
            reply = generate_text(base.model, base.tokenizer, *ids, sampling, **options)
    except BaseModelMismatch:
        if reader is choice:
            raise
        return quotation  # the reader is of other weights with this name
    answer = checked(reply.text, reply.probability, question, passages)
    if on_text is not None and not answer.quoted:
        on_text(answer.text)
    return answer


def _prompt(
    question: str, passages: tuple[Passage, ...], before: Sequence[Turn], base: BaseModel, max_new_tokens: int
) -> tuple[EncodedPrompt, tuple[Passage, ...]]:
    """Returns the tokens of as many passages as fit, and the question after them; and the passages."""
    limit = longest_sequence(base.model)
    while True:
        prompt = prompt_for(question, base.tokenizer, document=shown(passages), before=before)
        if limit is None or len(prompt.input_ids) + max_new_tokens <= limit:
            return prompt, passages
        if len(passages) > 1:
            passages = passages[:-1]
        elif before:
            before = ()
        elif len(passages[0].text) > _MIN_CHARACTERS:
            passages = (replace(passages[0], text=passages[0].text[: len(passages[0].text) * 2 // 3]),)
        else:
            raise TextsError(f"The question is too long for the model's context of {limit} tokens; ask a shorter one.")
