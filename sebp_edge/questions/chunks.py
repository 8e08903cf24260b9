"""Splits what follows a verb into parts: its object, times, places, reasons."""

import re
from dataclasses import dataclass

from sebp_edge.questions.subjects import DETERMINERS
from sebp_edge.questions.values import is_time, kind_of
from sebp_edge.questions.verbs import AUXILIARIES, BASES, BE, HAVE, PAST, THIRD
from sebp_edge.questions.word_lists import listed

_PLACE = listed(
    """
    in on at under behind near beside above below between inside outside opposite into onto over beneath along
    """
)
PREPOSITIONS = _PLACE | listed(
    """
    from to for with without by since until till before after during about through within across around
    """
)
SUBORDINATORS = listed(
    """
    if unless than as whether whatever whoever although though whereas
    """
)
CUTS = listed(
    """
    which who whom where but so then yet hence
    """
)
TIME_WORDS = listed(
    """
    yesterday today tomorrow tonight daily weekly monthly yearly annually twice once
    """
)
_TIME_STARTS = re.compile(
    r"(?:every|each|last|next|this) (?:other |second |third |two |three |four |six |\d+ )?(?:day|night|morning"
    r"|afternoon|evening|week|weekend|month|year|spring|summer|autumn|winter|hour|\w+day|January|February|March|April|May|June|July|August"
    r"|September|October|November|December)"
)
ADVERBS = listed(
    """
    always never usually also still already just often now only last first finally originally recently mostly soon
    normally currently generally later
    """
)
PARTICLES = listed(
    """
    up out off down away back
    """
)
FIRST_PERSONS = frozenset({"i", "we", "you"})
THIRD_PERSONS = frozenset({"he", "she", "it", "they"})
_DURATION = re.compile(
    r"(?:about |around |almost |over )?(?:\d[\d.,]*|half an|an|a|one|two|three|four|five|six|seven|eight|nine|ten"
    r"|eleven|twelve|fifteen|twenty|thirty|forty|fifty|sixty|ninety)(?: or \w+| to \w+|-\w+)? "
    r"(?:seconds?|minutes?|hours?|days?|nights?|weeks?|months?|years?)\b"
)
_IDIOMS = listed(
    """
    case fact time least most all full order general particular foot touch charge use work once course total advance
    english german french spanish italian swedish danish norwegian dutch portuguese
    it them him her this that which what whom me us you mind sight love part
    """
)
# Words that what follows belongs to.
_OPEN = PREPOSITIONS | DETERMINERS | {"and", "of"}
_SPEAKERS = frozenset({"say", "think", "know", "hope", "believe", "tell", "claim", "mean", "ask", "wonder", "decide"})


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of what follows the verb.

    Attributes:
        text: as in the sentence.
        kind: "object", "time", "duration", "temperature", "price", "place", "reason", "content", "with", "by", "for",
            "from", "to" or "other".
        preposition: its first words; empty if there is none.
        content: what follows the preposition.
    """

    text: str
    kind: str
    preposition: str = ""
    content: str = ""


def bare(token: str) -> str:
    return token.strip('"“”()[],;:.!?*')


def chunks_of(tokens: list[str], base: str) -> tuple[Chunk, ...]:
    """Splits what follows a verb; empty if it is not surely understood."""
    groups, current = [], []
    for index, token in enumerate(tokens):
        word = bare(token).lower()
        before = tokens[index - 1] if index else ""
        if word in SUBORDINATORS:
            return ()
        if word == "because" and tokens[index + 1 : index + 2] != ["of"]:
            groups.append(current)
            reason, made = _rest(tokens, index), _grouped(groups)
            if not reason or made is None:
                return ()
            return (*made, Chunk(f"because {reason}", "reason", "because", reason))
        if word == "that" and base in _SPEAKERS and index <= 1 and (content := _rest(tokens, index)):
            return (Chunk(f"that {content}", "content", "that", content),)
        if (
            word in CUTS
            or word == "that"
            or before.endswith((";", ":", "–", "—", "?", "!"))
            or token in ("–", "—", "-")
        ):
            break
        if before.endswith(".") and index and len(before) > 4:
            break
        if word in ("and", "or") and _begins_clause(tokens[index + 1 :]):
            break
        if word in ("when", "while") or (
            word in ("after", "before", "until", "since", "till") and _begins_clause(tokens[index + 1 :])
        ):
            groups.append(current)
            made = _grouped(groups)
            text = re.split(r"[,;:]", " ".join(tokens[index:]))[0].strip()
            return (*made, Chunk(text, "time", word, text)) if made else ()
        if before.endswith(",") and not _continues(tokens, index, current):
            if word in DETERMINERS or kind_of(word) == "number":
                return ()  # More items, so that those before are not the whole answer.
            break
        begins = word in PREPOSITIONS or word in TIME_WORDS or _TIME_STARTS.match(" ".join(tokens[index : index + 3]))
        if begins and current and current[-1].lower() not in _OPEN and not _attaches(word, current, base):
            groups.append(current)
            current = []
        current.append(token)
    groups.append(current)
    return _grouped(groups) or ()


def _rest(tokens: list[str], index: int) -> str:
    """Returns the text after a word, without marks at its ends."""
    return " ".join(tokens[index + 1 :]).strip(" ,.;")


def _begins_clause(tokens: list[str]) -> bool:
    """Whether what follows "and" has a verb of its own."""
    if not tokens:
        return False
    words = [bare(token).lower() for token in tokens[:5]]
    if words[0] in FIRST_PERSONS | THIRD_PERSONS | AUXILIARIES | HAVE | {"there", "then"} | ADVERBS:
        return True
    if words[0] in PAST or words[0] in THIRD or (words[0] in BASES and len(words) > 1 and words[1] in DETERMINERS):
        return True
    if len(words) > 1 and words[1] in THIRD and tokens[0][:1].isupper():
        return True
    return any(word in AUXILIARIES | HAVE or (word in PAST and word not in BASES) for word in words[1:])


def _continues(tokens: list[str], index: int, current: list[str]) -> bool:
    """Whether a comma before a token separates items or parts of a date rather than clauses."""
    word = bare(tokens[index]).lower()
    rest = " ".join(tokens[index:])
    if word in PREPOSITIONS or re.match(r"(?:19|20)\d\d\b", rest) or is_time(bare(rest)):
        return not word.endswith("ing")
    if word in ("and", "or"):
        return not _begins_clause(tokens[index + 1 :]) and "," in " ".join(current[:-1])
    items = re.split(r", (?:and )?| and ", rest)
    return (" and " in rest or ", and " in rest) and all(len(item.split()) <= 4 for item in items)


def _attaches(word: str, current: list[str], base: str) -> bool:
    """Whether a preposition belongs to the noun before it."""
    first = bare(current[0]).lower()
    if first in PREPOSITIONS:
        return (word == "to" and first in ("next", "from")) or (
            word in ("in", "at", "from", "on", "to")
            and bare(current[-1]).lower() in ("half", "morning", "evening", "afternoon")
        )
    if base in BE or base in HAVE or base == "have":
        return word in ("to", "for", "about", "from") or (base == "have" and word == "with")
    return first == "next" or (word == "to" and bare(current[-1]).lower() in ("next", "key", "keys", "way", "close"))


def _grouped(groups: list[list[str]]) -> tuple[Chunk, ...] | None:
    chunks = []
    for group in groups:
        text = " ".join(group).strip(" ,;:.")
        if not text:
            continue
        chunk = chunk_of(text)
        if chunk.kind == "place" and chunks and chunks[-1].kind == "place":
            before = chunks.pop()
            chunk = Chunk(f"{before.text} {text}", "place", before.preposition, f"{before.content} {text}")
        chunks.append(chunk)
    if any(chunk.kind == "object" for chunk in chunks[1:]):
        return None
    if chunks and chunks[0].kind == "object":
        chunks[:1] = _split_object(chunks[0].text)
    return tuple(chunks)


def _split_object(text: str) -> list[Chunk]:
    """Splits "us the first swarm" and "us up"."""
    first, _, rest = text.partition(" ")
    if first in ("me", "us", "him", "her", "them", "you") and rest and first != "her":
        kind = "other" if rest in PARTICLES else "object"
        return [Chunk(first, "other"), Chunk(rest, kind, "", rest)]
    start, _, last = text.rpartition(" ")
    if start and last in PARTICLES:
        return [Chunk(start, "object", "", start), Chunk(last, "other")]
    return [Chunk(text, "object", "", text)]


def is_bare_time(text: str) -> bool:
    """Whether a text is a time without a preposition, as "11 October", "every Tuesday" or "two weeks ago"."""
    first = text.split(" ")[0].lower()
    is_date = first not in PREPOSITIONS and kind_of(text) in ("date", "weekday")
    return is_date or first in TIME_WORDS or bool(_TIME_STARTS.match(text) or re.fullmatch(r".* ago", text))


def chunk_of(text: str) -> Chunk:
    first, _, content = text.partition(" ")
    word = first.lower()
    if is_bare_time(text):
        return Chunk(text, "time", "", text)
    if text.startswith("next to "):
        return Chunk(text, "place", "next to", text[8:])
    if word not in PREPOSITIONS:
        return Chunk(text, "object", "", text)
    return Chunk(text, _kind_of_phrase(word, content), word, content)


def _kind_of_phrase(word: str, content: str) -> str:
    kind, low = kind_of(content), content.lower()
    if not content or low in _IDIOMS or word in ("without", "about", "through", "around"):
        return "other"
    if word == "to" and (content.split()[0] in BASES or (content.isalpha() and content.islower())):
        return "other"
    if word == "for" and _DURATION.match(content):
        return "duration"
    if kind == "temperature":
        return "temperature" if word == "at" else "other"
    if kind == "money":
        return "price" if word in ("for", "at") else "other"
    if (is_time(content) or kind in ("date", "time", "year", "weekday")) and word not in ("with", "to", "about", "for"):
        return "time"
    if kind == "duration":
        return "time" if word in ("in", "within", "after") else "other"
    if len(content.split()) > 8:
        return "other"
    if word in ("during", "since", "until", "till", "before", "after"):
        return "time"
    if word in ("with", "by", "for", "from", "to"):
        return word
    if word == "at" and re.match(r"\d+ [A-Z]", content):
        return "place"
    return "place" if word in _PLACE and not re.match(r"(?:least|most|once|first|all|\d+)\b", low) else "other"
