"""Words a question for a value in keywords, in many ways.

A person asks about a note from memory: with some of its words, in any order, and with the small words of a sentence
between them. Wordings drawn at random stand for all of these.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sebp_edge.questions.cue_values import STOP, Cue
from sebp_edge.questions.facts import lower_first, upper_first
from sebp_edge.questions.subjects import DETERMINERS, Words
from sebp_edge.questions.verbs import is_participle, known_form

# Wordings of each question.
NUM_WORDINGS = 18
_AUXILIARIES = (
    "",
    "",
    "is",
    "was",
    "are",
    "did",
    "did I",
    "did we",
    "do I",
    "does",
    "has",
    "is the",
    "was the",
    "will",
)
_PREPOSITIONS = ("for", "of", "about", "on", "with", "in")
_PREPOSITION_END = re.compile(r"(?:^| )(?:on|at|in|for|from|by|with|to|of|because(?: of)?)$")
_CLAUSE_END = re.compile(r"[,;:.](?!\d)")
_CONTRACTION = re.compile(r"\w+(?:n['’]t|['’](?:ll|d|ve|re|m))", re.IGNORECASE)
_WORD = re.compile(r"\d+(?:[:.,]\d+)+|[\w'’-]+")


@dataclass(frozen=True)
class Title:
    """A name of a note: the words, and how a sentence names it, "the garden gate"."""

    words: str
    phrase: str


def word_cue(cue: Cue, asks: Sequence[str], titles: Sequence[Title], words: Words, *, is_only: bool) -> tuple[str, ...]:
    """Returns wordings of the question for a value, all different; none if its sentence says too little.

    Args:
        asks: ways to begin the question.
        titles: what the value stands under, the nearest first: a heading, the note's title, the name of its file.
        words: how the note writes its words.
        is_only: whether the note has no other value of its kind, so that the title is enough to ask for it.
    """
    worded = _Wordings(cue, titles, words)
    if not worded.near or len(set(worded.near + worded.title)) < 2:
        return ()
    made = dict.fromkeys([worded.in_keywords(asks[0])])
    if cue.kind != "said":
        made |= dict.fromkeys([worded.with_gap(), *worded.in_place(asks[0])])
    for number in range(4 * NUM_WORDINGS):
        if len(made) >= NUM_WORDINGS:
            break
        ask = asks[number % len(asks)]
        made.setdefault(worded.by_title(ask) if is_only and number % 3 == 2 else worded.drawn(ask))
    return tuple(made)


class _Wordings:
    """Makes wordings of the words around a value: without the value's own, and without those that mean little.

    Of a value that is a whole passage, its own words are those around it.

    Attributes:
        near: those of the value's clause; of the whole sentence if it has no others.
        title: those of the nearest title.
    """

    def __init__(self, cue: Cue, titles: Sequence[Title], words: Words):
        self._draw, self._value = random.Random(cue.sentence + cue.value), cue.value
        own = "" if cue.kind == "said" else cue.value
        before, self._after = cue.sentence[: cue.begin], cue.sentence[cue.end :]
        first = before.split(" ", 1)[0]
        is_verb = known_form(first.lower(), plain=True) is not None or is_participle(first.lower())
        self._before = before if words.is_name(first) and not is_verb else lower_first(before)
        self._clause = (_CLAUSE_END.split(self._before)[-1].strip(), _CLAUSE_END.split(self._after)[0].strip())
        self._whole = content(cue.value if cue.kind == "said" else f"{self._before} {self._after}", own)
        self.near = content(" ".join(self._clause), own) or self._whole
        self.title = content(titles[0].words, own) if titles else []
        # A title that gives the answer away is left out.
        self._titles = [each for each in titles if content(each.words, "") == content(each.words, own)]

    def in_keywords(self, ask: str) -> str:
        """Such as "When clock brought in?"."""
        return f"{upper_first(ask)} {' '.join(_joined(self.near, self.title))}?"

    def with_gap(self) -> str:
        gap = upper_first(f"{self._before}___{self._after}".strip())
        return f"{self._named()}{gap} What is missing?"

    def in_place(self, ask: str) -> Iterator[str]:
        """Yields the value's clause with the question's first words in its place, "The clock: brought in when?".

        Yields nothing if other words of the clause are the value's, too.
        """
        before, after = self._clause
        if not (_casefolded(self._value) & _casefolded(f"{before} {after}")) - DETERMINERS:
            before = _PREPOSITION_END.sub("", before)
            yield upper_first(f"{self._named()}{f'{before} {ask} {after}'.strip()}?")

    def drawn(self, ask: str) -> str:
        """A wording that is drawn at random; one in four has words of the whole sentence."""
        draw = self._draw
        is_wide = draw.random() < 0.25
        source = self._whole if is_wide else self.near
        share = 0.4 if is_wide else draw.choice((0.4, 0.7, 1.0))
        some = [word for word in source if draw.random() < share] or [draw.choice(source)]
        start = self._start(ask)
        if not self._titles:
            return f"{start} {' '.join(some)}?"
        title = draw.choice(self._titles)
        form = draw.randrange(3)
        if form == 0:
            about = content(title.words, "")
            return f"{start} {' '.join(_joined(some, about) if draw.random() < 0.5 else _joined(about, some))}?"
        if form == 1:
            return f"{start} {' '.join(some)} {draw.choice(_PREPOSITIONS)} {title.phrase}?"
        return f"{upper_first(title.phrase)}: {lower_first(start)} {' '.join(some)}?"

    def by_title(self, ask: str) -> str:
        """A wording with nothing but a title, "When was the clock?"."""
        if not self._titles:
            return self.drawn(ask)
        title = self._draw.choice(self._titles)
        start = self._start(ask)
        if self._draw.random() < 0.5:
            return f"{upper_first(title.phrase)}: {lower_first(start)}?"
        return f"{start} {title.phrase}?"

    def _start(self, ask: str) -> str:
        return upper_first(f"{ask} {self._draw.choice(_AUXILIARIES)}".strip())

    def _named(self) -> str:
        return f"{upper_first(self._draw.choice(self._titles).phrase)}: " if self._titles else ""


def content(text: str, value: str) -> list[str]:
    """Returns the words of a text that mean something, without those of the value."""
    own = _casefolded(value)
    return [
        word
        for word in _WORD.findall(text)
        if word.casefold() not in STOP | own and len(word) > 1 and not _CONTRACTION.fullmatch(word)
    ]


def _casefolded(text: str) -> set[str]:
    return {word.casefold() for word in _WORD.findall(text)}


def _joined(words: list[str], others: list[str]) -> list[str]:
    """Returns the words and then those of the others that are not among them."""
    known = {word.casefold() for word in words}
    return words + [word for word in others if word.casefold() not in known]
