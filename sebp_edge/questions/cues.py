"""Asks for the values of a note by their type and the words around them, whatever the grammar of the sentence.

A person who asks about a note uses some of its words, a question word, and the title: "When clock brought in?" stands
for all such questions. Fragments and sentences that no other rule understands are asked about in this way.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from sebp_edge.questions.notes import read_note
from sebp_edge.questions.question import Question
from sebp_edge.questions.word_lists import listed

# Wordings of each question, and questions of each note.
NUM_WORDINGS = 6
MAX_QUESTIONS = 16

_MONTH = "January|February|March|April|May|June|July|August|September|October|November|December"
_WEEKDAY = "(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day"
_NAME = r"(?:(?:Dr|Mr|Mrs|Ms|St)\.? )?[A-Z][\w'’-]+(?: (?:[A-Z][\w'’-]+|of [A-Z][\w'’-]+))*"
_DETERMINER = r"(?:a|an|the|my|our|his|her|their|its|some|no|each|every|two|three|four|five|six)"
_ENDS = (
    r"(?=[.,;:!?)]|$| (?:and|or|but|as|in|on|at|of|to|for|from|with|by|who|which|that|because|when|is|was|are|were)\b)"
)
# Of a noun phrase, as many words as lead to an end; else one or two.
_NOUN = rf"(?:(?:[\w'’-]+ ){{0,3}}?[\w'’-]+{_ENDS}|(?:[\w'’-]+ )?[\w'’-]+)"
_PHRASE = rf"{_DETERMINER} {_NOUN}(?: of (?:{_DETERMINER} )?{_NOUN})?"
# The first that matches at a place counts; each has a group "value".
_VALUES = [
    (
        "date",
        rf"(?P<value>\d{{4}}-\d\d-\d\d|\d{{1,2}}(?:st|nd|rd|th)? (?:{_MONTH})(?: \d{{4}})?"
        rf"|(?:{_MONTH}) \d{{1,2}}(?:, \d{{4}})?|(?:every |each |on |next )?{_WEEKDAY}s?)",
    ),
    ("time", r"(?P<value>\d{1,2}[:.]\d\d(?: ?[ap]m)?|\d{1,2} ?(?:am|pm|o'clock)|half past \w+|noon|midnight)\b"),
    (
        "money",
        r"(?P<value>[€$£¥] ?\d[\d.,]*\d|[€$£¥] ?\d"
        r"|\d[\d.,]* ?(?:euros?|dollars?|pounds?|kronor|kr|cents?|pence|%|per cent))",
    ),
    ("code", r"\b(?P<value>[A-Z]{1,4}[- ]?\d{2,}[\w-]*|\d{2,}(?:-\d+)+|\+?\d[\d ]{6,}\d)\b"),
    ("amount", r"\b(?P<value>\d+(?:[.,]\d+)?(?: ?(?:x|×) ?\d+)?(?: [a-z][\w-]*)?)"),
    ("reason", r"\b(?:because|since|so that) (?P<value>[^.;:!?]{4,60}?)(?=[.;:!?,]|$| and | but )"),
    ("called", rf"\b(?:called|named|[Nn]ame(?:'s| is)) (?P<value>{_NAME}|{_NOUN})"),
    (
        "place",
        rf"\b(?P<value>(?:in|at|on|under|behind|over|inside|beside|near|between|against|above|below|beneath|next to)"
        rf" (?:{_PHRASE}|{_NAME}))",
    ),
    ("origin", rf"\bfrom (?P<value>{_PHRASE}|{_NAME})"),
    ("agent", rf"\b(?:by|with|to|for) (?P<value>{_NAME})"),
    ("label", r"(?:^|[.;] )[A-Z][\w ]{2,24}: (?P<value>[^.;:]{2,50}?)(?=[.;,]|$)"),
    ("name", rf"(?P<value>{_NAME})"),
    ("thing", rf"\b(?P<value>{_PHRASE})"),
    (
        "kind",
        rf"\b(?:is|was|are|were|eats|needs|takes|likes|wants|has|had|bought|got) (?!called|named)(?P<value>{_NOUN})",
    ),
]
_PATTERN = re.compile(
    "|".join(f"(?P<{kind}>{pattern.replace('?P<value>', f'?P<{kind}_value>')})" for kind, pattern in _VALUES)
)
_ASKS = {
    "date": ("when", "on which date", "what date", "which day"),
    "time": ("when", "at what time", "what time"),
    "money": ("how much", "what price", "how much money"),
    "code": ("which number", "what code", "what number"),
    "amount": ("how many", "how much", "what number"),
    "reason": ("why", "for what reason", "how come"),
    "called": ("what name", "what is it called", "who"),
    "place": ("where", "in which place", "whereabouts"),
    "origin": ("where from", "from where", "from whom"),
    "agent": ("who", "whom", "which person"),
    "name": ("who", "which", "what"),
    "thing": ("what", "which thing", "what exactly"),
    "label": ("what", "which", "what exactly"),
    "kind": ("what", "what kind of", "what exactly"),
}
_STOP = listed("""
    a an the and or but so of to in on at by for with from as is are was were be been it its this that these those
    i my me we our us he his him she her they them their you your not no do does did has have had will would can
    could should may might must if then than there here about into out up down off over under after before again
    too very just only also because who what when where which why how all some any each one
