"""Finds the passages of documents that a question is about: full-text search in memory.

The ranking is BM25, as SQLite's FTS5 computes it. A passage's score is the sum over the question's words, and a part of
what its whole document scores, since a note says in one place what it is about, and the rest in others.
"""

import math
import sqlite3
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath

from sebp_edge.ask.passages import Passage, passages_of
from sebp_edge.ask.terms import is_english, is_small, terms
from sebp_edge.errors import MachineError
from sebp_edge.values.documents import Document, as_json

# How much a word counts that stands in the document's name, a heading, or the text.
WEIGHTS = (2.0, 1.5, 1.0)
# How much the best score of another passage counts for each passage of the document.
SHARE_OF_DOCUMENT = 0.5
# Words of at least so many characters find longer ones with their beginning, such as German compounds, and shorter ones
# within them, in languages other than English.
MIN_COMMON = 5
# How much a word counts that says little.
SMALL = 0.2
# A question with fewer words that say something is searched with the one before it.
FEW_WORDS = 3
# The most words of a question that are searched: its rarest.
MAX_TERMS = 60

_QUERY = f"SELECT rowid, -bm25(passages, {', '.join(map(str, WEIGHTS))}) FROM passages WHERE passages MATCH ?"
# How many passages without a word are added to those of the documents, so that words are rare in few passages too.
OTHER_PASSAGES = 100
# Marks stems of English words, so that no other word is equal to one.
_STEM = "="

