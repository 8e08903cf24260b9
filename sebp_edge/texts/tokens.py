"""A text of any length becomes tokens, in windows: tokenised at once, a long text takes 200 times its size.

Windows overlap, and two of them are joined only where they agree on the tokens before and after the joint and on the
words that these begin. There both are cut into words alike, and no merge crosses the joint in either, so none does in
the whole text: the tokens are those of the text tokenised at once. Windows that agree nowhere become one longer window.
"""

import math
import operator
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

# Characters of a window, and those that it shares with the next one.
WINDOW, OVERLAP = 100_000, 2_000
# Tokens that two windows agree on where they are joined, half of them before the joint and half behind it.
AGREED = 16

Span = tuple[int, int]


@dataclass(frozen=True)
class Tokenised:
    """A whole rendered text as tokens.

    Attributes:
        ids: each token's id.
        starts: the character where each begins.
        learnt: 1 for each that is learnt, else 0.
    """

    text: str
    ids: array
    starts: array
    learnt: bytearray

    def append(self, token_id: int) -> None:
        """Adds a learnt token behind the text."""
        self.ids.append(token_id)
        self.starts.append(len(self.text))
        self.learnt.append(1)


def tokenise(text: str, spans: list[Span], tokenizer, *, split_special_tokens: bool) -> Tokenised:
    """Tokenises `text`; a token that overlaps one of the spans is learnt.

    Args:
        spans: of characters, as [begin, end).
        tokenizer: a fast transformers tokenizer.
        split_special_tokens: read a special token that the text spells out as plain text.
    """
    marked = bytearray(len(text))
    for begin, end in spans:
        marked[begin:end] = b"\1" * (end - begin)
    tokenised = Tokenised(text, array("i"), array("q"), bytearray())
    covered = 0
    for token_id, start, end, _ in _tokens(text, tokenizer, split_special_tokens):
        # Some tokenizers' offsets leave out blanks: each belongs to the token that follows or is it.
        start = min(start, covered)
        covered = max(covered, end)
        tokenised.ids.append(token_id)
        tokenised.starts.append(start)
        tokenised.learnt.append(1 in marked[start:end])
    return tokenised


# A token's id, its characters as [start, end), and whether it begins a word: one of the pieces that a tokenizer cuts a
# text into first. Tokenizers that group digits by three do so from a number's beginning.
_Token = tuple[int, int, int, bool]


def _tokens(text: str, tokenizer, split_special_tokens: bool) -> Iterator[_Token]:
    def window(begin: int, end: int) -> list[_Token]:
        encoding = tokenizer(
            text[begin:end],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            split_special_tokens=split_special_tokens,
            verbose=False,
        )
        words = encoding.word_ids()
        begins = map(operator.ne, words, [None, *words])
        parts = zip(encoding["input_ids"], encoding["offset_mapping"], begins, strict=True)
        return [(token_id, begin + start, begin + end, begins_word) for token_id, (start, end), begins_word in parts]

    begin, end, done = 0, WINDOW, 0
    tokens = window(begin, end)
    while end < len(text):
        following = window(end - OVERLAP, end - OVERLAP + WINDOW)
        joint = _joint(tokens, following)
        if joint is None:
            end += end - begin
            tokens = window(begin, end)
        else:
            yield from (token for token in tokens if done <= token[1] < joint)
            begin, end, done = end - OVERLAP, end - OVERLAP + WINDOW, joint
            tokens = following
    yield from (token for token in tokens if done <= token[1])


def _joint(left: list[_Token], right: list[_Token]) -> int | None:
    """The character that begins a token in both windows, amid tokens that are in both; None if there is none."""
    shared = right[0][1] if right else math.inf
    places = {token: place for place, token in enumerate(left) if token[1] >= shared}
    for here in range(len(right) - AGREED):
        there = places.get(right[here])
        if there is None or left[there : there + AGREED] != right[here : here + AGREED]:
            continue
        (_, start, end, _), (_, joint, _, _) = right[here + AGREED // 2 - 1 : here + AGREED // 2 + 1]
        # Not inside of a character that takes several tokens.
        if start < joint and end <= joint:
            return joint
    return None
