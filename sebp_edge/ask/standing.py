"""Whether a reply stands in a text: its values, names and most of its words are there, and it turns nothing round."""

import re
from bisect import bisect

from sebp_edge.ask.sentences import beginnings, closest, split
from sebp_edge.ask.terms import is_small, plain, terms
from sebp_edge.ask.values import MONTH, values

# The least share of a reply's words, those of the question aside, that the text must have.
MIN_SUPPORT = 0.6
# A value that is there may have so many words around it that are not, such as "number".
FEW_WORDS = 2
# How many words before a negation and after it it is about; "without" is about few.
BEFORE, AFTER, AFTER_WITHOUT = 3, 7, 2

# In plain texts, in the languages of whose small words `terms` has lists; "no. 12" is none.
_NEGATION = re.compile(
    r"\b(?:not|no(?!\W*\d)|never|none|nobody|nothing|neither|nor|without|cannot|\w+n['’]t|(?:do|does|did|is|was|ca)nt|"
    r"nicht|nichts|nie|niemals|niemand|kein\w*|ohne|weder|niet|niets|nooit|geen|zonder|pas|jamais|rien|aucune?|sans|"
    r"nunca|jamas|sin|ningun[ao]?|nadie|nada|non|nessun[ao]?|senza|niente|nao|nem|sem|nenhuma?|ikke|inte|aldrig|не|нет)\b"
    r"|[不没沒無]|ない|ません|않"
)
_WITHOUT = {"without", "ohne", "zonder", "sans", "sin", "senza", "sem"}
_CLAUSE_END = re.compile(r"[,;:]\s+|\s[-–—]\s|\bbut\b|\baber\b|\bmais\b|\bpero\b")
# What a model says of itself, of its text or of its failure, in plain texts.
_TALK = re.compile(
    r"\b(?:sorry|apolog\w+|confusion|unfortunately|as an ai|language model|assistant|no information|leider|lo siento|"
    r"tut mir leid|entschuldig\w*|desolee?|mi dispiace|i (?:cannot|can not|can['’]t|am unable|do(?: not|n['’]t) have)|"
    r"(?:text|passage|note|document|context)s? (?:does|do|did) ?n[o'’]t|"
    r"(?:is|are|was) not (?:mentioned|provided|specified|stated|given))\b"
)
# Mail addresses, links, paths, file names and codes.
_EXACT = re.compile(r"\S*(?:@|://|www\.|(?<!\d)/|[^\W\d_]\.[^\W\d_]{2,}|[^\W\d_][-_]?\d)\S*")
_AROUND = ".,;:!?()[]<>{}\"'`*“”’"
_ANY_WORD = re.compile(r"[\w'’]+")
_WORD = re.compile(r"(^|[.!?:]\s+)?\b([^\W\d_]\w+)(?=(?:,?\s+([^\W\d_]))?)")
_YES_OR_NO = {"yes", "no", "ja", "nein", "nee", "oui", "non", "si"}
# What stands behind a number, but for parts of dates and times.
_UNIT = re.compile(rf"\d\.?\s?(?!{MONTH}|(?:[ap]\.?m|st|nd|rd|th|h|uhr|o['’]?clock)\b)([^\W\d_]+)")


def stands_in(reply: str, question: str, text: str) -> bool:
    """Whether a text has the values, names and most words of a reply, and says no opposite of it.

    Every date, time and number must be there in any form, every name, address, link and code as it is; those that the
    question has say nothing. A reply that only repeats the question is none, and so is what a model says of itself.
    """
    given, asked, there = (values(plain(each)) for each in (reply, question, text))
    if any(not any(date.may_be(other) for other in there.dates + asked.dates) for date in given.dates):
        return False
    if given.times - there.times - asked.times or given.numbers - there.numbers - asked.numbers:
        return False
    words, known = terms(given.rest), {*terms(text), *terms(question)}
    if not _names(reply) & set(words) <= known or not _is_exact(reply, f"{text}\n{question}"):
        return False
    if not _units(reply) <= _units(text) | _units(question) | beginnings(text):
        return False
    if _is_talk(reply, text) or _is_turned(reply, question, text):
        return False
    own = {word for word in words if not is_small(word)} - set(terms(question)) - _YES_OR_NO
    found = own & set(terms(text))
    has_value = bool(given.dates or given.times - asked.times or given.numbers - asked.numbers)
    if has_value and len(own) <= FEW_WORDS:
        return True
    return bool(found) and len(found) >= MIN_SUPPORT * len(own)


def _names(reply: str) -> set[str]:
    """Returns the capitalised words of a reply, but not a first word that goes on in small letters."""
    return {
        plain(found[2])
        for found in _WORD.finditer(reply)
        if not is_small(plain(found[2]))
        and found[2][0].isupper()
        and (found[1] is None or not found[2].istitle() or not (found[3] or "").islower())
    }


def _is_exact(reply: str, text: str) -> bool:
    """Whether each mail address, link and code of a reply is in a text letter by letter."""
    there = text.casefold()
    return all(exact.strip(_AROUND).casefold() in there for exact in _EXACT.findall(reply))


def _is_talk(reply: str, text: str) -> bool:
    there = plain(text)
    return any(said not in there for said in _TALK.findall(plain(reply)))


def _is_turned(reply: str, question: str, text: str) -> bool:
    """Whether only one of a reply and of the words that it is from has a negation, but for one in the question."""
    said, sentence = beginnings(reply), plain(closest(split(text), reply, question))
    denied = _NEGATION.findall(plain(reply))
    denials = len(denied) - (len(denied) > 1 and denied[0] in _YES_OR_NO)  # "No, do not" says it twice
    if denials > len(_NEGATION.findall(sentence)):
        return True
    there = any(_is_denied(clause, said) for clause in _CLAUSE_END.split(sentence))
    return (denials > 0) != there and (denials > 0 or not _NEGATION.search(plain(question)))


def _is_denied(clause: str, said: set[str]) -> bool:
    """Whether a clause, in plain form, has a negation near one of these words."""
    words = [found.start() for found in _ANY_WORD.finditer(clause)]
    near = [number for number, found in enumerate(_ANY_WORD.findall(clause)) if beginnings(found) & said]
    for found in _NEGATION.finditer(clause):
        at, after = bisect(words, found.start()) - 1, AFTER_WITHOUT if found[0] in _WITHOUT else AFTER
        if any(at - BEFORE <= number <= at + after for number in near):
            return True
    return False


def _units(text: str) -> set[str]:
    return beginnings(" ".join(_UNIT.findall(plain(text))))
