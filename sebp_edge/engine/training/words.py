"""Counts, from the logits of a test, the words that a model guesses and the keystrokes that ghost text saves.

Words are guessed once the space before them is typed. Keystrokes are saved after each key (see `keystrokes`).

Shapes: C loss rows, F columns of what is read, K known tokens, V vocabulary, W tokens that begin with the same bytes.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from sebp_edge.engine.models.vocabulary import Vocabulary, goes_on
from sebp_edge.engine.sparse.rows.row_plan import IGNORE
from sebp_edge.engine.training.keystrokes import MOST_BYTES, TypedToken, num_characters, type_tokens
from sebp_edge.ops import precise_sums
from sebp_edge.values.example import Example

# The most rows whose probabilities exist at once.
_ROWS = 512
# The most probabilities that are copied at once, so that a large vocabulary takes no memory that a plan leaves out.
_WINDOW = 2**20


class WordCounts(NamedTuple):
    """What is counted in a text."""

    characters: int  # all of it, each a keystroke
    saved: int  # the keystrokes that ghost text would have saved
    words: int  # those that follow a space
    guessed: int  # how many of them are the likeliest ones, once the space is typed


class _Token(NamedTuple):
    """A token as a part of a text."""

    begins_word: bool  # whether it is a space and the beginning of a word
    goes_on: bool  # whether it goes on with a word
    is_whole: bool  # whether all of it is within one word, but for the space
    ends_in_word: bool  # whether its last character is within a word
    ends_in_space: bool  # whether its last character is a space, or the end of a line
    bytes: bytes  # empty for a control token


class WordReader:
    """Reads the words of examples from the logits of their loss rows."""

    def __init__(self, vocabulary: Vocabulary, device: torch.device):
        self._vocabulary, self._goes_on = vocabulary, vocabulary.going_on_after("a").tolist()
        spaces_V = torch.zeros(len(self._goes_on))
        spaces_V[vocabulary.beginning_with(b" ")] = 1
        self._weights_V2 = torch.stack([vocabulary.going_on_after("a"), spaces_V], dim=1).to(device)
        order_K, begins_VF, counts_VF = vocabulary.beginnings(MOST_BYTES)
        # Half of all tokens may begin with a space: these are read at once.
        counts_VF[spaces_V > 0, 0] = 0
        self._widths = counts_VF.amax(dim=0).clamp(min=1).tolist()
        sizes_V = torch.tensor([len(vocabulary[token] or b"") for token in range(len(spaces_V))])
        self._beginnings = [each.to(device) for each in (order_K, begins_VF, counts_VF)]
        self._sizes_V = sizes_V.to(device)
        self._known: dict[int, _Token] = {}

    @precise_sums()
    def read(self, logits: Iterable[Tensor], targets_C: Tensor) -> Tensor:
        """Returns what the logits of each loss row say, fp32 [C, F].

        The columns are the loss in nats; whether the label is the likeliest token, and the likeliest of those that
        begin with a space; whether the likeliest token goes on with a word; the probability of all that do, and that of
        the likeliest; and the shares and the tops of a `TypedToken`.

        Args:
            logits: of some loss rows at a time, one after another: fp32 [c, V].
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
        highest_c, own_c = (probabilities_cV.gather(1, each[:, None]).squeeze(1) for each in (likeliest_c, targets_c))
        typed = [self._read_typed(probabilities_cV, targets_c, own_c, at) for at in range(MOST_BYTES)]
        highest_of_words_c, of_words_c = probabilities_cV.mul_(self._weights_V2[:, 1]).max(dim=1)
        own_2c = self._shares(own_c, sums_c2[:, 1], highest_of_words_c, of_words_c, 1)
        typed[0] = torch.where(self._weights_V2[targets_c, 1] > 0, own_2c, typed[0])
        goes_on_c = self._weights_V2[likeliest_c, 0]
        found = (losses_c, likeliest_c == targets_c, of_words_c == targets_c, goes_on_c, sums_c2[:, 0], highest_c)
        typed_c16 = torch.stack(typed, dim=1).flatten(end_dim=1).T
        return torch.cat([torch.stack([each.float() for each in found], dim=1), typed_c16], dim=1)

    def _read_typed(self, probabilities_cV: Tensor, targets_c: Tensor, own_c: Tensor, at: int) -> Tensor:
        """Returns the share and the top of each label once its first `at` + 1 bytes are typed, fp32 [2, c].

        See `TypedToken`; the other tokens are those that begin with these bytes.
        """
        order_K, begins_VF, counts_VF = self._beginnings
        places_W, found = torch.arange(self._widths[at], device=order_K.device), []
        size = max(1, _WINDOW // len(places_W))
        for begin in range(0, max(1, len(targets_c)), size):
            part = slice(begin, begin + size)
            begins_c, counts_c = begins_VF[targets_c[part], at], counts_VF[targets_c[part], at]
            places_cW = (begins_c[:, None] + places_W).clamp_(max=len(order_K) - 1)
            found_cW = probabilities_cV[part].gather(1, order_K[places_cW])
            found_cW.masked_fill_(places_W >= counts_c[:, None], 0)
            top_c, which_c = found_cW.max(dim=1)
            found.append(self._shares(own_c[part], found_cW.sum(dim=1), top_c, order_K[begins_c + which_c], at + 1))
        return torch.cat(found, dim=1)

    def _shares(self, own_c: Tensor, total_c: Tensor, top_c: Tensor, tokens_c: Tensor, typed: int) -> Tensor:
        """Returns the share of each label, and that of the likeliest token; negative if that has no more bytes."""
        total_c = total_c.clamp(min=torch.finfo(torch.float32).tiny)
        return torch.stack([own_c, torch.where(self._sizes_V[tokens_c] > typed, top_c, -top_c)]) / total_c

    def count(self, example: Example, rows_CF: Tensor, in_boilerplate: bytes) -> WordCounts:
        """Counts the words of an example, without boilerplate.

        Args:
            rows_CF: what was read of its loss rows.
            in_boilerplate: see `Outline.boilerplate`.
        """
        rows, flags = iter(rows_CF.tolist()), iter(in_boilerplate or bytes(len(rows_CF)))
        characters = words = guessed = 0
        parts: list[list[TypedToken]] = [[]]
        is_word = is_guessed = False
        for before, label in zip(example.input_ids, example.labels[1:], strict=False):
            if label == IGNORE:  # nothing tells whether the model ended the word
                is_word = False
                parts.append([])
                continue
            row, is_boilerplate, token = next(rows), next(flags), self._token(label)
            _, is_likeliest, is_likeliest_of_words, likeliest_goes_on, *_ = row
            parts.append([]) if is_boilerplate else parts[-1].append(self.typed(label, row))
            characters += 0 if is_boilerplate else num_characters(token.bytes)
            if is_word and token.goes_on:
                is_guessed = is_guessed and token.is_whole and is_likeliest == 1
                continue
            guessed += is_word and is_guessed and likeliest_goes_on == 0
            is_word = token.begins_word and not is_boilerplate and not self._token(before).ends_in_space
            words += is_word
            is_guessed = token.is_whole and is_likeliest_of_words == 1
        return WordCounts(characters, sum(type_tokens(part).saved for part in parts), words, guessed)

    def typed(self, label: int, row: Sequence[float]) -> TypedToken:
        """Returns a label's token, as it is typed, from what was read of its row."""
        token, (_, is_likeliest, _, _, going_on, highest, *typed) = self._token(label), row
        return TypedToken(
            bytes=token.bytes,
            goes_on=token.goes_on,
            ends_in_word=token.ends_in_word,
            is_likeliest=is_likeliest == 1,
            highest=highest,
            going_on=going_on,
            shares=typed[:MOST_BYTES],
            tops=typed[MOST_BYTES:],
        )

    def _token(self, number: int) -> _Token:
        if number not in self._known:
            self._known[number] = self._describe(number)
        return self._known[number]

    def _describe(self, number: int) -> _Token:
        found = self._vocabulary[number]
        if found is None:
            return _Token(False, False, False, False, False, b"")
        text = found.decode(errors="ignore")
        word = text.removeprefix(" ")
        is_spaced = text != word and word != "" and goes_on("a", word[0])
        return _Token(
            begins_word=is_spaced,
            goes_on=self._goes_on[number] == 1,
            is_whole=all(map(goes_on, word, word[1:])),
            ends_in_word=text != "" and goes_on("a", text[-1]),
            ends_in_space=text[-1:].isspace(),
            bytes=found,
        )
