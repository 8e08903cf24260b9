"""Takes English sentences apart: subject, verb, and what follows it.

A sentence that the rules do not surely understand is not taken apart.
"""

import re
from dataclasses import dataclass, replace

from sebp_edge.questions.chunks import (
    ADVERBS,
    CUTS,
    FIRST_PERSONS,
    PARTICLES,
    PREPOSITIONS,
    SUBORDINATORS,
    THIRD_PERSONS,
    TIME_WORDS,
    Chunk,
    bare,
    chunk_of,
    chunks_of,
    is_bare_time,
)
from sebp_edge.questions.facts import genitive, lower_first
from sebp_edge.questions.notes import Note
from sebp_edge.questions.subjects import (
    DETERMINERS,
    FUNCTION_WORDS,
    Words,
    is_bare_noun,
    is_no_subject,
    is_person_name,
    is_surely_person,
)
from sebp_edge.questions.values import has_date, is_time
from sebp_edge.questions.verbs import (
    AUXILIARIES,
    BASES,
    BE,
    HAVE,
    THIRD,
    Verb,
    is_participle,
    known_form,
    likely_form,
    third_person,
)
from sebp_edge.questions.word_lists import has_plural_s, is_genitive, listed

MAX_SENTENCE_WORDS = 40
_MAX_SUBJECT_WORDS = 9

PRONOUNS = listed(
    "nothing everything something anything nobody everybody somebody anybody everyone someone anyone none both most"
)
# Verbs that need an object; where it is missing, a note leaves out "was": "keys handed to Sam".
_TAKES_OBJECT = listed(
    """
    pay send hand lend book order buy sell post sign store put repair replace paint fix mend collect deliver file cancel
    reserve borrow ship mail find bring service install refund invoice wash clean
    """
)


@dataclass(frozen=True, slots=True)
class Clause:
    """A statement.

    Attributes:
        subject: as it stands within a sentence, pronouns replaced.
        is_person, is_plural: of the subject.
        is_pronoun: whether it is "I", "we", "you" or "there".
        auxiliary: the word that changes places with the subject in a question; None if "do" is needed.
        main: the rest of the verb, as in the sentence.
        verb: the finite verb, without an auxiliary.
        chunks: what follows the verb.
        apposition: what the subject is said to be in passing, "my sister".
    """

    subject: str
    is_person: bool
    is_plural: bool
    is_pronoun: bool
    auxiliary: str | None
    main: str
    verb: Verb | None
    chunks: tuple[Chunk, ...]
    apposition: str = ""

    @property
    def is_copula(self) -> bool:
        return self.auxiliary in BE and not self.main


@dataclass(frozen=True, slots=True)
class Before:
    """What pronouns at the beginning of a sentence stand for.

    Attributes:
        person: whom the sentences before are about.
        is_on_title: whether "it" is what the note's title names.
    """

    person: str | None
    is_on_title: bool


def clause_of(sentence: str, note: Note, antecedent: Before) -> Clause | None:
    """Takes a sentence apart; None if it is not surely understood."""
    tokens = sentence.strip().strip("\"“”'()*").rstrip(".!").split()
    if not 3 <= len(tokens) <= MAX_SENTENCE_WORDS or sentence.rstrip().endswith(("?", "…", ":")) or "http" in sentence:
        return None
    lowered = [bare(token).lower() for token in tokens]
    if (
        any(word in ("not", "neither", "nor") or word.endswith(("n't", "n’t")) for word in lowered)
        or "no" in lowered[:4]
    ):
        return None
    tokens, moved = _without_leading_time(tokens)
    if len(tokens) < 3:
        return None
    if moved is None and lowered[0] in PREPOSITIONS | SUBORDINATORS | {"when", "while", "because", "there's", "this"}:
        return None
    imperative = _imperative(tokens)
    clause = imperative or _statement(tokens, note, antecedent)
    if clause and moved:
        clause = replace(clause, chunks=(*clause.chunks, moved))
    return clause


