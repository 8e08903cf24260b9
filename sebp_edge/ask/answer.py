"""What a question is answered with: the reply, whether it stands in the passages, and else a quotation."""

import re
from dataclasses import dataclass

from sebp_edge.ask.index import Hit
from sebp_edge.ask.passages import Passage
from sebp_edge.ask.terms import is_small, plain, terms
from sebp_edge.ask.values import values

NOT_FOUND = "Not in your notes."
# The passages that a model is shown. The first is the right one nearly always, and small models read one better than
# three (kernels/bench/quality/README.md).
NUM_PASSAGES = 1

# Below both, nothing was found (see `Hit`). Calibrated so that at most 10 % of the questions that the development
# people's 60 notes answer are refused.
MIN_STRENGTH, MIN_COVERAGE = 2.4, 0.6
# The least share of a reply's words, those of the question aside, that the passages must have.
MIN_SUPPORT = 0.6
# A value that is there may have so many words around it that are not, such as "number".
FEW_WORDS = 2

_SENTENCE_END = re.compile(r"(?<=[.!?])[\"”’)]?\s+(?=\W*[^\W_a-z])|(?<=[。！？])|\n+")


@dataclass(frozen=True)
class Answer:
    """An answer. The text and the sources are the user's: for the screen, never for logs.

    Attributes:
        text: the reply or the quotation; "Not in your notes." if nothing was found.
        found: whether the documents have passages that the question is about.
        quoted: whether `text` is a sentence of the first source, since the model's reply did not stand in the sources.
        sources: the passages that the model was shown, the best one first: document, headings, line, text.
    """

    text: str
    found: bool
    quoted: bool = False
    sources: tuple[Passage, ...] = ()


def is_found(hits: list[Hit]) -> bool:
    """Whether the best passage is about the question, rather than one that shares words with it."""
    return bool(hits) and (hits[0].strength >= MIN_STRENGTH or hits[0].coverage >= MIN_COVERAGE)


def checked(reply: str, question: str, passages: tuple[Passage, ...]) -> Answer:
    """Returns a reply as the answer if it stands in the passages, else their best sentence."""
    reply = reply.strip()
    shown = [f"{passage.place}\n{passage.text}" for passage in passages]
    if reply and stands_in(reply, question, "\n".join(shown)):
        return Answer(reply, found=True, sources=passages)
    return Answer(best_sentence(question, passages[0].text), found=True, quoted=True, sources=passages)


def stands_in(reply: str, question: str, text: str) -> bool:
    """Whether a text has the values and most words of a reply; those that the question has say nothing.

    Every date, time and number must be there, in any form. A reply that only repeats the question is none.
    """
    given, asked, there = (values(plain(each)) for each in (reply, question, text))
    if any(not any(date.may_be(other) for other in there.dates + asked.dates) for date in given.dates):
        return False
    if given.times - there.times - asked.times or given.numbers - there.numbers - asked.numbers:
        return False
    own = {word for word in terms(given.rest) if not is_small(word)} - set(terms(question))
    found = own & set(terms(text))
    has_value = bool(given.dates or given.times - asked.times or given.numbers - asked.numbers)
    if has_value and len(own) <= FEW_WORDS:
        return True
    return bool(found) and len(found) >= MIN_SUPPORT * len(own)


def best_sentence(question: str, text: str) -> str:
    """Returns the sentence of a passage that has most of the question's words, the first one of equals; no heading."""
    wanted = {_beginning(word) for word in terms(question) if not is_small(word)}
    sentences = [part.strip() for part in _SENTENCE_END.split(text) if part and part.strip()]
    sentences = [sentence for sentence in sentences if not sentence.startswith("#")] or sentences
    return max(
        sentences,
        key=lambda sentence: len(wanted.intersection(_beginning(word) for word in terms(sentence))),
        default=text,
    )


def _beginning(word: str) -> str:
    """Returns what the forms of a word mostly have in common."""
    return word[: max(4, len(word) - 2)]
