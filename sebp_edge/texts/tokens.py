"""Tokenises texts of any length in windows, since tokenising a long text at once takes 200 times its size in memory.

Windows overlap. Two windows are joined only where they agree on the tokens before and after the joint, and on which of
these begin a word. There both windows have the same words, and no merge crosses the joint in either, so none crosses it
in the whole text, and the tokens are those of the text tokenised at once. If two windows agree nowhere, the first one
is extended.
"""

import math
import operator
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

# Number of characters of a window, and of those that it shares with the next one.
WINDOW, OVERLAP = 100_000, 2_000
# Number of tokens that two windows must agree on at a joint, half of them before it and half after it.
MIN_AGREEING = 16

Span = tuple[int, int]


@dataclass(frozen=True)
class Tokenised:
    """The tokens of a whole text.

    Attributes:
        ids: the token ids.
        starts: the index of each token's first character.
        loss_mask: 1 for each token with loss, else 0.
    """

    text: str
    ids: array
    starts: array
    loss_mask: bytearray

    def append(self, token_id: int) -> None:
        """Appends a token with loss, which starts at the end of the text."""
        self.ids.append(token_id)
        self.starts.append(len(self.text))
        self.loss_mask.append(1)


def tokenise(text: str, spans: list[Span], tokenizer, *, split_special_tokens: bool) -> Tokenised:
    """Tokenises `text`; tokens that overlap one of the spans have loss.

    Args:
        spans: character spans, as [begin, end).
        tokenizer: a fast transformers tokenizer.
        split_special_tokens: whether to treat special tokens in the text as plain text.
    """
    marked = bytearray(len(text))
    for begin, end in spans:
        marked[begin:end] = b"\1" * (end - begin)
    tokenised = Tokenised(text, array("i"), array("q"), bytearray())
    covered = 0
    for token_id, start, end, _ in _tokens(text, tokenizer, split_special_tokens):
        # Some tokenizers' offsets omit whitespace, which belongs to the next token or is that token.
        start = min(start, covered)
        covered = max(covered, end)
        tokenised.ids.append(token_id)
        tokenised.starts.append(start)
        tokenised.loss_mask.append(1 in marked[start:end])
    return tokenised


# A token's id, its characters as [start, end), and whether it begins a word of the pre-tokenizer. Word starts matter
# since some tokenizers group digits by three from the start of a number.
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
    """Returns the first character that begins a token in both windows among tokens that agree, or None."""
    shared = right[0][1] if right else math.inf
    positions = {token: position for position, token in enumerate(left) if token[1] >= shared}
    for right_index in range(len(right) - MIN_AGREEING):
        left_index = positions.get(right[right_index])
        agreeing = right[right_index : right_index + MIN_AGREEING]
        if left_index is None or left[left_index : left_index + MIN_AGREEING] != agreeing:
            continue
        (_, start, end, _), (_, joint, _, _) = agreeing[MIN_AGREEING // 2 - 1 : MIN_AGREEING // 2 + 1]
        # A joint must not be inside a character of several tokens.
        if start < joint and end <= joint:
            return joint
    return None