def _without_leading_time(tokens: list[str]) -> tuple[list[str], Chunk | None]:
    """Returns the tokens without "In 2019," or "Every Tuesday" at the beginning, and that as a chunk."""
    if re.fullmatch(r"[\d./-]{8,10}[:,]", tokens[0]) and has_date(tokens[0]):
        return tokens[1:], Chunk(f"on {tokens[0][:-1]}", "time", "on", tokens[0][:-1])
    for end in range(1, min(8, len(tokens) - 2)):
        following = tokens[end].lower()
        if tokens[end - 1].endswith(",") or following in ("i", "we", "he", "she", "they"):
            text = lower_first(" ".join(tokens[:end]).rstrip(","))
            first = text.split(" ")[0].lower()
            rest = text.split(" ", 1)[-1]
            if first in PREPOSITIONS and is_time(rest):
                return tokens[end:], chunk_of(text)
            if is_bare_time(text):
                return tokens[end:], Chunk(text, "time", "", text)
            return tokens, None
    return tokens, None


def _imperative(tokens: list[str]) -> Clause | None:
    first, second = bare(tokens[0]), bare(tokens[1])
    base = first.lower()
    if base not in BASES or not first[:1].isupper() or tokens[0] != first or base in ("have", "cost"):
        return None
    starts = second.lower() in DETERMINERS | PREPOSITIONS | PARTICLES or second[:1].isupper() or second[:1].isdigit()
    if not starts and (len(tokens) < 3 or second.lower() in FUNCTION_WORDS or known_form(second.lower(), plain=False)):
        return None
    chunks = chunks_of(tokens[1:], base)
    if not chunks:
        return None
    main, chunks = _with_particle(base, chunks)
    return Clause("I", True, False, True, "should", main, Verb(base, "plain"), chunks)


def _statement(tokens: list[str], note: Note, antecedent: Before) -> Clause | None:
    apposition = ""
    end = _subject_end(tokens, note.words)
    if end is None:
        tokens, apposition = _without_apposition(tokens)
        end = _subject_end(tokens, note.words) if apposition else None
    if end is None:
        return None
    named = _named_subject(tokens[:end], bare(tokens[end]).lower(), note, antecedent)
    if named is None:
        return None
    subject, is_person = named
    low = subject.lower()
    is_plural = low in ("we", "they", "you") or " and " in low or _is_plural_noun(_head(subject))
    rest = tokens[end:]
    adverbs = []
    while rest and bare(rest[0]).lower() in ADVERBS:
        adverbs.append(rest.pop(0))
    if not rest:
        return None
    finite = bare(rest[0]).lower()
    rest = rest[1:]
    pronoun = low in (*FIRST_PERSONS, "there")
    if finite in AUXILIARIES or (finite in HAVE and _follows_participle(rest)):
        return _with_auxiliary(subject, is_person, is_plural, pronoun, finite, rest, adverbs, apposition)
    verb = known_form(finite, plain=is_plural or low == "i") or likely_form(finite)
    if finite in ("do", "does", "did") and rest and bare(rest[0]).lower() in BASES:
        return None
    if (finite in HAVE and rest[:1] == ["to"]) or tokens[end].endswith((",", ";", ":")):
        return None
    if verb is None or (adverbs and adverbs[0] in ("last", "first")):
        return None
    if low == "there":
        return None
    chunks = chunks_of(rest, verb.base or "")
    if not chunks:
        return None
    needs_object = is_participle(finite) and (verb.base or finite.removesuffix("ed")) in _TAKES_OBJECT
    has_object = chunks[0].kind == "object" and chunks[0].text not in PARTICLES
    if needs_object and not has_object and not is_person:
        was, rest = "were" if is_plural else "was", [finite, *rest]
        return _with_auxiliary(subject, is_person, is_plural, pronoun, was, rest, adverbs, apposition)
    main, chunks = _with_particle(finite, chunks)
    main = " ".join([*adverbs, main])
    return Clause(subject, is_person, is_plural, pronoun, None, main, verb, chunks, apposition)


def _with_auxiliary(subject, is_person, is_plural, pronoun, finite, rest, adverbs, apposition) -> Clause | None:
    main = list(adverbs)
    while rest and bare(rest[0]).lower() in ADVERBS:
        main.append(rest.pop(0))
    if not rest or rest[0] in ("rather", "to"):
        return None
    word, base = bare(rest[0]).lower(), None
    if finite in BE:
        takes = (is_participle(word) or word.endswith("ing")) and rest[0][-1] not in ",;:"
        takes = takes and word not in ("during", "evening", "morning", "red", "spring", "set", "building", "wedding")
    elif finite in HAVE:
        takes = True
    else:
        takes = word in BASES or word == "be" or word.isalpha()
    if takes:
        main.append(word)
        base = word
        rest = rest[1:]
        if finite not in BE and word in ("be", "been") and rest and is_participle(bare(rest[0]).lower()):
            main.append(rest.pop(0))
    elif main:
        return None
    chunks = chunks_of(rest, base or finite)
    if not chunks:
        return None
    joined = " ".join(main)
    if takes:
        joined, chunks = _with_particle(joined, chunks)
    return Clause(subject, is_person, is_plural, pronoun, finite, joined, None, chunks, apposition)


