"""What a question is answered with: the reply, whether it stands in the passages, and else a quotation."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from sebp_edge.ask.index import Hit
from sebp_edge.ask.passages import Passage
from sebp_edge.ask.terms import is_small, plain, terms
from sebp_edge.ask.values import MONTH, values

NOT_FOUND = "Not in your notes."
# The passages that a model is shown. The first is the right one nearly always, and small models read one better than
# three (kernels/bench/how-the-recipes-were-chosen.md).
NUM_PASSAGES = 1

# Below it, nothing was found (see `Hit`). The middle of the range in which at most 10 % of the development people's
# questions that their notes answer are refused, and at least 80 % of others, with 20 to 1,000 notes.
MIN_STRENGTH = 1.2
# The least share of a reply's words, those of the question aside, that the passages must have.
MIN_SUPPORT = 0.6
# A value that is there may have so many words around it that are not, such as "number".
FEW_WORDS = 2

# Words that ask for a date or time, and for a number, in English, German, Dutch, French, Spanish and Italian.
_WHEN = frozenset(terms("when day date time month until since wann tag datum wanneer dag quand jour cuando dia quando"))
_HOW_MANY = frozenset(terms("how many much number code viel viele hoeveel nummer combien cuanto cuantos quanto quanti"))

# Not after "Dr." or an initial, between "3." and "Mai", or within a paragraph of long lines.
_SENTENCE_END = re.compile(
    r"(?<=[.!?])(?<!\b[A-Z]\.)(?<!\b[A-Z][a-z]\.)[\"”’)]?\s+(?=\W*[^\W_a-z])"
    rf"(?!(?<=\d\.\s)(?i:{MONTH}))|(?<=[。！？])|(?<!.{{60}})\n+|\n+(?=\n|\s*[-*#|>\d])"
)
# When a note was made is no answer to "when".
_FRONT_MATTER = re.compile(r"\A(---|\+\+\+)\n.*?^\1[ \t]*$", re.DOTALL | re.MULTILINE)


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
    return bool(hits) and hits[0].strength >= MIN_STRENGTH


def checked(reply: str, question: str, passages: tuple[Passage, ...]) -> Answer:
    """Returns a reply as the answer if it stands in the passages, else their best sentence."""
    reply = reply.strip()
    if reply and stands_in(reply, question, "\n".join(passage.shown for passage in passages)):
        return Answer(reply, found=True, sources=passages)
    return Answer(best_sentence(question, passages[0]), found=True, quoted=True, sources=passages)


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


def best_sentence(question: str, passage: Passage) -> str:
    """Returns the sentence of a passage that is likeliest to hold what is asked; no heading.

    It says something that the question does not, and counts the question's words in it; those of the document's name
    and headings little, since all of the passage is about them. A value of the kind asked for counts as one more.
    """
    text = _FRONT_MATTER.sub("", passage.text).strip() or passage.text
    sentences = [part.strip() for part in _SENTENCE_END.split(text) if part and part.strip()]
    headings = [sentence for sentence in sentences if sentence.startswith("#")]
    asked, subject = _beginnings(question), _beginnings(" ".join((passage.place, *headings)))
    has_value = _has_value_asked(question)

    def worth(sentence: str) -> tuple[bool, float]:
        words = _beginnings(sentence)
        shared = {word for word in asked if any(other.startswith(word) for other in words)}
        own = [word for word in words if not word.startswith(tuple(asked))]
        found = len(shared - subject) + 0.2 * len(shared & subject) + has_value(sentence)
        return bool(own), found + 0.05 * min(len(own), 20)

    others = [sentence for sentence in sentences if sentence not in headings]
    return " ".join(max(others or headings, key=worth, default=passage.text).split())


def _has_value_asked(question: str) -> Callable[[str], bool]:
    """Returns whether a sentence has a date, time or number as the question asks for, which is not in it."""
    words, asked = set(terms(question)), values(plain(question))
    asks_when, asks_number = bool(words & _WHEN), bool(words & _HOW_MANY)

    def has(sentence: str) -> bool:
        if not (asks_when or asks_number):
            return False
        there = values(plain(sentence))
        is_date = bool(there.times - asked.times) or any(
            not any(date.may_be(other) for other in asked.dates) for date in there.dates
        )
        return (asks_when and is_date) or (asks_number and bool(there.numbers - asked.numbers))

    return has


def _beginnings(text: str) -> set[str]:
    """Returns what the forms of each word mostly have in common, without words that say little."""
    return {word[: max(4, len(word) - 2)] for word in terms(text) if not is_small(word)}
