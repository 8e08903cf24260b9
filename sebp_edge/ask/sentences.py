"""Cuts passages into sentences, and finds the one that holds what is asked, or what a reply says."""

import re
from collections.abc import Callable

from sebp_edge.ask.passages import Passage
from sebp_edge.ask.terms import is_small, plain, terms
from sebp_edge.ask.values import MONTH, values

# Words that ask for a date or time, a number, and a person, in English, German, Dutch, French, Spanish and Italian.
_WHEN = frozenset(terms("when day date time month until since wann tag datum wanneer dag quand jour cuando dia quando"))
_HOW_MANY = frozenset(
    terms("how many much number numbers code share sum level cap long viel viele lange summe hoeveel nummer combien")
    + terms("cuanto cuantos quanto quanti")
)
_WHO = frozenset(terms("who whom whose wer wen wem wessen qui quien quienes chi"))
# A word that begins like a name, within a sentence.
_NAME = re.compile(r"(?<=[\w,] )[^\W\d_a-z]\w+")
# How much a value or a name counts if one is asked for: as much as so many words of the question.
KIND = 1.5

# Not after "Dr." or an initial, between "3." and "Mai", or within a paragraph of long lines.
_SENTENCE_END = re.compile(
    r"(?<=[.!?])(?<!\b[A-Z]\.)(?<!\b[A-Z][a-z]\.)[\"”’)]?\s+(?=\W*[^\W_a-z])"
    rf"(?!(?<=\d\.\s)(?i:{MONTH}))|(?<=[。！？])|(?<!.{{60}})\n+|\n+(?=\n|\s*[-*#|>\d])"
)
# When a note was made is no answer to "when".
_FRONT_MATTER = re.compile(r"\A(---|\+\+\+)\n.*?^\1[ \t]*$", re.DOTALL | re.MULTILINE)


def best_sentence(question: str, passage: Passage) -> str:
    """Returns the sentence of a passage that is likeliest to hold what is asked, as it stands there; no heading.

    It says something that the question does not, and counts the question's words in it; those of the document's name
    and headings little, since all of the passage is about them. What is asked for, if that is there, counts more.
    """
    sentences = sentences_of(passage)
    headings = [sentence for sentence in sentences if sentence.startswith("#")]
    asked, subject = beginnings(question), beginnings(" ".join((passage.place, *headings)))
    has_kind = _has_kind_asked(question)

    def worth(sentence: str) -> tuple[bool, float]:
        words = beginnings(sentence)
        shared = {word for word in asked if any(other.startswith(word) for other in words)}
        own = [word for word in words if not word.startswith(tuple(asked))]
        found = len(shared - subject) + 0.2 * len(shared & subject) + KIND * has_kind(sentence)
        return bool(own), found + 0.05 * min(len(own), 20)

    others = [sentence for sentence in sentences if sentence not in headings]
    return max(others or headings, key=worth, default=passage.text)


def closest(sentences: list[str], reply: str, question: str) -> str:
    """Returns the sentence with most words of a reply; of several alike, with most words of the question."""
    said, asked = beginnings(reply), beginnings(question)
    return max(sentences, key=lambda each: (len(said & (words := beginnings(each))), len(asked & words)), default="")


def line_of(sentence: str, passage: Passage) -> int:
    """Returns the line of its document on which a sentence of a passage begins."""
    return passage.line + passage.text[: max(0, passage.text.find(sentence))].count("\n")


def sentences_of(passage: Passage) -> list[str]:
    """Returns the sentences of a passage as they stand there, without front matter if there is more."""
    return split(_FRONT_MATTER.sub("", passage.text).strip() or passage.text)


def split(text: str) -> list[str]:
    """Returns the sentences of a text."""
    return [part.strip() for part in _SENTENCE_END.split(text) if part and part.strip()]


def beginnings(text: str) -> set[str]:
    """Returns what the forms of each word mostly have in common, without words that say little."""
    return {word[: max(4, len(word) - 2)] for word in terms(text) if not is_small(word)}


def _has_kind_asked(question: str) -> Callable[[str], bool]:
    """Returns whether a sentence has a date or time, number or name that the question asks for, and has not."""
    words, asked = set(terms(question)), values(plain(question))
    asks_when, asks_number, asks_who = (bool(words & kind) for kind in (_WHEN, _HOW_MANY, _WHO))

    def has(sentence: str) -> bool:
        if asks_who and {plain(name) for name in _NAME.findall(sentence)} - words:
            return True
        if not (asks_when or asks_number):
            return False
        there = values(plain(sentence))
        is_date = bool(there.times - asked.times) or any(
            not any(date.may_be(other) for other in asked.dates) for date in there.dates
        )
        return (asks_when and is_date) or (asks_number and bool(there.numbers - asked.numbers))

    return has
