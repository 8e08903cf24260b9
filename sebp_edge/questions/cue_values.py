"""Finds the values of a sentence by their type and the words around them: dates, amounts, names, places, things."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from sebp_edge.questions.chunks import PREPOSITIONS
from sebp_edge.questions.value_patterns import DETERMINER, NAME, NOUN, PATTERN, STREET, VALUES
from sebp_edge.questions.values import is_time, kind_of
from sebp_edge.questions.verbs import AUXILIARIES, HAVE, is_participle, known_form
from sebp_edge.questions.word_lists import is_genitive, listed

# Words that mean little by themselves.
STOP = listed("""
    a an the and or but so of to in on at by for with from as is are was were be been it its this that these those
    i my me we our us he his him she her they them their you your not no do does did has have had will would can
    could should may might must if then than there here about into out up down off over under after before again
    too very just only also because who what when where which why how all some any each one
""")
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
    "email": "code",
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
_WORDS = re.compile(r"[\w'’-]+")
_NOT_COUNTED = {"place", "reason", "called", "share", "money"}
_HAS_END = re.compile(r"\b(?:has|had) $")
_BEFORE_NOUNS = PREPOSITIONS | listed("of like as no only not apart than plus or and")
_AFTER_NAMES = listed("from at of with in on")
_ADVERBS = listed("""
    well now always never ever still already enough away together twice once later soon often almost quite good course
    least most more less home today tomorrow yesterday everything nothing something anything nobody everybody somebody
    such sure example instead else even back
