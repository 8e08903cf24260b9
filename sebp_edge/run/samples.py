"""Continues the beginnings of a few documents, so that a person can see what an adaptation has changed.

Samples contain the user's text: they are for the screen, never for logs, metadata or the store.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from sebp_edge.engine.models.architecture import longest_sequence
from sebp_edge.engine.models.decoding import Decoder
from sebp_edge.engine.models.loading import BaseModel
from sebp_edge.engine.models.sampling import Sampling
from sebp_edge.errors import TextsError
from sebp_edge.lessons.conversations import is_of_people
from sebp_edge.lessons.prompts import EncodedPrompt, encode_prompt
from sebp_edge.run.work_ahead import NUM_BEGINNINGS, SAMPLED_TOKENS
from sebp_edge.values.documents import Content, Conversation, Document, PromptCompletion
from sebp_edge.values.training_facts import Sample

NUM_SAMPLES = 3
# A beginning ends at a sentence or a line if it has so many characters by then.
MIN_CHARACTERS, MAX_CHARACTERS = 12, 300
# Otherwise it has so many words at most, and leaves so many of its line: fewer show nothing of what was learnt.
MAX_WORDS, MIN_WORDS_LEFT = 20, 4
# Two continuations are alike if they share so much of their pairs of words.
_ALIKE = 0.5
_ADDRESS = re.compile(r"://|www\.|[!-~]{40}")
# A list's number ends no sentence; a paragraph ends with an empty line.
_SENTENCE = re.compile(r"(?<!\d)[.!?…][\"'”’»)\]*_]*(?=\s)|[。！？][”’」』]*|\S(?=[^\S\n]*\n[^\S\n]*\n)")
_LINE = re.compile(r"\S(?=[^\S\n]*\n)")
# Repeatable. Without the penalty, small models repeat one phrase, which shows nothing of what they learnt.
SAMPLING = Sampling(max_new_tokens=SAMPLED_TOKENS, temperature=0, repetition_penalty=1.2)


@dataclass(frozen=True)
class TextBeginning:
    """The beginning of a document.

    Attributes:
        text: what to show of it.
        prompt: its tokens, as in training.
    """

    source: str
    text: str
    prompt: EncodedPrompt


def find_beginnings(
    documents: Sequence[Document], numbers: Iterable[int], base: BaseModel, *, chat_template: bool
) -> list[TextBeginning]:
    """Returns the beginnings of the first five of these documents that the model can continue.

    No two documents begin alike.

    Args:
        numbers: indices of documents, in the order of preference.
        chat_template: whether prompt/completion records are rendered with the chat template, as in the recipe.
    """
    beginnings, begun = [], set()
    for number in numbers:
        content = documents[number].as_chat(chat_template=chat_template)
        beginning = _beginning_of(content)
        prompt = _encode(beginning, base)
        if prompt is not None and tuple(prompt.input_ids) not in begun:
            begun.add(tuple(prompt.input_ids))
            # What other people wrote is not shown.
            is_others = is_of_people(content)
            text = beginning if isinstance(beginning, str) else "" if is_others else beginning[-1]["content"]
            beginnings.append(TextBeginning(documents[number].source, text, prompt))
        if len(beginnings) == NUM_BEGINNINGS:
            break
    return beginnings


def choose(samples: Iterable[Sample]) -> tuple[Sample, ...]:
    """Returns three samples whose new continuations differ from each other, or fewer.

    Those that differ from the base model's come before others, which show nothing of what was learnt.
    """
    chosen = []
    for sample in sorted(samples, key=lambda sample: _are_alike(sample.base, sample.after)):
        if len(chosen) < NUM_SAMPLES and not any(_are_alike(sample.after, other.after) for other in chosen):
            chosen.append(sample)
    return tuple(chosen)


def _are_alike(first: str, second: str) -> bool:
    pairs = [{*pairwise(["", *text.split(), ""])} for text in (first, second)]
    return len(pairs[0] & pairs[1]) >= _ALIKE * min(map(len, pairs))


def continue_each(
    base: BaseModel, beginnings: list[TextBeginning], check: Callable[[], None], decoder: Decoder | None = None
) -> list[str]:
    """Continues each beginning with at most 40 likely tokens, the same each time, by the model in its present state.

    With an adaptation attached, that is the adapted model; within `adaptation.disabled()`, it is the base model.

    Args:
        check: is called after each token, and on a CPU before each block; may raise a KeyboardInterrupt to stop.
        decoder: decodes them; by default a new one.

    Raises:
        NonFiniteLogits: the model computes NaN or infinite logits.
    """
    prompts = [beginning.prompt for beginning in beginnings]
    # Those of chats are control tokens, which end any text.
    ends = sorted(set(chain.from_iterable(prompt.end_ids for prompt in prompts)))
    decoder = decoder or Decoder(base.model)
    texts = decoder.decode([prompt.input_ids for prompt in prompts], ends, SAMPLING, check=check)
    # The last character may lack some of its tokens.
    return [base.tokenizer.decode(tokens, skip_special_tokens=True).rstrip("\ufffd") for tokens in texts]


def _beginning_of(content: Content) -> str | list[dict[str, str]]:
    if isinstance(content, Conversation):
        return list(content.messages[: content.turns[0]])
    if isinstance(content, PromptCompletion):
        return content.prompt
    return _first_words(content)


def _first_words(text: str) -> str:
    """Returns how a text begins: sentences or paragraphs of its first half, or else lines, or else words.

    Empty if it can only be cut within an address.
    """
    words, ends, good = list(re.finditer(r"\S+", text)), [], []
    for word in words[: min(MAX_WORDS, max(1, len(words) // 2))]:
        if word.end() <= MAX_CHARACTERS:
            ends.append(word.end())
            if len(text[word.end() :].partition("\n")[0].split(maxsplit=MIN_WORDS_LEFT)) >= MIN_WORDS_LEFT:
                good.append(word.end())
    most = min(MAX_CHARACTERS, len(text) // 2)
    sentences, lines = (
        [end.end() for end in kind.finditer(text[: most + 2]) if MIN_CHARACTERS <= end.end() <= most]
        for kind in (_SENTENCE, _LINE)
    )
    for cuts in (sentences, lines, good, ends):
        if away := [cut for cut in cuts if not _is_at_address(text, cut)]:
            return text[: max(away)]
    if ends:
        return text[: max(ends)]
    # Languages without spaces have words of any length.
    begun = text[:MAX_CHARACTERS]
    return "" if _ADDRESS.search(begun) else begun


def _is_at_address(text: str, cut: int) -> bool:
    """Whether the word before a cut, or the one after it, is an address."""
    around = (text[:cut].split()[-1:], text[cut:].split(maxsplit=1)[:1])
    return any(_ADDRESS.search(word) for word in chain.from_iterable(around))


def _encode(beginning: str | list[dict[str, str]], base: BaseModel) -> EncodedPrompt | None:
    """Returns the tokens of a beginning; None if it is empty, refused by the template, or leaves no room."""
    if not beginning:
        return None
    try:
        prompt = encode_prompt(beginning, base.tokenizer, chat=not isinstance(beginning, str))
    except TextsError:
        return None
    limit = longest_sequence(base.model)
    fits = limit is None or len(prompt.input_ids) + SAMPLING.max_new_tokens <= limit
    return prompt if fits else None
