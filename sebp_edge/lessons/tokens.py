"""Tokenises texts of any length in windows, since tokenising a long text at once takes 200 times its size in memory.

Windows overlap. Two windows are joined only where they agree on the tokens before and after the joint, and on which of
these begin a word. There both windows have the same words, and no merge crosses the joint in either, so none crosses it
in the whole text, and the tokens are those of the text tokenised at once. If two windows agree nowhere, the first one
is extended, up to a limit.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from sebp_edge.values.documents import Unreadable
from sebp_edge.values.preparation_progress import SILENT, Progress

# Number of characters of a window, of those that it shares with the next one, and of the longest window.
WINDOW, OVERLAP, MAX_WINDOW = 100_000, 2_000, 400_000
# Number of tokens that two windows must agree on at a joint, half of them before it and half after it.
MIN_AGREEING = 16

Span = tuple[int, int]


class Spans:
    """Character spans of a text, as [begin, end), which tell the tokens in them."""

    def __init__(self, spans: list[Span]):
        found = np.array(sorted(span for span in spans if span[0] < span[1]), np.int64).reshape(-1, 2)
        self._begins, self._ends = found[:, 0], np.append(0, np.maximum.accumulate(found[:, 1]))

    def __len__(self) -> int:
        return len(self._begins)

    def overlap(self, starts: np.ndarray, ends: np.ndarray) -> bytes:
        """Returns 1 for each token with characters in one of the spans, else 0."""
        begun = np.searchsorted(self._begins, ends)
        return ((self._ends[begun] > starts) & (starts < ends)).tobytes()


@dataclass(frozen=True)
class Tokenised:
    """Consecutive tokens of a text.

    Attributes:
        ids: the token ids.
        starts: the index of each token's first character in the text.
        loss_mask: 1 for each token with loss, else 0.
    """

    text: str
    ids: array
    starts: array
    loss_mask: bytearray

    def extend(self, other: "Tokenised") -> None:
        """Appends the tokens that follow."""
        self.ids.extend(other.ids)
        self.starts.extend(other.starts)
        self.loss_mask.extend(other.loss_mask)

    def drop(self, number: int) -> None:
        """Removes the first tokens."""
        del self.ids[:number], self.starts[:number], self.loss_mask[:number]


def tokenise(
    text: str,
    spans: list[Span],
    tokenizer,
    *,
    split_special_tokens: bool,
    progress: Progress = SILENT,
) -> Iterator[Tokenised]:
    """Yields the tokens of `text`, a window at a time; tokens that overlap one of the spans have loss.

    Args:
        spans: character spans, as [begin, end).
        tokenizer: a fast transformers tokenizer.
        split_special_tokens: whether to treat special tokens in the text as plain text.
        progress: is told how many characters of each window are done.
    """
    with_loss, covered = Spans(spans), 0
    for window in _windows(text, tokenizer, split_special_tokens):
        # Some tokenizers' offsets omit whitespace, which belongs to the next token or is that token.
        reached = np.maximum.accumulate(np.append(covered, window.ends))
        starts, done = np.minimum(window.starts, reached[:-1]), int(reached[-1])
        loss_mask = bytearray(with_loss.overlap(starts, window.ends))
        yield Tokenised(text, array("i", window.ids.tobytes()), array("q", starts.tobytes()), loss_mask)
        progress.advance(done - covered)
        covered = done
    progress.advance(len(text) - covered)


@dataclass(frozen=True)
class _Window:
    """The tokens of a part of a text, as arrays.

    Attributes:
        ids: int32, the token ids.
        starts, ends: int64, each token's characters in the text, as [start, end).
        begins_word: whether it begins a word of the pre-tokenizer. This matters since some tokenizers group digits by
            three from the start of a number.
    """

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    begins_word: np.ndarray

    def select(self, mask: np.ndarray) -> "_Window":
        return _Window(self.ids[mask], self.starts[mask], self.ends[mask], self.begins_word[mask])

    def tokens(self) -> list[tuple]:
        columns = (self.ids, self.starts, self.ends, self.begins_word)
        return list(zip(*(column.tolist() for column in columns), strict=True))


def _windows(text: str, tokenizer, split_special_tokens: bool) -> Iterator[_Window]:
    """Yields the tokens of the text in order, as parts of windows."""

    def window(begin: int, end: int) -> _Window:
        encoding = tokenizer(
            text[begin:end],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            split_special_tokens=split_special_tokens,
            verbose=False,
        )
        offsets = np.fromiter(chain.from_iterable(encoding["offset_mapping"]), np.int64).reshape(-1, 2) + begin
        words = np.array([-1 if word is None else word for word in encoding.word_ids()], np.int64)
        begins_word = np.append(words[:1] >= 0, words[1:] != words[:-1])
        return _Window(np.array(encoding["input_ids"], np.int32), offsets[:, 0], offsets[:, 1], begins_word)

    begin, end, done = 0, WINDOW, 0
    tokens = window(begin, end)
    while end < len(text):
        following = window(end - OVERLAP, end - OVERLAP + WINDOW)
        joint = _joint(tokens, following)
        if joint is None:
            if end - begin >= MAX_WINDOW:
                raise Unreadable(
                    f"the tokenizer finds no boundary within {MAX_WINDOW:,} characters; break it into lines to use it"
                )
            end += end - begin
            tokens = window(begin, end)
        else:
            yield tokens.select((done <= tokens.starts) & (tokens.starts < joint))
            begin, end, done = end - OVERLAP, end - OVERLAP + WINDOW, joint
            tokens = following
    yield tokens.select(done <= tokens.starts)


def _joint(left: _Window, right: _Window) -> int | None:
    """Returns the first character that begins a token in both windows among tokens that agree, or None."""
    if not (len(left.ids) and len(right.ids)):
        return None
    # Only where the windows overlap.
    left_tokens = left.select(left.starts >= right.starts[0]).tokens()
    right_tokens = right.select(right.starts <= left.starts.max()).tokens()
    positions = {token: position for position, token in enumerate(left_tokens)}
    for right_index in range(len(right_tokens) - MIN_AGREEING + 1):
        left_index = positions.get(right_tokens[right_index])
        agreeing = right_tokens[right_index : right_index + MIN_AGREEING]
        if left_index is None or left_tokens[left_index : left_index + MIN_AGREEING] != agreeing:
            continue
        (_, start, end, _), (_, joint, _, _) = agreeing[MIN_AGREEING // 2 - 1 : MIN_AGREEING // 2 + 1]
        # A joint must not be inside a character of several tokens.
        if start < joint and end <= joint:
            return joint
    return None
