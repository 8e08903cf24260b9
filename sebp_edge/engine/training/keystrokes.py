"""Types a text with ghost text, and counts the keystrokes that it saves.

After each key, `complete` takes back what is typed of a word and goes on with the likeliest tokens. While these are
those of the text, their logits are those of one pass over it. What would follow a wrong token is not known, so that
counts as shown; ways to cut a word into other tokens than the text's are left out.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

# As by default in `Personalizer.complete`; from it on, 7 of 10 first words are right (what-an-adaptation-gains.md).
MIN_PROBABILITY = 0.6
MOST_BYTES = 8  # of a token are told apart; what is known of more is what is known of these
_MAX_NEW_TOKENS = 16  # as by default in `Personalizer.complete`
_SENTENCE = re.compile(r"[.!?…][\"'”’)\]]*\Z")


class TypedToken(NamedTuple):
    """A token of a text, and what the model says in its place."""

    bytes: bytes  # empty for a control token
    # Whether it goes on with a word, and whether a letter after it would.
    goes_on: bool
    ends_in_word: bool
    is_likeliest: bool  # whether it is the likeliest token
    # The probability of the likeliest token, and of all that go on with a word.
    highest: float
    going_on: float
    # Once its first 1, 2, ... bytes are typed, its share of the probability of all tokens with them.
    shares: Sequence[float]
    tops: Sequence[float]  # the share of the likeliest of these; negative if that has no more bytes


class Keystrokes(NamedTuple):
    """What ghost text does while a text is typed."""

    # The keystrokes that a person saves who accepts what is right, by word or all of it, with a key each.
    saved: int = 0
    shown: int = 0  # how many suggestions appear; one that stays while more of it is typed is the same
    right: int = 0  # how many of them have a right first word


def type_tokens(tokens: Sequence[TypedToken], min_probability: float = MIN_PROBABILITY) -> Keystrokes:
    """Types consecutive tokens of a text, and accepts what saves keys."""
    saved = shown = right = at = typed = 0
    before = (-1, 0.0)
    while at < len(tokens):
        token, typed = tokens[at], typed + 1
        while typed < len(token.bytes) and token.bytes[typed] & 0xC0 == 0x80:  # within a character
            typed += 1
        if typed > len(token.bytes):
            at, typed = at + 1, 0
            continue
        share, top = (each[min(typed, MOST_BYTES) - 1] for each in (token.shares, token.tops))
        words, is_right = [], not top >= min_probability
        if share == abs(top):
            words, is_right = _suggest(tokens, at, typed, share, min_probability)
        # However much is typed of a token, the likeliest one has the same odds to it.
        found = (at, abs(top) / (share or 1)) if words or not is_right else (-1, 0.0)
        is_new = found[0] != before[0] or not math.isclose(found[1], before[1], rel_tol=1e-5)
        shown, right, before = shown + is_new * (found[0] >= 0), right + is_new * bool(words), found
        # One key accepts all of it.
        keys = [1] * len(words) if is_right else range(1, len(words) + 1)
        more, end = max(((word[0] - key, word[1]) for key, word in zip(keys, words, strict=True)), default=(0, at))
        if more > 0:
            saved, at, typed = saved + more, end, len(tokens[end].bytes) - 1
    return Keystrokes(saved, shown, right)


def _suggest(
    tokens: Sequence[TypedToken], at: int, typed: int, probability: float, min_probability: float
) -> tuple[list[tuple[int, int]], bool]:
    """Suggests what follows some bytes of a token of this probability, which is the likeliest that begins so.

    Returns the characters up to the end of each right word that is shown, and the token that it ends with; and whether
    nothing wrong is shown.
    """
    words, new, characters = [], tokens[at].bytes[typed:], 0
    for end in range(at, min(at + _MAX_NEW_TOKENS, len(tokens) - 1)):
        characters += num_characters(new)
        if not probability >= min_probability or b"\n" in new:
            break
        token, following, text = tokens[end], tokens[end + 1], new.decode(errors="ignore")
        ended = probability * (1 - following.going_on) if token.ends_in_word else probability
        if characters and not text[-1:].isspace() and ended >= min_probability:
            if following.goes_on and token.ends_in_word:
                return words, False
            words.append((characters, end))
        new = following.bytes
        if not new or (characters and new[:1].isspace() and _SENTENCE.search(text)):
            break
        probability *= following.highest
        if not following.is_likeliest:
            return words, not probability >= min_probability
    return words, True


def num_characters(found: bytes) -> int:
    """Returns how many characters begin in some bytes."""
    return sum(byte & 0xC0 != 0x80 for byte in found)
