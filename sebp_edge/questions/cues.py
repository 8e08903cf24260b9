"""Asks for the values of a note by their type and the words around them, whatever the grammar of the sentence.

A person who asks about a note uses some of its words, a question word, and the title: "When clock brought in?" stands
for all such questions. Fragments and sentences that no other rule understands are asked about in this way.
"""

import random
import re
from collections.abc import Iterator

from sebp_edge.questions.cue_values import STOP, Cue, find_cues
from sebp_edge.questions.notes import read_note
from sebp_edge.questions.question import Question

# Wordings of each question, and questions of each note.
NUM_WORDINGS = 6
MAX_QUESTIONS = 16

# Question words for each kind. In those with a unit, it stands for {}.
ASKS = {
    "date": ("when", "on which date", "what date"),
    "time": ("when", "at what time", "what time"),
    "money": ("how much", "what price", "how much money"),
    "share": ("what share", "how much", "what percentage"),
    "duration": ("how long", "how many {}", "for how long"),
    "length": ("how long", "how many {}", "what length"),
    "distance": ("how far", "how many {}", "what distance"),
    "weight": ("how much", "how many {}", "what weight"),
    "volume": ("how much", "how many {}", "what amount"),
    "speed": ("how fast", "how many {}", "what speed"),
    "temperature": ("what temperature", "how many degrees", "how warm"),
    "colour": ("what colour", "which colour", "what color"),
    "number of": ("how many {}", "how many", "what number"),
    "code": ("which number", "what code", "what number"),
    "amount": ("how many", "how much", "what number"),
    "reason": ("why", "for what reason", "how come"),
    "called": ("what name", "what is it called", "who"),
    "place": ("where", "in which place", "whereabouts"),
    "origin": ("where from", "from where", "from whom"),
    "agent": ("who", "whom", "which person"),
    "target": ("to whom", "where", "who"),
    "address": ("where", "at which address", "whereabouts"),
    "name": ("who", "which", "what"),
    "thing": ("what", "which thing", "what exactly"),
    "label": ("what", "which", "what exactly"),
    "kind": ("what", "what kind of", "what exactly"),
}
_LINE = re.compile(r"^\s*(?:[-*+•]|\d+[.)])?\s*(?:\[[ xX]\]\s*)?(?P<text>.*\S)\s*$")
_SENTENCE_END = re.compile(r"(?<=[.!?;])\s+(?=[A-Z\d\"'“])")
_CLAUSE_END = re.compile(r"[,;:.](?!\d)")
_WORD = re.compile(r"\d+(?:[:.,]\d+)+|[\w'’-]+")


def ask_by_cues(text: str, name: str | None = None) -> list[Question]:
    """Returns questions for the values of an English note; none of another language; arguments as for `rules.ask`."""
    note = read_note(text, name)
    if not note.is_english:
        return []
    subject = note.subject.title
    questions: dict[str, Question] = {}
    for sentence in _sentences(note.text):
        for cue in find_cues(sentence, subject):
            question = _question(cue, subject)
            if question is not None:
                questions.setdefault(question.wordings[0], question)
    return list(questions.values())[:MAX_QUESTIONS]


def _sentences(text: str) -> Iterator[str]:
    for line in text.split("\n"):
        if line.lstrip().startswith(("#", "|", ">", "http", "<")):
            continue
        found = _LINE.match(line)
        if found:
            yield from (part for part in _SENTENCE_END.split(found["text"]) if 2 <= len(part.split()) <= 40)


def _asks(cue: Cue) -> tuple[str, str, str]:
    """Returns three ways to begin a question for a value."""
    return tuple(ask.format(cue.unit).strip() for ask in ASKS[cue.kind])


def _question(cue: Cue, subject: str) -> Question | None:
    """Returns a question for a value, worded by the words around it; None if too few are left."""
    before, after = cue.sentence[: cue.begin], cue.sentence[cue.end :]
    near = _content(f"{_CLAUSE_END.split(before)[-1]} {_CLAUSE_END.split(after)[0]}", cue.value)
    whole = _content(f"{before} {after}", cue.value)
    near = near or whole
    about = _content(subject, cue.value)
    if not near or len(set(near + about)) < 2:
        return None
    draw, (first, second, third) = random.Random(cue.sentence + cue.value), _asks(cue)
    # A title that gives the answer away is left out.
    title = "" if _content(subject, "") != about else subject.strip()
    gap = f"{before}___{after}".strip()
    few = [word for word in whole if draw.random() < 0.6] or near
    named = f"{title}: " if title else ""
    wordings = [
        f"{_capital(first)} {' '.join(near + _new(about, near))}?",
        f"{named}{first} {' '.join(near)}?",
        f"{_capital(second)} {' '.join(_new(about, few) + few)}?",
        f"{named}{gap} What is missing?",
        f"{' '.join(_new(about, near) + near)} – {third}?",
        f"{_capital(first)} {' '.join(few)}?" if len(few) > 2 else f"{named}{second} {' '.join(whole[:6])}?",
    ]
    unique = tuple(dict.fromkeys(wordings))[:NUM_WORDINGS]
    return Question(unique, (), cue.value)


def _content(text: str, value: str) -> list[str]:
    """Returns the words of a text that mean something, without those of the value."""
    own = {word.casefold() for word in _WORD.findall(value)}
    return [
        word
        for word in _WORD.findall(text)
        if word.casefold() not in STOP and word.casefold() not in own and len(word) > 1
    ]


def _new(words: list[str], present: list[str]) -> list[str]:
    known = {word.casefold() for word in present}
    return [word for word in words if word.casefold() not in known]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
