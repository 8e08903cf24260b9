"""Completes a text with the words that a model is sure of: ghost text in an editor.

What is typed last is rarely the end of a token: "the ferr" is not how "the ferry" begins. So its last word is taken
back, and the model chooses among the tokens that begin with it, token healing (Lundberg 2023). The word's beginning may
itself take several tokens, with the last one going on: each of these ways is compared with the others by its
probability, as Phan et al. (2024, "Exact Byte-Level Probabilities from Tokenized Language Models") do.
"""

import codecs
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from sebp_edge.engine.models.decoding import Decoder
from sebp_edge.engine.models.prefix_groups import common_length
from sebp_edge.engine.models.sampling import Sampling, check_number
from sebp_edge.engine.models.vocabulary import Vocabulary, goes_on

# What is taken back: the last word and a character before it, or the last signs, or the last spaces.
_LAST = re.compile(r"(?:[^\w\n]?[\w'’]{1,16}|[^\S\n]?[^\w\s]{1,16}|\s{1,16})\Z")
_LONGEST, _TAIL = 17, 80
# At most so many passes find the tokens of the taken-back word, of which one token less is taken back.
MAX_PASSES = 4
# Ways that together have less than this share of the probability are not computed.
_NEGLIGIBLE = 0.1
# The end of a line, or of a sentence in a script without spaces; other sentences end before a space.
_END = re.compile("(?<=[。！？])|[\r\n]")
_SENTENCE = re.compile(r"[.!?…][\"'”’)\]]*\Z")
# What a way ends with is looked through if it may end with so many tokens at most.
_MAX_ENDINGS = 400
# Takes texts; returns their tokens.
Encode = Callable[[list[str]], list[list[int]]]


@dataclass(frozen=True)
class Completion:
    """How a text goes on.

    Attributes:
        words: the next words, each with the spaces and signs before it; together they follow the text.
        probabilities: for each word, the model's probability that the text goes on with it and those before it, and
            that it ends there; or less, where the text ends within a word, or characters have several tokens.
        num_tokens: how many tokens were chosen for them, with those of the word that they complete.
    """

    words: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    num_tokens: int = 0

    @property
    def text(self) -> str:
        """The words together; empty if the model is not sure of any."""
        return "".join(self.words)


def complete_text(
    decoder: Decoder,
    vocabulary: Vocabulary,
    encode: Encode,
    before: str,
    max_new_tokens: int,
    min_probability: float,
    *,
    on_text: Callable[[str], None] | None = None,
    check: Callable[[], None] = lambda: None,
    max_passes: int = MAX_PASSES,
) -> Completion:
    """Returns the likeliest next words of a line, as many as have at least a probability together.

    They end with their sentence or line, and with a token: signs that only begin the next tokens are left out.

    Args:
        encode: encodes texts as in training, with BOS if there is one.
        on_text: receives each word as soon as the model is sure of it.
        max_passes: the most passes before the first new character. With more, the probabilities within a word of many
            tokens are exact too.
    """
    Sampling(max_new_tokens)  # checks the number
    check_number("min_probability", min_probability, 0, 1, "a number from 0 to 1")
    taken = take_back(before, encode, vocabulary, max_passes - 1)
    if not taken.head:
        return Completion()  # nothing comes before the first token of a model without BOS

    def next_probabilities(tokens: list[int], count: int) -> Tensor:
        return decoder.next_logits(taken.head + tokens, count, check).softmax(dim=1).cpu()

    begun = begin_again(taken, vocabulary, next_probabilities, min_probability, max_passes)
    if begun is None:
        return Completion()
    words = _Words(taken, begun, vocabulary, min_probability, on_text or (lambda text: None))
    prompt = taken.head + begun.tokens
    if begun.following_V is not None and not words.has_ended:
        token, max_new_tokens = words.next(begun.following_V), max_new_tokens - 1
        prompt += [] if token is None else [token]
    if not words.has_ended and max_new_tokens:
        decoder.decode(
            [prompt],
            [],
            Sampling(max_new_tokens, temperature=0),
            choose=lambda _, logits_1V: words.next(logits_1V[0].softmax(dim=0).cpu()),
            check=check,
        )
    return words.completion


class Taken(NamedTuple):
    """A text whose last word is taken back."""

    head: list[int]  # the tokens before it
    tokens: list[int]
    beginning: bytes  # its bytes, which the next tokens must begin with; there may be none
    # The tokens of its beginnings, as the tokenizer cuts these, and what these begin with.
    ways: frozenset[tuple[int, ...]]


