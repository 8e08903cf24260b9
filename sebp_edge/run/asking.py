"""Finds passages, quotes an answer from them, and finds the adapter that reads them; imports no torch."""

from dataclasses import dataclass

from sebp_edge.ask.answer import NUM_PASSAGES, Answer, is_found, quoted
from sebp_edge.ask.index import Hit
from sebp_edge.ask.searched_texts import SearchedTexts
from sebp_edge.ask.several import MOST, asks_for_several
from sebp_edge.errors import OptionError, TextsError
from sebp_edge.recipe import READER
from sebp_edge.store.adapter_store import AdapterStore
from sebp_edge.store.saved import SavedAdapter
from sebp_edge.values.documents import check_text
from sebp_edge.values.model_reference import ModelReference


@dataclass(frozen=True)
class Found:
    """The best passages first, and whether the first is about the question; they are for the screen, never for logs."""

    found: bool
    hits: tuple[Hit, ...]


def quote(question: str, texts, num_passages: int = NUM_PASSAGES, before: str = "") -> Answer:
    """Returns the answer without a model: the best sentence, or that nothing was found.

    Args:
        texts: see `read_texts`, or an index of texts.
        before: the question before this one.
    """
    most = max(MOST, num_passages) if num_passages > 0 and asks_for_several(question) else num_passages
    return quoted(question, list(search(question, texts, most, before).hits), num_passages)


def search(question: str, texts, num_passages: int, before: str = "") -> Found:
    """Returns the best passages for a question; see `quote`."""
    check_text(question, "The question")
    if not question:
        raise TextsError("The question is empty; ask something.")
    if num_passages < 1:
        raise OptionError(f"num_passages is {num_passages}; expected 1 or more.")
    hits = SearchedTexts().index(texts).search(question, num_passages, before=before)
    return Found(is_found(hits), tuple(hits))


def find_reader(store: AdapterStore, reference: ModelReference | None) -> SavedAdapter | None:
    """Returns the reader of a model, or of any without one; None if none has passed its test."""
    return store.adapter(READER).active_for(reference and reference.public_name)
