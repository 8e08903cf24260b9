"""Questions about public notes, written from the notes alone in words that these do not use, and what is right.

`questions/NAME.toml` asks about the notes NAME of authors.toml; `questions/NAME-kept.toml` was kept until the search
was as it is.
"""

import re
import tomllib
from pathlib import Path
from typing import NamedTuple

from sebp_edge.ask.passages import Passage, passages_of
from sebp_edge.reading.readers import read_texts
from sebp_edge.values.documents import Document
from sebp_edge.values.folder import Folder

QUESTIONS = Path(__file__).with_name("questions")
NAMES = ("blog-de-fl3a", "code-dmerejkowsky", "diary-zinzy", "vault-blacklightpy")
_WORD = re.compile(r"\w+")
# So much of a line tells it from the others.
_CHARACTERS = 30


class Asked(NamedTuple):
    """A question, and the passages that answer it by document and line; none if nothing does."""

    question: str
    kind: str
    right: frozenset[tuple[str, int]]
    accepted: re.Pattern | None


class Collection(NamedTuple):
    """An author's notes, and questions about them."""

    name: str
    documents: list[Document]
    asked: list[Asked]


def collection(authors: Path, name: str, *, kept: bool = False) -> Collection:
    """Reads an author's notes below a folder, and the questions about them."""
    documents = read_texts(Folder(authors / name)).documents
    by_name = {document.source: document for document in documents}
    written = tomllib.loads((QUESTIONS / f"{name}{'-kept' if kept else ''}.toml").read_text(encoding="utf-8"))
    asked = []
    for each in written["question"]:
        accepted = re.compile("|".join(each["accepted"]), re.IGNORECASE) if each["answerable"] else None
        lines = each.get("lines") or [None] * len(each.get("documents", ()))
        right = {
            (passage.document, passage.line)
            for source, line in zip(each.get("documents", ()), lines, strict=True)
            for passage in _right(by_name[source], line and _line(authors / name / source, line), accepted)
        }
        asked.append(Asked(each["question"], each["kind"], frozenset(right), accepted))
    return Collection(name, documents, asked)


def _right(document: Document, line: str | None, accepted: re.Pattern) -> list[Passage]:
    """Returns the passages with a line; without one those that hold an accepted answer, or else all of a document."""
    passages = passages_of(document)
    if line:
        return [passage for passage in passages if line in _words(passage.text)]
    return [passage for passage in passages if accepted.search(passage.text)] or passages


def _line(file: Path, number: int) -> str:
    return _words(file.read_text(encoding="utf-8").split("\n")[number - 1])[:_CHARACTERS]


def _words(text: str) -> str:
    return " ".join(_WORD.findall(text))