def _follows_participle(rest: list[str]) -> bool:
    words = [bare(token).lower() for token in rest[:3]]
    while words and words[0] in ADVERBS:
        words.pop(0)
    return bool(words) and (is_participle(words[0]) or words[0] == "been") and words[0] not in ("set", "cut")


def _with_particle(main: str, chunks: tuple[Chunk, ...]) -> tuple[str, tuple[Chunk, ...]]:
    """Moves "up" of "picked up the parcel" to the verb."""
    first, _, rest = chunks[0].text.partition(" ")
    if chunks[0].kind == "object" and first in PARTICLES and rest and rest.split()[0] not in PREPOSITIONS:
        return f"{main} {first}", (Chunk(rest, "object", "", rest), *chunks[1:])
    if chunks[0].text in PARTICLES and len(chunks) > 1:
        return f"{main} {chunks[0].text}", chunks[1:]
    if chunks[0].text in ("place", "part") and main.split()[-1] in ("take", "takes", "took", "taken"):
        return f"{main} {chunks[0].text}", chunks[1:]
    return main, chunks


def _without_apposition(tokens: list[str]) -> tuple[list[str], str]:
    """Returns the tokens without ", my sister," after a name, and that."""
    joined = " ".join(tokens)
    match = re.match(r"((?:[A-Z][\w.'’-]* ?){1,3}), ((?:my|our|the|a|an|his|her) [^,]{2,50}), ", joined)
    if not match or len(match[2].split()) > 6:
        return tokens, ""
    return [*match[1].split(), *joined[match.end() :].split()], match[2]


def _subject_end(tokens: list[str], words: Words) -> int | None:
    """Returns where the verb stands, or the adverb before it."""
    first = bare(tokens[0]).lower()
    if first in FIRST_PERSONS | THIRD_PERSONS | {"there"}:
        return 1
    for index in range(1, min(_MAX_SUBJECT_WORDS + 1, len(tokens) - 1)):
        before, word = tokens[index - 1], bare(tokens[index]).lower()
        if before[-1] in ",;:.!?)" and not re.fullmatch(r"(?:Dr|Mr|Mrs|Ms|St|Prof)\.", before):
            return None
        if word in CUTS | SUBORDINATORS | {"that", "because", "when", "while"}:
            return None
        if tokens[index] != tokens[index].lower():
            continue
        last = bare(before).lower()
        if last in DETERMINERS | PREPOSITIONS | {"of", "and", "or", "very", "to"} or is_genitive(last):
            continue
        if word in ADVERBS and index + 1 < len(tokens) - 1:
            following = bare(tokens[index + 1]).lower()
            if following in AUXILIARIES | HAVE or known_form(following, plain=False):
                return index
            continue
        if word in AUXILIARIES | HAVE:
            return index
        if word in PREPOSITIONS:
            if index == 1 and first in BASES:
                return None
            continue
        following = bare(tokens[index + 1]).lower()
        if following in AUXILIARIES | HAVE:
            continue
        is_plural = _is_plural_noun(bare(before)) or " and " in " ".join(tokens[:index])
        verb = known_form(word, plain=is_plural)
        if verb is None and all(bare(token)[:1].isupper() for token in tokens[:index]) and words.is_name(bare(before)):
            verb = likely_form(word) if index <= 3 else None
        if verb is None and first in DETERMINERS and following in PREPOSITIONS | DETERMINERS and word.endswith("ed"):
            verb = likely_form(word)
        if verb is None:
            continue
        if verb.tense == "third" and is_plural and " of " not in f" {' '.join(tokens[:index])} ":
            continue
        if verb.tense == "past" and (following == "by" or _has_auxiliary_later(tokens, index)):
            return None
        # "The two packets garden centres sell": a noun rather than a verb.
        if verb.tense == "third" and (known_form(following, plain=False) or following in ("of",)):
            continue
        return index
    return None


def _has_auxiliary_later(tokens: list[str], index: int) -> bool:
    for token in tokens[index + 1 :]:
        if bare(token).lower() in BE | HAVE:
            return True
        if token[-1] in ",;:" or token.lower() in ("and", "but", "that", "which", "who", "because", "when"):
            return False
    return False


