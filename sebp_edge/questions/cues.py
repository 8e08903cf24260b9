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
from sebp_edge.questions.values import is_time, kind_of
from sebp_edge.questions.verbs import is_participle, known_form
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
_STREET = r"(?:Street|Lane|Road|Row|Avenue|Close|Square|Place|Way|Drive|Terrace)"
_PHRASE = rf"{_DETERMINER} {_NOUN}(?: of (?:{_DETERMINER} )?{_NOUN})?"
# The first that matches at a place counts; each has a group "value".
_VALUES = [
    (
        "date",
        rf"(?P<value>\d{{4}}-\d\d-\d\d|\d{{1,2}}(?:st|nd|rd|th)? (?:{_MONTH})(?: \d{{4}})?"
        rf"|(?:{_MONTH}) \d{{1,2}}(?:, \d{{4}})?|(?:every |each |on |next )?{_WEEKDAY}s?)",
    ),
    ("time", r"(?P<value>\d{1,2}[:.]\d\d(?: ?[ap]m)?|\d{1,2} ?(?:am|pm|o'clock)|half past \w+|noon|midnight)\b"),
    ("share", r"(?P<value>\d[\d.,]* ?(?:%|per ?cent\b))"),
    (
        "money",
        r"(?P<value>[€$£¥] ?\d[\d.,]*\d|[€$£¥] ?\d|\d[\d.,]* ?(?:euros?|dollars?|pounds?|kronor|kr|cents?|pence)\b)",
    ),
    ("code", r"\b(?P<value>[A-Z]{1,4}[- ]?\d{2,}[\w-]*|\d{2,}(?:-\d+)+|\+?\d[\d ]{6,}\d)\b"),
    ("address", rf"\b(?P<value>\d+[a-z]? {_NAME} {_STREET})\b"),
    ("amount", r"\b(?P<value>\d+(?:[.,]\d+)?(?: ?(?:x|×) ?\d+)?(?: [a-z][\w-]*)?)"),
    ("reason", r"\b(?:because(?: of)?|since|so that) (?P<value>[^.;:!?]{4,60}?)(?=[.;:!?,]|$| and | but )"),
    ("called", rf"\b(?:called|named|[Nn]ame(?:'s| is)) (?P<value>{_NAME}|{_NOUN})"),
    (
        "place",
        rf"\b(?P<value>(?:in|at|on|under|behind|over|inside|beside|near|between|against|above|below|beneath|next to)"
        rf" (?:{_PHRASE}|{_NAME}))",
    ),
    ("origin", rf"\b[Ff]rom (?P<value>{_PHRASE}|{_NAME})"),
    ("agent", rf"\b(?:[Bb]y|[Ww]ith|[Ff]or) (?P<value>{_NAME})"),
    ("target", rf"\bto (?P<value>{_NAME})"),
    ("label", r"(?:^|[.;] )[A-Z][\w ]{2,24}: (?P<value>[^.;:]{2,50}?)(?=[.;,]|$)"),
    ("name", rf"(?P<value>{_NAME})"),
    ("thing", rf"\b(?P<value>{_PHRASE})"),
    (
        "kind",
        r"\b(?:is|was|are|were|ha[sd] been|have been|eats|needs|takes|likes|wants|has|had|bought|got)"
        rf" (?!called|named|been|to )(?P<value>{_NOUN})",
    ),
]
_PATTERN = re.compile(
    "|".join(f"(?P<{kind}>{pattern.replace('?P<value>', f'?P<{kind}_value>')})" for kind, pattern in _VALUES)
)
# Question words for each kind. In those with a unit, it stands for {}.
_ASKS = {
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
# The kinds of values by their own form (see `kind_of`), which are more certain than the words around them.
_OWN_KINDS = {
    "date": "date",
    "weekday": "date",
    "year": "date",
    "time": "time",
    "money": "money",
    "duration": "duration",
    "temperature": "temperature",
    "colour": "colour",
    "phone": "code",
}
_UNITS = {
    "length": listed(
        "mm cm m millimetres centimetres metres millimeters centimeters meters inch inches feet foot ft yards"
    ),
    "distance": listed("km kilometres kilometers mile miles"),
    "weight": listed("mg g gram grams kg kilo kilos kilograms lb lbs ounces oz ton tons tonnes stone"),
    "volume": listed("ml cl dl l litre litres liter liters pint pints gallons cup cups tablespoons teaspoons tbsp tsp"),
    "speed": listed("knots mph rpm kph"),
    "duration": listed("seconds minutes mins hours days nights weeks fortnights months years decades"),
}
_UNIT_KINDS = {unit: kind for kind, units in _UNITS.items() for unit in units}
_COUNTED = re.compile(
    r"(?:\d+(?:[.,]\d+)?|an?|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|forty|fifty)"
    r" (?P<unit>[a-z][\w-]*)(?: [\w ]+)?"
)
_NOT_COUNTED = {"place", "reason", "called", "share", "money"}
_STOP = listed("""
    a an the and or but so of to in on at by for with from as is are was were be been it its this that these those
    i my me we our us he his him she her they them their you your not no do does did has have had will would can
    could should may might must if then than there here about into out up down off over under after before again
    too very just only also because who what when where which why how all some any each one
""")
# Values that say nothing without what follows them.
_EMPTY = re.compile(
    r"(?:an? |the |some |one )?(?:right|back|kind|sort|type|lot|bit|few|thing|things|way|one|pair|number|part)"
)
_LINE = re.compile(r"^\s*(?:[-*+•]|\d+[.)])?\s*(?:\[[ xX]\]\s*)?(?P<text>.*\S)\s*$")
_SENTENCE_END = re.compile(r"(?<=[.!?;])\s+(?=[A-Z\d\"'“])")
_CLAUSE_END = re.compile(r"[,;:.](?!\d)")
_WORD = re.compile(r"\d+(?:[:.,]\d+)+|[\w'’-]+")


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
        if kind == "label" and re.search(r"\d.* ", value) and _refined(kind, value) == kind:
            at = begin  # the value is in it
            continue
        if kind == "amount" and value.split()[-1] in _STOP:
            value = value.rsplit(" ", 1)[0]
            end = begin + len(value)
        is_start = not sentence[:begin].strip("\"'“ ")
        if kind == "name" and is_start and " " not in value:
            at = begin + len(value)
            follows_verb = re.match(r"\s+(?:is|was|has|had|will|[a-z]+(?:s|ed))\b", sentence[end:])
            if not follows_verb or _is_verb(value.casefold()):
                continue
        if kind == "name" and " " in value and is_start and _leads(value.split()[0].casefold()):
            at = begin + len(value.split()[0])
            continue
        if value.endswith(("'s", "’s")):  # whose?
            continue
        if value.casefold() in _STOP or _EMPTY.fullmatch(value) or value.casefold() in subject.casefold():
            continue
        yield _Cue(_refined(kind, value), value, sentence, begin, end)


def _leads(word: str) -> bool:
    """Whether a word at the beginning of a sentence is no part of the name after it, as in "From Southdown"."""
    return word in _STOP or _is_verb(word)


def _is_verb(word: str) -> bool:
    """Whether a sentence that begins with this word lacks its subject, as "Lost about two"."""
    return known_form(word, plain=True) is not None or is_participle(word)


def _refined(kind: str, value: str) -> str:
    """Returns the kind that a value is asked for as, by its own form and unit."""
    own = kind_of(value)
    if own in _OWN_KINDS and not (own == "time" and kind == "amount"):
        return _OWN_KINDS[own]
    if kind == "place" and _is_time(re.sub(r"^\w+ (?:an? )?", "", value)):
        return "date"
    if kind == "name" and re.search(rf" {_STREET}$", value):
        return "address"
    counted = _COUNTED.fullmatch(value)
    if counted is None or counted["unit"] in _STOP or kind in _NOT_COUNTED:
        return kind
    is_number = not re.match(r"an?\b", value)
    return _UNIT_KINDS.get(counted["unit"], "number of" if is_number else kind)


def _is_time(content: str) -> bool:
    return is_time(content) or kind_of(content) == "duration"


def _asks(cue: _Cue) -> tuple[str, str, str]:
    """Returns three ways to begin a question for a value."""
    counted = _COUNTED.fullmatch(cue.value)
    unit = counted["unit"] if counted else ""
    return tuple(ask.format(unit).strip() for ask in _ASKS[cue.kind])


def _question(cue: _Cue, subject: str) -> Question | None:
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
        if word.casefold() not in _STOP and word.casefold() not in own and len(word) > 1
    ]


def _new(words: list[str], present: list[str]) -> list[str]:
    known = {word.casefold() for word in present}
    return [word for word in words if word.casefold() not in known]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
