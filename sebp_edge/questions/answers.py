"""Decides whether a reply gives an answer."""

import re
import unicodedata
from dataclasses import dataclass

# A reply that goes on may name anything; only its beginning counts.
MAX_WORDS = 40
_WORD = re.compile(r"\w+", re.UNICODE)


@dataclass(frozen=True)
class Answered:
    """A question of the quiz, its answer, and the reply of the trained model; all are the user's text."""

    question: str
    answer: str
    reply: str
    right: bool


def is_right(reply: str, answer: str) -> bool:
    """Whether the words of the answer stand in the reply, in order and side by side.

    Letters' case and punctuation do not matter. Only the first 40 words of the reply count.
    """
    given, expected = plain_words(reply)[:MAX_WORDS], plain_words(answer)
    size = len(expected)
    return size > 0 and any(given[begin : begin + size] == expected for begin in range(len(given) - size + 1))


def plain_words(text: str) -> list[str]:
    """Returns the words of a text, without case and punctuation."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