def take_back(text: str, encode: Encode, vocabulary: Vocabulary, most: int) -> Taken:
    """Takes back the last word of a text, or its last tokens if it has more than `most`.

    One token of the text stays, even if it is the word's, so that the model can go on.
    """
    last, (tokens,) = _LAST.search(text[-_LONGEST:]), encode([text])
    if last is None:
        return Taken(tokens, [], _space_before_texts(encode, vocabulary) if not text else b"", frozenset())
    sizes, within = range(len(last[0]), 0, -1), _encode_within(encode, vocabulary)
    # The last words are enough, if their tokens are the same without those before them.
    tail = text[max(0, text.rfind(" ", 0, max(0, len(text) - _TAIL))) :]
    (ending,) = within([tail])
    if tail != text and tokens[-len(ending) :] == ending:
        found = within([tail[: len(tail) - size] for size in sizes])
        beginnings = [tokens[: -len(ending)] + each for each in found]
    else:
        beginnings = encode([text[: len(text) - size] for size in sizes])
    size = max(1, common_length([*tokens, -1], [*beginnings[0], -2]), len(tokens) - most)
    head, beginning = tokens[:size], vocabulary.joined(tokens[size:])
    if not beginning:  # a part is no text to the tokenizer
        return Taken(tokens, [], b"", frozenset())
    ways = set()
    for found in beginnings:
        rest = found[size:]
        text = vocabulary.joined(rest)
        if found[:size] == head and text and text != beginning and beginning.startswith(text):
            ways |= {tuple(rest[:end]) for end in range(1, len(rest) + 1)}
    own = {tuple(tokens[size:end]) for end in range(size + 1, len(tokens))}
    return Taken(
        head, tokens[size:], beginning, frozenset(own | _possible(ways - own, tokens[size:], within, vocabulary))
    )


def _possible(
    ways: set[tuple[int, ...]], tokens: list[int], within: Encode, vocabulary: Vocabulary
) -> set[tuple[int, ...]]:
    """Returns the ways that some text takes: with a next token, they are what the tokenizer makes of their bytes.

    Most are not: no word begins with " fer" and "ry" if " ferry" is a token. All are returned if the tokens depend on
    those before them.
    """
    beginning = vocabulary.joined(tokens)
    if not ways or not _is_text(beginning) or within([beginning.decode()]) != [tokens]:
        return ways
    possible: set[tuple[int, ...]] = set()
    for way in sorted(ways, key=len, reverse=True):
        begun = vocabulary.joined(way)
        endings = vocabulary.beginning_with(beginning[len(begun) :])
        whole = {(*way, token): begun + vocabulary[token] for token in endings}
        texts = {longer: found.decode() for longer, found in whole.items() if _is_text(found)}
        if (
            len(endings) > _MAX_ENDINGS
            or len(texts) < len(whole)
            or any(longer[: len(way)] == way for longer in possible)
            or any(tuple(found) == longer for longer, found in zip(texts, within([*texts.values()]), strict=True))
        ):
            possible.add(way)
    return possible


def _encode_within(encode: Encode, vocabulary: Vocabulary) -> Encode:
    """Returns a function that encodes texts as parts of another: without BOS, and without SentencePiece's space."""
    space, start = _space_before_texts(encode, vocabulary).decode(), len(encode([""])[0])
    return lambda texts: [found[start:] for found in encode([text.removeprefix(space) for text in texts])]


def _space_before_texts(encode: Encode, vocabulary: Vocabulary) -> bytes:
    """Returns the space that SentencePiece puts before a text; empty if the tokenizer puts none."""
    empty, letter = encode(["", "a"])
    return (vocabulary.joined(letter[len(empty) :]) or b"").removesuffix(b"a")


def _is_text(found: bytes) -> bool:
    """Whether bytes are whole characters."""
    try:
        found.decode()
    except UnicodeDecodeError:
        return False
    return True


class Begun(NamedTuple):
    """Tokens that begin with what was taken back, and their probability among all that do, at least.

    The probabilities of the token after them may be known, fp32 [vocabulary].
    """

    tokens: list[int]
    probability: float
    following_V: Tensor | None