def _head(subject: str) -> str:
    """Returns the noun of a noun phrase, without what follows a preposition."""
    words = subject.split()
    for index, word in enumerate(words):
        if index and word.lower() in PREPOSITIONS | {"of"}:
            return words[index - 1]
    return words[-1]


# Given names that look like plurals.
_NAMES_IN_S = listed("""
    Agnes Alexis Andreas Anders Barnabas Carlos Charles Dolores Elias Frances Hannes Hans Ines James Jens Jonas Lars
    Lucas Lukas Marcos Mats Matthias Mercedes Nicholas Nicolas Niels Nils Phineas Rhys Silas Thomas Tobias Zacharias
""")


def _is_plural_noun(word: str) -> bool:
    low = bare(word)
    return low in ("people", "children", "feet", "mice", "men", "women", "potatoes") or (
        len(low) > 3 and has_plural_s(low) and not is_genitive(low)
    )


def _named_subject(tokens: list[str], finite: str, note: Note, antecedent: Before) -> tuple[str, bool] | None:
    """Returns the subject as it stands within a sentence, and whether it is a person; None if it is not clear."""
    text = " ".join(tokens).strip('"“”, ')
    low = text.lower()
    if not text:
        return None
    if low in FIRST_PERSONS:
        return ("I" if low == "i" else low), True
    if low == "there":
        return "there", False
    title = note.subject
    person, thing = antecedent.person, title.phrase if antecedent.is_on_title else None
    if low in ("he", "she"):
        person = person or (title.phrase if title.phrase and is_surely_person(title.phrase) else None)
        return (person, True) if person else None
    if low in ("it", "they"):
        is_plural = title.phrase is not None and _is_plural_noun(title.phrase)
        clear = thing and " and " not in thing and not title.is_person and is_plural == (low == "they")
        return (title.phrase, False) if clear else None
    first = bare(tokens[0])
    owner = {"his": person, "her": person, "its": None if title.is_person else thing}.get(first.lower())
    if owner and len(tokens) > 1:
        return f"{genitive(owner)} {' '.join(tokens[1:])}", False
    if first.lower() in ("his", "her", "its", "their", "this", "that", "these", "those", "what", "who", "how", "why"):
        return None
    if first.lower() in PRONOUNS | TIME_WORDS or "/" in text or "@" in text:
        return None
    is_alone = len(tokens) == 1 and not note.words.is_name(first)
    if is_alone and is_no_subject(first):
        return None
    if first.lower() in PREPOSITIONS | FUNCTION_WORDS - DETERMINERS - {"all", "every", "each", "one"}:
        return None
    if len(tokens) > 1 and tokens[1].lower() in PREPOSITIONS and note.words.is_name(first) and not first.islower():
        return text, is_person_name(first, note.words)
    is_third = finite in THIRD or finite in ("is", "was", "has")
    is_known_name = text in note.words.names or text in _NAMES_IN_S
    if len(tokens) == 1 and not is_third and not is_known_name and _is_plural_noun(text):
        return lower_first(text), False
    if first.lower() in ("next", "spare", "last", "current", "main") or (is_alone and is_bare_noun(first)):
        return f"the {lower_first(text)}", False
    is_person = is_person_name(text, note.words)
    if is_person or (first.lower() not in DETERMINERS and not _is_common_start(tokens, note.words)):
        return (lower_first(text) if first.lower() in DETERMINERS else text), is_person
    return lower_first(text), False


def _is_common_start(tokens: list[str], words: Words) -> bool:
    """Whether the first word of a sentence is no name."""
    first = bare(tokens[0])
    if not words.is_name(first):
        return True
    if first in words.names or is_genitive(first):
        return False
    return (len(tokens) == 1 and _is_plural_noun(first)) or (
        len(tokens) > 1 and tokens[1].islower() and tokens[1] != "and"
    )


def as_third_person(clause: Clause) -> str:
    """Returns the finite verb for "who" or "what" as the subject."""
    if clause.verb is None:
        return {"are": "is", "am": "is", "were": "was", "have": "has"}.get(clause.auxiliary, clause.auxiliary)
    if clause.verb.tense == "plain" and clause.verb.base:
        words = clause.main.split()
        return " ".join(third_person(word) if word == clause.verb.base else word for word in words)
    return clause.main
