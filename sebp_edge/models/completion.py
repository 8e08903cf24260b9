"""Completes a text with the words that a model is sure of: ghost text in an editor.

What is typed last is rarely the end of a token: "the ferr" is not how "the ferry" begins. So its last word is taken
back, and the model chooses among the tokens that begin with it, token healing (Lundberg 2023). The word's beginning may
itself take several tokens, with the last one going on: each of these ways is compared with the others by its
probability, as Phan et al. (2024, "Exact Byte-Level Probabilities from Tokenized Language Models") do.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from sebp_edge.models.decoding import Decoder
from sebp_edge.models.sampling import Sampling, check_number
from sebp_edge.models.vocabulary import Vocabulary

# What is taken back: the last word and a character before it, or the last signs, or the last spaces.
_LAST = re.compile(r"(?:[^\w\n]?\w{1,16}|[^\S\n]?[^\w\s]{1,16}|\s{1,16})\Z")
_LONGEST = 17
# At most so many ways to begin the taken-back word are computed, the likeliest first; each takes one pass.
_MAX_PASSES = 4
_SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]]*\Z|[。！？]\Z")


@dataclass(frozen=True)
class Completion:
    """How a text goes on.

    Attributes:
        words: the next words, each with the spaces and signs before it; together they follow the text.
        probabilities: for each word, the probability that the text goes on with it and those before it, and that it
            ends there. By the model, and a lower bound where the text ends within a word.
        num_tokens: how many tokens the words have, with those of the word that they complete.
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
    encode: Callable[[str], list[int]],
    before: str,
    max_new_tokens: int,
    min_probability: float,
    *,
    on_text: Callable[[str], None] | None = None,
    check: Callable[[], None] = lambda: None,
) -> Completion:
    """Returns the likeliest next words of a line, as many as have at least a probability together.

    They end with their sentence or line.

    Args:
        decoder: of the model; what it keeps of the last call is not computed again.
        encode: encodes a text as in training, with BOS if there is one.
        before: the text before the words.
        max_new_tokens: the most tokens to compute, those of the last word's end included.
        on_text: receives each word as soon as the model is sure of it.
        check: is called after each token; may raise to end the call.

    Raises:
        OptionError: an option is out of its range.
        TextsError, ModelError, NonFiniteLogits: see `Decoder.decode`.
    """
    sampling = Sampling(max_new_tokens, temperature=0)
    check_number("min_probability", min_probability, 0, 1, "a number from 0 to 1")
    taken = _take_back(before, encode, vocabulary)
    if not taken.head:
        return Completion()  # without BOS, nothing comes before the first token
    search = _Search(taken, vocabulary, min_probability)
    words = _Words(before, vocabulary, min_probability, on_text or (lambda text: None))

    def choose(tokens: list[int], logits_1V: Tensor) -> int | None:
        probabilities_V = logits_1V[0].softmax(dim=0).cpu()
        if words.is_begun:
            return words.next(probabilities_V)
        token = search.next(probabilities_V)
        if token is not None:
            words.begin(search.path + [token], len(taken.beginning), search.probability)
        return token

    if not taken.beginning:
        words.begin([], 0, 1.0)
    while search.path is not None and not words.is_ended:
        decoder.decode([taken.head + search.path], [], sampling, choose=choose, check=check)
    return words.completion
