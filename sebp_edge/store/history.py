"""The history of splits in a version's list of documents, from which the next version draws its own."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sebp_edge.store.saved import DOCUMENTS
from sebp_edge.store.version_documents import DocumentList, KnownDocument
from sebp_edge.values.remembered import Remembered, Shingles, SplitHistory


class Entry(NamedTuple):
    """What the list says of a version's document: its number, from 1, the tokens of its examples, and its name."""

    number: int | None = 0
    tokens: int | None = 0
    name: str | None = None


def write_history(folder: Path, history: SplitHistory, entries: Mapping[int, Entry] | None = None) -> None:
    """Writes the list of documents into the folder of a new version; `entries` are by the documents' keys."""
    unknown, entries = Entry(None, None), entries or {}
    documents = tuple(_listed(each, entries.get(each.key, unknown)) for each in history.documents)
    (folder / DOCUMENTS).write_text(DocumentList(documents, history.salt).to_text(), encoding="utf-8")


def read_history(folder: Path) -> SplitHistory | None:
    """Reads the history from a version's folder; returns None if the version has none, as those of 0.1.0."""
    listed = DocumentList.read(folder)
    return None if listed is None else history_of(listed)


def history_of(listed: DocumentList) -> SplitHistory:
    """Returns the history in a list of documents."""
    return SplitHistory(tuple(map(_remembered, listed.documents)), listed.salt)


def _listed(document: Remembered, entry: Entry) -> KnownDocument:
    return KnownDocument(
        hash=f"{document.key:016x}",
        name=entry.name,
        number=entry.number,
        tokens=entry.tokens,
        split=document.role,
        absent=document.absent,
        drawn_split=document.split,
        drawn_fold=document.fold,
        num_shingles=document.sketch.number,
        sketch=tuple(document.sketch.hashes.tolist()),
    )


def _remembered(document: KnownDocument) -> Remembered:
    sketch = Shingles(np.array(document.sketch, np.uint32), document.num_shingles)
    return Remembered(document.key, sketch, document.drawn_split, document.drawn_fold, document.split, document.absent)
