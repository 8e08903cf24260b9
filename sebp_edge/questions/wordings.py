"""Words a fact as questions, in many ways; two of them only for questions that are never trained on."""

import re

from sebp_edge.questions.facts import Core, Fact, upper_first
from sebp_edge.questions.question import Question
from sebp_edge.questions.subjects import FUNCTION_WORDS
from sebp_edge.questions.word_lists import listed

MAX_WORDINGS = 14
# {d}: the question within a sentence; {i}: the indirect question. In order of use: each core, then these by turns.
_OF_CORES = (
    "Can you tell me {i}?",
    "According to my notes, {d}",
    "Do you know {i}?",
    "Remind me {i}.",
    "I forgot {i}.",
    "Please tell me {i}.",
    "What do my notes say: {d}",
    "Help me remember {i}.",
)
_OF_PHRASES = ("Tell me {p}.", "{p}, please?", "I need {p}.")
_OF_CLOZES = ("Fill in the gap: {c}", "{c} What belongs in the gap?")
_PREFIXES = ("About {t}: ", "{t}: ", "About {t}, ")
# In no wording that is trained on.
_KEPT_OUT = ("I would like to know {i}.", "Could you check {i}?")
_GIST = ("{d}", "According to my notes, {d}", "Please tell me {i}.", "Can you tell me {i}?", "Remind me {i}.")

# With the text's own words {q} only, for languages without rules.
_NEUTRAL = ("{q}?", "{q}: ?", "{q} = ?", "? {q}", "{q}: ___", "{q} …?", "[{q}]?", "{q} ??")
_NEUTRAL_KEPT_OUT = ("{q} – ?", "… {q}?")

# Words at the beginning of a question that are no names.
_STARTS = listed(
    """
    what who whom could whose when where why how which at in on for with to from by can according do remind i tell
    please help fill the a an my our your his her their is are was were until since did does
    """
)


def worded(fact: Fact) -> Question:
    if not fact.cores:
        return _neutral(fact)
    if fact.is_gist:
        return Question(_different(_filled(_GIST, fact.cores, fact.topic)), (), fact.answer)
    prefix = _prefix(fact, 0)
    made = [_prefixed(core.direct, _prefix(fact, turn)) for turn, core in enumerate(fact.cores[:4])]
    if fact.topic and _says_enough(fact.cores[0].direct):
        made.append(fact.cores[0].direct)
    made += _filled(_OF_CORES, fact.cores, fact.topic)
    if fact.keywords:
        made.insert(2, _keywords(fact))
    if fact.phrase:
        phrases = [_prefixed(upper_first(template.format(p=fact.phrase)), prefix) for template in _OF_PHRASES]
        made[4:4] = phrases
    if fact.cloze:
        clozes = [template.format(c=upper_first(fact.cloze)) for template in _OF_CLOZES]
        made[6:6] = [_prefixed(cloze, f"About {fact.topic}. " if fact.topic else "", lowers=False) for cloze in clozes]
    whole = [core for core in fact.cores if core.is_whole]
    kept_out = [
        _prefixed(template.format(i=whole[turn % len(whole)].indirect), prefix)
        for turn, template in enumerate(_KEPT_OUT)
    ]
    return Question(_different(made), tuple(kept_out), fact.answer)


def _filled(templates: tuple[str, ...], cores: tuple[Core, ...], topic: str | None) -> list[str]:
    """Fills each template with one of the cores, by turns."""
    made = []
    for turn, template in enumerate(templates):
        core = cores[turn % len(cores)]
        text = template.format(d=_lower_start(core.direct), i=core.indirect)
        made.append(_prefixed(upper_first(text), _PREFIXES[turn % len(_PREFIXES)].format(t=topic) if topic else ""))
    return made


def _says_enough(question: str) -> bool:
    """Whether a question is likely to be clear without its topic."""
    words = re.findall(r"[\w'’-]+", question.lower())
    return sum(word not in FUNCTION_WORDS for word in words) >= 4 and not {"it", "they", "them"}.intersection(words)


def _lower_start(text: str) -> str:
    first = text.split(" ", 1)[0]
    return text[:1].lower() + text[1:] if first != "I" and first.lower() in _STARTS else text


def _prefix(fact: Fact, turn: int) -> str:
    return _PREFIXES[turn % len(_PREFIXES)].format(t=fact.topic) if fact.topic else ""


def _prefixed(text: str, prefix: str, *, lowers: bool = True) -> str:
    return upper_first(prefix) + _lower_start(text) if prefix and lowers else upper_first(prefix + text)


def _keywords(fact: Fact) -> str:
    return f"{fact.topic}: {fact.keywords}?" if fact.topic else f"{fact.keywords}?"


def _neutral(fact: Fact) -> Question:
    made = [template.format(q=fact.keywords) for template in _NEUTRAL]
    kept_out = [template.format(q=fact.keywords) for template in _NEUTRAL_KEPT_OUT]
    return Question(_different(made), tuple(kept_out), fact.answer)


def _different(wordings: list[str]) -> tuple[str, ...]:
    cleaned = [re.sub(r"\s+", " ", wording).strip() for wording in wordings]
    return tuple(dict.fromkeys(cleaned))[:MAX_WORDINGS]