""")
# A longer text after a colon is a sentence that has values of its own.
MAX_LABEL_WORDS = 5
# Values that say nothing without what follows them.
_EMPTY = re.compile(
    r"(?:an? |the |my |our |his |her |its |some |one |no )?(?:other )?"
    r"(?:right|back|kind|sort|type|lot|bit|few|things?|way|one|pair|number|part|place|way back|way home|times?|rest"
    r"|others?|same|whole|most|least|first|last|next|end|case|moment|fact|point|idea|theory|mind|own|best|worst)"
)
# A noun without an article after a word that may lead to one; whether it does, `_bare_nouns` decides.
_BARE = re.compile(rf"\b(?P<before>[a-z]+) (?P<value>(?!{DETERMINER}\b)(?=[a-z]){NOUN})")
# One that begins a fragment, "folding stool" of "folding stool from the shop".
_FIRST = re.compile(
    rf"(?P<before>)(?P<value>(?!{DETERMINER}\b)[A-Za-z][\w'’-]*(?: [a-z][\w'’-]*){{0,2}}?)"
    r"(?= (?:for|from|with|at|in|on|by|to)\b|,| [–—-] |[.!?]?$)"
)


@dataclass(frozen=True)
class Cue:
    """A value in a sentence, where it stands.

    Attributes:
        kind: what it is asked for as, one of `cues.ASKS`.
    """

    kind: str
    value: str
    sentence: str
    begin: int
    end: int

    @property
    def unit(self) -> str:
        """What is counted, "jars" of "38 jars"; empty if nothing is."""
        counted = _COUNTED.fullmatch(self.value)
        return counted["unit"] if counted else ""


def find_cues(sentence: str, subject: str, names: frozenset[str]) -> list[Cue]:
    """Returns the values of a sentence, without those that its note's subject says.

    Args:
        names: words that the note writes with a capital within sentences.
    """
    found = list(_clear(sentence, subject, names))
    return found + list(_bare_nouns(sentence, subject, found))


def _bare_nouns(sentence: str, subject: str, found: list[Cue]) -> Iterator[Cue]:
    """Yields nouns without an article where nothing else was found, "celery" of "warn her of celery"."""
    start = _FIRST.match(sentence)
    for match in [*([start] if start else []), *_BARE.finditer(sentence)]:
        begin, end, value = *match.span("value"), match["value"].strip()
        before, first = match["before"], value.split()[0].casefold()
        leads = not before or before in _BEFORE_NOUNS or known_form(before, plain=True) is not None
        is_word = len(first) > 2 and first not in STOP | _ADVERBS and not _is_verb(first)
        if not (leads and is_word) or is_empty(value) or _says(subject, value):
            continue
        if not any(cue.begin < end and begin < cue.end for cue in found):
            yield Cue(_refined("kind", value), value, sentence, begin, end)


def _clear(sentence: str, subject: str, names: frozenset[str]) -> Iterator[Cue]:
    """Yields the values that their own form or the words around them show."""
    at = 0
    while (found := PATTERN.search(sentence, at)) is not None:
        kind = next(kind for kind, _ in VALUES if found[kind] is not None)
        begin, end = found.span(f"{kind}_value")
        at = max(end, at + 1)
        value = sentence[begin:end].strip(" ,")
        is_long = len(value.split()) > MAX_LABEL_WORDS or re.search(r"\d.* ", value)
        if kind == "label" and is_long and _refined(kind, value) == kind:
            at = begin  # the value is in it
            continue
        if kind == "amount" and value.split()[-1] in STOP:
            value = value.rsplit(" ", 1)[0]
            end = begin + len(value)
        is_start = not sentence[:begin].strip("\"'“ ")
        if kind == "name" and is_start and " " not in value:
            at = begin + len(value)
            following = re.match(r"\s+([a-z]+)\b", sentence[end:])
            leads = following and (_is_finite(following[1]) or following[1] in _AFTER_NAMES)
            if _is_verb(value.casefold()) or not (leads or value in names):
                continue
        if kind == "name" and " " in value and is_start and _leads(value.split()[0].casefold()):
            at = begin + len(value.split()[0])
            continue
        if is_genitive(value):  # whose?
            continue
        if kind == "kind" and _HAS_END.search(sentence[:begin]) and is_participle(value.split()[0].casefold()):
            continue
        if value.casefold() in STOP or is_empty(value) or _says(subject, value):
            continue
        yield Cue(_refined(kind, value), value, sentence, begin, end)


def is_empty(value: str) -> bool:
    """Whether a value says nothing by itself, as "the other one"."""
    return bool(_EMPTY.fullmatch(value.casefold()))


def _leads(word: str) -> bool:
    """Whether a word at the beginning of a sentence is no part of the name after it, as in "From Southdown"."""
    return word in STOP or _is_verb(word)


def _says(subject: str, value: str) -> bool:
    """Whether all words of a value that mean something stand in the subject."""
    known, words = set(_WORDS.findall(subject.casefold())), _WORDS.findall(value.casefold())
    return all(word in known for word in words if word not in STOP)


def _is_finite(word: str) -> bool:
    """Whether a word is a form of a verb that can follow a name, "leaves" and "was", but not "pieces"."""
    return word in AUXILIARIES or word in HAVE or known_form(word, plain=False) is not None or word.endswith("ed")


def _is_verb(word: str) -> bool:
    """Whether a sentence that begins with this word lacks its subject, as "Lost about two"."""
    return known_form(word, plain=True) is not None or is_participle(word)


def _refined(kind: str, value: str) -> str:
    """Returns the kind that a value is asked for as, by its own form and unit."""
    own = kind_of(value)
    if own == "year" and kind == "date":
        return "year"
    if kind in ("label", "kind", "thing", "origin") and re.fullmatch(NAME, value) and not value.isupper():
        return "giver" if kind == "origin" else "name"
    if own in _OWN_KINDS and not (own == "time" and kind == "amount"):
        return _OWN_KINDS[own]
    if kind == "place" and _is_time(re.sub(r"^\w+ (?:an? )?", "", value)):
        return "date"
    if kind == "name" and re.search(rf" {STREET}$", value):
        return "address"
    counted = _COUNTED.fullmatch(value)
    if counted is None or counted["unit"] in STOP or kind in _NOT_COUNTED:
        return kind
    is_number = not re.match(r"an?\b", value)
    return _UNIT_KINDS.get(counted["unit"], "number of" if is_number else kind)


def _is_time(content: str) -> bool:
    return is_time(content) or kind_of(content) == "duration"