Key = tuple[str, str, str, str | None]  # of a document: its source, front matter, content and path


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage that was found.

    Attributes:
        strength: its score, divided by the square root of what the question's words count together, and of what a
            word counts that stands nowhere. So it neither grows with the number of notes, nor with the question.
    """

    passage: Passage
    strength: float


class Index:
    """Passages of documents, kept in memory only; `update` makes it hold others."""

    def __init__(self, documents: Iterable[Document] = ()):
        self._database = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA temp_store = MEMORY")
        try:
            # Terms are separated by spaces already. "ascii" takes all other characters as letters.
            self._database.execute(
                "CREATE VIRTUAL TABLE passages USING fts5(name, headings, text, tokenize = \"ascii tokenchars '='\")"
            )
            self._database.execute("CREATE VIRTUAL TABLE words USING fts5(word, tokenize = 'porter ascii')")
            self._database.execute("CREATE VIRTUAL TABLE stems USING fts5vocab(words, instance)")
            self._database.execute("CREATE VIRTUAL TABLE vocabulary USING fts5vocab(passages, row)")
        except sqlite3.OperationalError as error:
            raise MachineError(
                "This Python's SQLite cannot search texts (it lacks FTS5); use a Python from python.org, Homebrew or a "
                "Linux distribution."
            ) from error
        self._stems: dict[str, str] = {}
        self._documents: dict[Key, list[int]] = {}
        self._passages: dict[int, Passage] = {}
        self._next = 1
        # Words in languages other than English.
        self._vocabulary: list[str] = []
        self.update(documents)

    def __len__(self) -> int:
        return len(self._passages)

    def update(self, documents: Iterable[Document]) -> None:
        """Makes these documents the ones that are searched; only those that it does not have take time."""
        wanted = {_key(document): document for document in documents}
        gone = [key for key in self._documents if key not in wanted]
        new = {key: document for key, document in wanted.items() if key not in self._documents}
        if not (gone or new):
            return
        self._database.execute("BEGIN")
        for key in gone:
            for row in self._documents.pop(key):
                self._database.execute("DELETE FROM passages WHERE rowid = ?", (row,))
                del self._passages[row]
        self._add(new)
        self._database.execute("COMMIT")
        # Digits and marked stems are before ">".
        self._vocabulary = [term for (term,) in self._database.execute("SELECT term FROM vocabulary WHERE term > '>'")]

    def _add(self, documents: dict[Key, Document]) -> None:
        cut: list[tuple[Key, Passage, list[list[str]]]] = []
        texts: dict[Key, list[str]] = {}
        for key, document in documents.items():
            texts[key] = []
            title = terms(_title(document))
            for passage in passages_of(document):
                columns = [title, terms(" ".join(passage.headings)), terms(passage.text)]
                cut.append((key, passage, columns))
                texts[key] += columns[2]
        found = {key: is_english(words) for key, words in texts.items()}
        known = [each for each in found.values() if each is not None]
        # What is too short to tell is in the language of most of the others.
        mostly = sum(known) > len(known) / 2
        english = {key: mostly if each is None else each for key, each in found.items()}
        self._learn_stems({word for key, _, columns in cut if english[key] for column in columns for word in column})
        rows = []
        self._documents |= {key: [] for key in documents}
        for key, passage, columns in cut:
            self._documents[key].append(self._next)
            self._passages[self._next] = passage
            if english[key]:
                columns = [[self._stems.get(word, word) for word in column] for column in columns]
            rows.append((self._next, *(" ".join(column) for column in columns)))
            self._next += 1
        self._database.executemany("INSERT INTO passages(rowid, name, headings, text) VALUES (?, ?, ?, ?)", rows)

    def _learn_stems(self, words: set[str]) -> None:
        """Has SQLite find the stems of words, which it takes for one text; others than ASCII letters have none."""
        new = [word for word in words if word not in self._stems and word.isascii() and word.isalpha()]
        if new:
            self._database.execute("DELETE FROM words")
            self._database.execute("INSERT INTO words VALUES (?)", (" ".join(new),))
            for position, stem in self._database.execute("SELECT offset, term FROM stems"):
                self._stems[new[position]] = _STEM + stem

    def search(self, question: str, limit: int = 5, *, before: str = "") -> list[Hit]:
        """Returns the best passages for a question, best first; none if none has a word that says something.

        Args:
            before: the question before it, which a short one such as "and when?" goes on from.
        """
        words = dict.fromkeys(terms(question))
        if sum(not is_small(word) for word in words) < FEW_WORDS:
            words |= dict.fromkeys(terms(before))
        return self._ranked(list(words), limit)

    def _ranked(self, words: list[str], limit: int) -> list[Hit]:
        found = sorted(
            ((is_small(word), self._scores(word, related=len(words) <= MAX_TERMS)) for word in words),
            key=lambda each: (not each[1], len(each[1])),
        )[:MAX_TERMS]
        total = sum((SMALL if small else 1.0) * self._rarity(len(rows)) for small, rows in found)
        scores: defaultdict[int, float] = defaultdict(float)
        best: defaultdict[str, dict[int, float]] = defaultdict(dict)
        for number, (small, rows) in enumerate(found):
            for row, score in rows.items():
                score *= SMALL if small else 1.0
                scores[row] += score
                of_document = best[self._passages[row].document]
                of_document[number] = max(score, of_document.get(number, 0))
        whole = {document: SHARE_OF_DOCUMENT * sum(of_words.values()) for document, of_words in best.items()}
        telling = {row for small, rows in found if not small for row in rows}
        ranked = sorted(((scores[row] + whole[self._passages[row].document], -row) for row in telling), reverse=True)
        scale = math.sqrt(total * self._rarity(0))
        return [Hit(self._passages[-row], score / scale) for score, row in ranked[:limit]]

    def _scores(self, word: str, *, related: bool) -> dict[int, float]:
        """Returns the rows that have a word of a question, each with BM25's score of the word in it.

        SQLite takes the forms of a word for words of different rarity, so that of all of them takes its place.
        """
        found: dict[int, float] = {}
        self._learn_stems({word})
        for form in {word, self._stems.get(word, word), *(self._related(word) if related else ())}:
            rows = self._database.execute(_QUERY, (f'"{form}"',)).fetchall()
            rarity = max(1e-6, math.log((len(self._passages) - len(rows) + 0.5) / (len(rows) + 0.5)))  # as in SQLite
            for row, score in rows:
                found[row] = max(found.get(row, 0.0), score / rarity)
        rarity = self._rarity(len(found))
        return {row: rarity * score for row, score in found.items()}

    def _related(self, word: str) -> list[str]:
        """Returns words in languages other than English that are forms, compounds or parts of a word."""
        if len(word) == MIN_COMMON - 1 or (len(word) == 1 and not word.isascii()):
            return [term for term in self._vocabulary if term.startswith(word)]
        if len(word) < MIN_COMMON:
            return []
        common = word[: max(MIN_COMMON, len(word) - 2)]
        return [term for term in self._vocabulary if common in term or (len(term) >= MIN_COMMON and term in word)]

    def _rarity(self, found: int) -> float:
        """Returns how much a word counts that so many passages have: BM25's inverse document frequency."""
        return math.log(1 + (len(self._passages) + OTHER_PASSAGES - found + 0.5) / (found + 0.5))


def _key(document: Document) -> Key:
    content = document.content if isinstance(document.content, str) else as_json(document.content)
    return document.source, document.front_matter, content, document.path


def _title(document: Document) -> str:
    return str(PurePath(document.name).parent / PurePath(document.name).stem) if document.name else ""
