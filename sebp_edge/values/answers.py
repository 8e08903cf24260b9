"""The answers of a quiz: its figures, and whether a reply gives an answer."""

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

# A reply that goes on may name anything; only its beginning counts.
MAX_WORDS = 40
_WORD = re.compile(r"\w+", re.UNICODE)


@dataclass(frozen=True)
class Answered:
    """A question of the quiz, its answer, and the trained model's reply."""

    question: str
    answer: str
    reply: str
    right: bool


@dataclass(frozen=True)
class QuizFigures:
    """The figures of a quiz, without text.

    Attributes:
        questions: how many were asked about notes.
        right_before, right_after: how many of them the base model and the adapter answered right below the passage
            that the search finds.
        right_active: the same of the version that was active before; None without one.
        right_passage_before, right_passage_after: below the passage with the answer.
        alone_before, alone_after: without a passage; only practice notes are asked about so.
        refused, rightly_refused: how many the search refuses, and how many it would refuse without their notes.
        general_questions, general_before, general_after: the same of general questions.
    """

    questions: int
    right_before: int
    right_after: int
    right_passage_before: int
    right_passage_after: int
    alone_before: int
    alone_after: int
    refused: int
    rightly_refused: int
    general_questions: int
    general_before: int
    general_after: int
    right_active: int | None = None


def is_right(reply: str, answers: Iterable[str]) -> bool:
    """Whether the words of one of the answers stand in the first 40 words of the reply, in order and side by side.

    Letters' case and punctuation do not matter.
    """
    given = _words(reply)[:MAX_WORDS]
    return any(_holds(given, _words(answer)) for answer in answers)


def stands_in(answer: str, text: str) -> bool:
    """Whether the words of an answer stand in a text, as in `is_right`."""
    return _holds(_words(text), _words(answer))


def _holds(words: list[str], part: list[str]) -> bool:
    size = len(part)
    return size > 0 and any(words[begin : begin + size] == part for begin in range(len(words) - size + 1))


def _words(text: str) -> list[str]:
    """Returns the words of a text, without case and punctuation."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