def begin_again(
    taken: Taken,
    vocabulary: Vocabulary,
    next_probabilities: Callable[[list[int], int], Tensor],
    min_probability: float,
    max_passes: int,
) -> Begun | None:
    """Finds the likeliest tokens that begin with the bytes that were taken back; the last of them may go on.

    The first pass computes the text itself, the others one of its ways each, the likeliest first. What is not computed
    counts as if it went on otherwise, so that the probability is a lower bound. Returns None if none has at least
    `min_probability`. `next_probabilities` returns those after the head and each of the last `count - 1` of these
    tokens, on the host: fp32 [count, vocabulary].
    """
    computed = next_probabilities(taken.tokens, len(taken.tokens) + 1)
    known = {tuple(taken.tokens[:size]): found_V for size, found_V in enumerate(computed)}
    if not taken.beginning:
        return Begun([], 1.0, known[()])
    open_ways, all_found, best, num_passes = {(): 1.0}, 0.0, (0.0, ()), 1
    while open_ways:
        way = max(open_ways, key=open_ways.__getitem__)
        if way not in known:
            if num_passes == max_passes:
                break
            known[way] = next_probabilities(list(way), 1)[0]
            num_passes += 1
        before, following_V = open_ways.pop(way), known[way]
        open_ways |= {longer: before * float(following_V[longer[-1]]) for longer in taken.ways if longer[:-1] == way}
        if ending := vocabulary.beginning_with(taken.beginning[len(vocabulary.joined(way)) :]):
            probabilities = following_V[ending].double()
            all_found += before * float(probabilities.sum())
            highest, at = probabilities.max(dim=0)
            best = max(best, (before * float(highest), (*way, ending[at])))
        likeliest = max(open_ways.values(), default=0.0)
        if best[0] >= likeliest and sum(open_ways.values()) <= _NEGLIGIBLE * all_found:
            break
        at_most = max(best[0] / (all_found or 1), likeliest / ((all_found + likeliest) or 1))
        if at_most < min_probability:
            return None
    at_least = best[0] / ((all_found + sum(open_ways.values())) or 1)
    if not best[1] or at_least < min_probability:
        return None
    return Begun(list(best[1]), at_least, known.get(best[1]))


class _Words:
    """Collects the words that the model is sure of, token by token."""

    def __init__(
        self, taken: Taken, begun: Begun, vocabulary: Vocabulary, min_probability: float, on_text: Callable[[str], None]
    ):
        self._vocabulary, self._min_probability, self._on_text = vocabulary, min_probability, on_text
        self._probability = begun.probability  # of all tokens
        self._num_tokens, self._text, self._shown = 0, "", ""
        self._characters = codecs.getincrementaldecoder("utf-8")()
        self.completion, self.has_ended = Completion(), False
        self._add(begun.tokens, (vocabulary.joined(begun.tokens) or b"")[len(taken.beginning) :])

    def next(self, probabilities_V: Tensor) -> int | None:
        """Returns the likeliest token; None if the text ends before it."""
        is_within_character = self._characters.getstate()[0] != b""
        if self._text and not is_within_character and not self._text[-1].isspace():
            going_on = float(probabilities_V @ self._vocabulary.going_on_after(self._text[-1]))
            self._show(self._text, self._probability * min(1.0, max(0.0, 1 - going_on)))
        highest, token = probabilities_V.max(dim=0)
        self._probability *= float(highest)
        new = self._vocabulary[int(token)]
        is_sentence = new is not None and new[:1].isspace() and _SENTENCE.search(self._text)
        if new is None or is_sentence or self._probability < self._min_probability:
            self.has_ended = True
        else:
            self._add([int(token)], new)
        return None if self.has_ended else int(token)

    def _add(self, tokens: list[int], new: bytes) -> None:
        self._num_tokens += len(tokens)
        try:
            following = self._characters.decode(new)
        except UnicodeDecodeError:
            self.has_ended = True
            return
        before, self._text = self._text, self._text + following
        if end := _END.search(self._text):
            self.has_ended = True
            self._show(self._text[: end.start()].rstrip(), self._probability)
        # Only now is it known that the word has ended if the character came in parts.
        elif before and following and not before[-1].isspace() and not goes_on(before[-1], following[0]):
            self._show(before, self._probability)

    def _show(self, text: str, probability: float) -> None:
        """Shows a text that ends with a word, if the model is sure of it."""
        word = text[len(self._shown) :]
        if word and probability >= self._min_probability:
            self._shown = text
            words, probabilities = self.completion.words, self.completion.probabilities
            self.completion = Completion((*words, word), (*probabilities, probability), self._num_tokens)
            self._on_text(word)
