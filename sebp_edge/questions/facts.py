"""What a rule finds: an answer, and the ways to ask for it."""

import re
from dataclasses import dataclass

_CAPITALISED = re.compile(r"[A-Z][a-z]*(?:['’-][a-z]+)*\b(?!\.\w)")


@dataclass(frozen=True, slots=True)
class Core:
    """One way to ask.

    Attributes:
        direct: the question, "When does the shop open?".
        indirect: the same within a sentence, "when the shop opens".
        is_whole: whether it has all that determines the answer; a shorter one may hold for other facts too.
    """

    direct: str
    indirect: str
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that a note says.

    Attributes:
        answer: a span of the note.
        cores: ways to ask for it in English; the best first. Without any, the text's own words are the question.
        keywords: the question as typed into a search box, without a question mark.
        phrase: the answer's name, "the code of the gate", if it has one.
        cloze: a statement with "___" in the place of the answer.
        topic: what the question is about, if the question itself does not say so.
        rank: how specific it is; the highest first.
        is_gist: whether the answer is what a note says of something, rather than a short span.
    """

    answer: str
    cores: tuple[Core, ...] = ()
    keywords: str | None = None
    phrase: str | None = None
    cloze: str | None = None
    topic: str | None = None
    rank: int = 0
    is_gist: bool = False


def lower_first(text: str) -> str:
    """Lower-cases the first letter, unless the word is "I" or has other capitals or digits."""
    first = text.split(" ", 1)[0].rstrip(",:;?!.")
    if first in ("I", "I'm", "I've", "I'd", "I'll") or (len(first) == 1 and first != "A"):
        return text
    return text[:1].lower() + text[1:] if _CAPITALISED.fullmatch(first) else text


def upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]


def genitive(name: str) -> str:
    return f"{name}'" if name.endswith("s") else f"{name}'s"