""")
# Values that say nothing without what follows them.
_EMPTY = re.compile(r"(?:an? |the |some |one )?(?:kind|sort|type|lot|bit|few|thing|things|way|one|pair|number|part)")
_LINE = re.compile(r"^\s*(?:[-*+•]|\d+[.)])?\s*(?:\[[ xX]\]\s*)?(?P<text>.*\S)\s*$")
_SENTENCE_END = re.compile(r"(?<=[.!?;])\s+(?=[A-Z\d\"'“])")
_WORD = re.compile(r"[\w'’-]+")


@dataclass(frozen=True)
class _Cue:
    """A value in a sentence: its kind, where it is, and the words around it."""

    kind: str
    value: str
    sentence: str
    begin: int
    end: int


def ask_by_cues(text: str, name: str | None = None) -> list[Question]:
    """Returns questions for the values of an English note; none of another language; arguments as for `rules.ask`."""
    note = read_note(text, name)
    if not note.is_english:
        return []
    subject = note.subject.title
    questions: dict[str, Question] = {}
    for sentence in _sentences(note.text):
        for cue in _cues(sentence, subject):
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


def _cues(sentence: str, subject: str) -> Iterator[_Cue]:
    at = 0
    while (found := _PATTERN.search(sentence, at)) is not None:
        kind = found.lastgroup if found.lastgroup in _ASKS else next(k for k in _ASKS if found[k] is not None)
        begin, end = found.span(f"{kind}_value")
        at = max(end, at + 1)
        value = sentence[begin:end].strip(" ,")
        is_start = not sentence[:begin].strip("\"'“ ")
        if kind == "name" and is_start and " " not in value:
            at = begin + len(value)
            if not re.match(r"\s+[a-z]+(?:s|ed)\b", sentence[end:]) or value.casefold() in _STOP:
                continue
        if value.casefold() in _STOP or _EMPTY.fullmatch(value) or value.casefold() in subject.casefold():
            continue
        yield _Cue(kind, value, sentence, begin, end)


def _question(cue: _Cue, subject: str) -> Question | None:
    """Returns a question for a value, worded by the words around it; None if too few are left."""
    clause_begin = max((cue.sentence.rfind(mark, 0, cue.begin) for mark in ",;:"), default=-1) + 1
    nearby = [cue.sentence.find(mark, cue.end) for mark in ",;:."]
    clause_end = min((place for place in nearby if place >= 0), default=len(cue.sentence))
    near = _content(cue.sentence[clause_begin : cue.begin] + " " + cue.sentence[cue.end : clause_end], cue.value)
    whole = _content(cue.sentence[: cue.begin] + " " + cue.sentence[cue.end :], cue.value)
    near = near or whole
    about = _content(subject, cue.value)
    if not near or len(set(near + about)) < 2:
        return None
    draw, asks = random.Random(cue.sentence + cue.value), _ASKS[cue.kind]
    # A title that gives the answer away is left out.
    title = "" if _content(subject, "") != about else subject.strip()
    gap = f"{cue.sentence[: cue.begin]}___{cue.sentence[cue.end :]}".strip()
    few = [word for word in whole if draw.random() < 0.6] or near
    first, second, third = asks[0], asks[1 % len(asks)], asks[2 % len(asks)]
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
        if word.casefold() not in _STOP and word.casefold() not in own and len(word) > 1
    ]


def _new(words: list[str], present: list[str]) -> list[str]:
    known = {word.casefold() for word in present}
    return [word for word in words if word.casefold() not in known]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
