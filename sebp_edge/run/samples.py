"""Continues the beginnings of a few documents, so that a person can see what an adaptation has changed.

Samples contain the user's text: they are for the screen, never for logs, metadata or the store.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from sebp_edge.errors import TextsError
from sebp_edge.models.decoding import Decoder
from sebp_edge.models.loading import BaseModel
from sebp_edge.models.sampling import Sampling
from sebp_edge.texts.conversations import is_of_people
from sebp_edge.texts.documents import Completion, Content, Conversation, Document
from sebp_edge.texts.prompts import EncodedPrompt, encode_prompt

NUM_SAMPLES = 3
MAX_WORDS, MAX_CHARACTERS = 20, 200
# Of a line, after its beginning: fewer show nothing of what was learnt.
MIN_WORDS_LEFT = 4
_ADDRESS = re.compile(r"://|www\.|\S{40}")
# Repeatable. Without the penalty, small models repeat one phrase, which shows nothing of what they learnt.
SAMPLING = Sampling(max_new_tokens=40, temperature=0, repetition_penalty=1.2)


@dataclass(frozen=True)
class TextBeginning:
    """The beginning of a document.

    Attributes:
        source: the source of the document.
        text: what to show of it.
        prompt: its tokens, as in training.
    """

    source: str
    text: str
    prompt: EncodedPrompt


def find_beginnings(
    documents: Sequence[Document], numbers: Iterable[int], base: BaseModel, *, chat_template: bool
) -> list[TextBeginning]:
    """Returns the beginnings of the first three of these documents that the model can continue.

    Args:
        numbers: indices of documents, in the order of preference.
        chat_template: whether prompt/completion records are rendered with the chat template, as in the recipe.
    """
    found = []
    for number in numbers:
        content = documents[number].as_chat(chat_template=chat_template)
        beginning = _beginning_of(content)
        prompt = _encode(beginning, base)
        if prompt is not None:
            # What other people wrote is not shown.
            is_others = isinstance(content, Conversation) and is_of_people(content.messages)
            text = beginning if isinstance(beginning, str) else "" if is_others else beginning[-1]["content"]
            found.append(TextBeginning(documents[number].source, text, prompt))
        if len(found) == NUM_SAMPLES:
            break
    return found


def continue_each(base: BaseModel, beginnings: list[TextBeginning], check: Callable[[], None]) -> list[str]:
    """Continues each beginning with at most 40 likely tokens, the same each time, by the model in its present state.

    With an adaptation attached, that is the adapted model; within `adaptation.disabled()`, it is the base model.

    Args:
        check: is called after each token; may raise a KeyboardInterrupt to stop.

    Raises:
        NonFiniteLogits: the model computes NaN or infinite logits.
    """
    prompts = [beginning.prompt for beginning in beginnings]
    # Those of chats are control tokens, which end any text.
    ends = sorted(set(chain.from_iterable(prompt.end_ids for prompt in prompts)))
    texts = Decoder(base.model).decode([prompt.input_ids for prompt in prompts], ends, SAMPLING, check=check)
    # The last character may lack some of its tokens.
    return [base.tokenizer.decode(tokens, skip_special_tokens=True).rstrip("\ufffd") for tokens in texts]


def _beginning_of(content: Content) -> str | list[dict[str, str]]:
    if isinstance(content, Conversation):
        return list(content.messages[: content.turns[0]])
    if isinstance(content, Completion):
        return content.prompt
    return _first_words(content)


def _first_words(text: str) -> str:
    """Returns the first words of a text, at most half of them.

    A few words of the line are left to write, if possible, and neither of the words at the cut is an address.
    """
    words, ends, good = list(re.finditer(r"\S+", text)), [], []
    for number, word in enumerate(words[: min(MAX_WORDS, max(1, len(words) // 2))]):
        if word.end() <= MAX_CHARACTERS:
            ends.append(word.end())
            rest = text[word.end() :].partition("\n")[0].split(maxsplit=MIN_WORDS_LEFT)
            if len(rest) >= MIN_WORDS_LEFT and not any(_ADDRESS.search(each[0]) for each in words[number : number + 2]):
                good.append(word.end())
    # Languages without spaces have words of any length.
    return text[: max(good or ends, default=MAX_CHARACTERS)]


def _encode(beginning: str | list[dict[str, str]], base: BaseModel) -> EncodedPrompt | None:
    """Returns the tokens of a beginning; None if it is empty, refused by the template, or leaves no room."""
    if not beginning:
        return None
    try:
        prompt = encode_prompt(beginning, base.tokenizer, chat=not isinstance(beginning, str))
    except TextsError:
        return None
    limit = getattr(base.model.config, "max_position_embeddings", None)
    fits = limit is None or len(prompt.input_ids) + SAMPLING.max_new_tokens <= limit
    return prompt if fits else None
