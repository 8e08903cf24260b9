"""Tells questions about several notes, and puts what was found in the order of the notes' dates."""

import re

from sebp_edge.ask.index import Hit
from sebp_edge.ask.terms import plain

# The most passages, and how strong each has to be beside the strongest.
MOST = 8
SHARE = 0.5

# "When did I last", "which ferries did I" and "how often", in seven languages.
_WHEN = r"\b(?:when|wann|wanneer|quand|cuando|quando)\b.*"
_LAST = re.compile(rf"{_WHEN}\b(?:last|latest|zuletzt|letzte[nrs]?|laatst|derniere?|ultima|ultimo)\b")
_SEVERAL = re.compile(
    r"\b(?:which|what) (?:\w+ )?\w{2,}s(?<![sui]s) (?:did|do|are|were|have|had|can|should|will|would)\b|"
    r"\b(?:welche (?:\w+ )?(?!\w*ion)\w{3,}(?:en|ern|eln)|welke (?:\w+ )?\w{3,}en|quel(?:le)?s|cuales|quali|quais)\b|"
    r"\b(?:(?:list|name) (?:all|the)|how often|how many times|every time|wie oft|hoe vaak|combien de fois|"
    r"cuantas veces|quante volte|quantas vezes)\b|"
    rf"{_WHEN}\b(?:first|zuerst|ersten mal|eerst|premiere fois|primera vez|prima volta|primeira vez)\b"
)


def asks_for_several(question: str) -> bool:
    """Whether a question may have its answer in several notes, or in the first or last of them."""
    asked = plain(question)
    return bool(_SEVERAL.search(asked) or _LAST.search(asked))


def in_order(question: str, hits: list[Hit]) -> list[Hit]:
    """Returns passages that are at least half as strong as the first, one of each note and day, undated ones last.

    The latest comes first if the question asks when something was last.
    """
    strong = [hit for hit in hits if hit.strength >= SHARE * hits[0].strength]
    of_notes = list({(hit.passage.document, hit.passage.date): hit for hit in reversed(strong)}.values())
    is_last = bool(_LAST.search(plain(question)))
    dated = sorted((hit for hit in of_notes if hit.passage.date), key=lambda hit: hit.passage.date, reverse=is_last)
    return dated + [hit for hit in reversed(of_notes) if not hit.passage.date]
