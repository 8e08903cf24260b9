"""Cuts a note into passages: its pairs, items, cells and sentences, and the clauses of long ones.

Together they hold all that the note says, so that whatever stands in it can be asked for.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from sebp_edge.questions.notes import ABBREVIATION, Note, Section

# Longer sentences are cut between their clauses, else within them.
MAX_WORDS = 20

_CLAUSE = re.compile(
    r"(?<=[,;:)])\s+(?!\d)|\s+[–—-]\s+|\s+(?=\()"
    r"|\s+(?=(?:and|but|so|because|which|who|where|when|while|then|that|until|before|after|though|for|with)\b)"
)
# A line of measurements or ids without spaces, and a part of it that counts as a word; longer than any address.
_LONG_WORD = re.compile(r"\S{300,}")
_PART_OF_WORD = re.compile(r"\S{40,80}[,;|](?=\S)|\S{80}(?=\S)")
_LOWER_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[a-z])")


@dataclass(frozen=True, slots=True)
class Passage:
    """A few words of a note, and the heading that they stand under; "" if there is none."""

    text: str
    heading: str = ""


def passages_of(note: Note) -> list[Passage]:
    """Returns the passages of a note, each of at most `MAX_WORDS` words; none twice."""
    found = [
        Passage(piece, section.heading)
        for section in note.sections
        for text in _texts_of(section)
        for sentence in _with_lower_case(text)
        for piece in pieces(sentence, MAX_WORDS)
    ]
    return list(dict.fromkeys(found))


def pieces(sentence: str, max_words: int) -> list[str]:
    """Cuts a sentence into about equal pieces of at most so many words, between its clauses if possible."""
    sentence = _LONG_WORD.sub(lambda word: _PART_OF_WORD.sub(r"\g<0> ", word[0]), sentence)
    words = len(sentence.split())
    if words <= max_words:
        return [sentence]
    enough = 0.8 * words / -(-words // max_words)
    cut: list[str] = []
    for clause in _clauses(sentence):
        for part in _parts(clause.split(), max_words):
            before = len(cut[-1].split()) if cut else max_words
            if before < enough and before + len(part) <= max_words:
                cut[-1] += f" {' '.join(part)}"
            else:
                cut.append(" ".join(part))
    return [piece.strip(" ,;") for piece in cut if piece.strip(" ,;")]


def _clauses(sentence: str) -> Iterator[str]:
    """Yields the clauses of a sentence; what stands in quotation marks is not cut."""
    begin = 0
    for end in _CLAUSE.finditer(sentence):
        if sentence.count('"', 0, end.start()) % 2 == 0:
            yield sentence[begin : end.start()]
            begin = end.end()
    yield sentence[begin:]


def _parts(words: list[str], size: int) -> list[list[str]]:
    return [words[begin : begin + size] for begin in range(0, len(words), size)]


def _texts_of(section: Section) -> Iterator[str]:
    yield from (f"{pair.key}: {pair.value}" for pair in section.pairs)
    listed = set()
    for introduction, items in section.lists:
        listed.update(items)
        yield from (f"{introduction}: {item}" if introduction else item for item in items)
    for header, *rows in section.tables:
        yield from (text for row in rows for text in _cells(header, row))
    yield from (sentence for sentence in section.sentences if sentence.rstrip(".;,") not in listed)


def _cells(header: list[str], row: list[str]) -> Iterator[str]:
    """Yields each cell with the first one of its row, "Hotel Alba, Per night: £69"."""
    first, *others = row
    for name, cell in zip(header[1:], others, strict=False):
        if cell:
            yield f"{first}, {name}: {cell}" if first and name else cell


def _with_lower_case(text: str) -> list[str]:
    """Splits before sentences that begin in lower case, too; "approx." ends none."""
    sentences: list[list[str]] = []
    for part in _LOWER_SENTENCE.split(text):
        if sentences and ABBREVIATION.search(sentences[-1][-1]):
            sentences[-1].append(part)
        else:
            sentences.append([part])
    return [" ".join(parts) for parts in sentences]
