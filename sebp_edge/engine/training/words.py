"""Counts, from the logits of a test, the words that a model guesses and the keystrokes that ghost text saves.

Once the owner has typed a space, ghost text shows the next word, and one key accepts it: the words that
`Personalizer.complete` shows there. What it completes within a word takes other passes, and is left out, as are words
that follow no space, and those in tokens with a sign; so the keystrokes are a lower bound.

Shapes: C loss rows, V vocabulary.
"""

import math
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from sebp_edge.engine.models.vocabulary import Vocabulary, goes_on
from sebp_edge.engine.sparse.rows.row_plan import IGNORE
from sebp_edge.ops import precise_sums
from sebp_edge.values.example import Example

# Ghost text is shown from this probability on, as by default in `Personalizer.complete`.
MIN_PROBABILITY = 0.5
# The most rows whose probabilities exist at once.
_ROWS = 512


class WordCounts(NamedTuple):
    """What is counted in a text.

    Attributes:
        characters: all of it, each a keystroke.
        saved: the keystrokes that ghost text would have saved.
        words: those that follow a space.
        guessed: how many of them are the likeliest ones, once the space is typed.
    """

    characters: int
    saved: int
    words: int
    guessed: int


class _Row(NamedTuple):
    """What the logits of a loss row say.

    Attributes:
        loss: of the label, in nats.
        is_likeliest, is_likeliest_of_words: whether the label is the likeliest token, and the likeliest of those that
            begin with a space.
        likeliest_goes_on: whether the likeliest token goes on with a word.
        going_on, spaces: the probability of the tokens that do, and of those that begin with a space.
    """

    loss: float
    is_likeliest: float
    is_likeliest_of_words: float
    likeliest_goes_on: float
    going_on: float
    spaces: float


class _Token(NamedTuple):
    """A token as a part of a text.

    Attributes:
        characters: how many characters begin in it.
        begins_word: whether it is a space and the beginning of a word.
        goes_on: whether it goes on with a word.
        is_whole: whether all of it is within one word, but for the space.
        ends_in_space: whether its last character is a space, or the end of a line.
    """

    characters: int
    begins_word: bool
    goes_on: bool
    is_whole: bool
    ends_in_space: bool


class WordReader:
    """Reads the words of examples from the logits of their loss rows.

    Args:
        device: the model's.
    """

    def __init__(self, vocabulary: Vocabulary, device: torch.device):
        self._vocabulary, self._goes_on = vocabulary, vocabulary.going_on_after("a").tolist()
        spaces_V = torch.zeros(len(self._goes_on))
        spaces_V[vocabulary.beginning_with(b" ")] = 1
        self._weights_V2 = torch.stack([vocabulary.going_on_after("a"), spaces_V], dim=1).to(device)
        self._known: dict[int, _Token] = {}

    @precise_sums()
    def read(self, logits: Iterable[Tensor], targets_C: Tensor) -> Tensor:
        """Returns the values of each `_Row`, fp32 [C, 6]; its loss is in the first column.

        Args:
            logits: of some loss rows at a time, one after another: fp32 [c, V].
            targets_C: the labels of all loss rows.
        """
        rows, begin = [], 0
        # A padded batch's logits are all there at once; their probabilities need not be.
        for logits_cV in chain.from_iterable(each.split(_ROWS) for each in logits):
            targets_c = targets_C[begin : begin + len(logits_cV)]
            rows.append(self._read(logits_cV, targets_c))
            begin += len(logits_cV)
        return torch.cat(rows)

    def _read(self, logits_cV: Tensor, targets_c: Tensor) -> Tensor:
        likeliest_c = logits_cV.argmax(dim=1)
        logs_cV = logits_cV.log_softmax(dim=1)
        losses_c = -logs_cV.gather(1, targets_c[:, None]).squeeze(1)
        probabilities_cV = logs_cV.exp_()
        sums_c2 = probabilities_cV @ self._weights_V2
        of_words_c = probabilities_cV.mul_(self._weights_V2[:, 1]).argmax(dim=1)
        goes_on_c = self._weights_V2[likeliest_c, 0]
        found = (losses_c, likeliest_c == targets_c, of_words_c == targets_c, goes_on_c, *sums_c2.unbind(dim=1))
        return torch.stack([each.float() for each in found], dim=1)

    def count(self, example: Example, rows_C6: Tensor, in_boilerplate: bytes) -> WordCounts:
        """Counts the words of an example, without boilerplate.

        Args:
            rows_C6: what was read of its loss rows.
            in_boilerplate: see `Outline.boilerplate`.
        """
        rows = map(_Row._make, rows_C6.tolist())
        flags = iter(in_boilerplate or bytes(len(rows_C6)))
        characters = saved = words = guessed = 0
        # Of the word so far: its characters, its probability, and whether it is guessed.
        size, probability, is_guessed = 0, 0.0, False
        for before, label in zip(example.input_ids, example.labels[1:], strict=False):
            if label == IGNORE:  # nothing tells whether the model ended the word
                size = 0
                continue
            row, is_boilerplate, token = next(rows), next(flags), self._token(label)
            characters += 0 if is_boilerplate else token.characters
            share = math.exp(-row.loss)
            if size and token.goes_on:
                size += token.characters
                probability *= share if token.is_whole else 0.0
                is_guessed = is_guessed and token.is_whole and row.is_likeliest == 1
                continue
            if size:
                guessed += is_guessed and row.likeliest_goes_on == 0
                saved += size - 1 if probability * (1 - row.going_on) >= MIN_PROBABILITY else 0
            size = 0
            if token.begins_word and not is_boilerplate and not self._token(before).ends_in_space:
                words += 1
                size, probability = token.characters - 1, 0.0
                if token.is_whole and share:
                    probability = share / max(row.spaces, share)
                is_guessed = token.is_whole and row.is_likeliest_of_words == 1
        return WordCounts(characters, saved, words, guessed)

    def _token(self, number: int) -> _Token:
        if number not in self._known:
            self._known[number] = self._describe(number)
        return self._known[number]

    def _describe(self, number: int) -> _Token:
        found = self._vocabulary[number]
        if found is None:
            return _Token(0, False, False, False, False)
        text = found.decode(errors="ignore")
        word = text.removeprefix(" ")
        is_spaced = text != word and word != "" and goes_on("a", word[0])
        return _Token(
            characters=sum(byte & 0xC0 != 0x80 for byte in found),
            begins_word=is_spaced,
            goes_on=self._goes_on[number] == 1,
            is_whole=all(map(goes_on, word, word[1:])),
            ends_in_space=text[-1:].isspace(),
        )
