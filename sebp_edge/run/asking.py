"""Answers a question with a sentence of the texts, and finds the adapter that reads them; imports no torch."""

from sebp_edge.ask.answer import NUM_PASSAGES, Answer, quoted
from sebp_edge.ask.searched_texts import SearchedTexts
from sebp_edge.errors import OptionError, TextsError
from sebp_edge.recipe import READER
from sebp_edge.store.adapter_store import AdapterStore
from sebp_edge.store.saved import SavedAdapter
from sebp_edge.values.documents import check_text
from sebp_edge.values.model_reference import ModelReference


def quote(question: str, texts, num_passages: int = NUM_PASSAGES, before: str = "") -> Answer:
    """Returns the answer without a model: the best sentence, or that nothing was found.

    Args:
        texts: see `read_texts`, or an index of texts.
        before: the question before this one.
    """
    check_text(question, "The question")
    if not question:
        raise TextsError("The question is empty; ask something.")
    if num_passages < 1:
        raise OptionError(f"num_passages is {num_passages}; expected 1 or more.")
    return quoted(question, SearchedTexts().index(texts).search(question, num_passages, before=before))


def find_reader(store: AdapterStore, reference: ModelReference | None) -> SavedAdapter | None:
    """Returns the reader of a model, or of any without one; None if none has passed its test."""
    return store.adapter(READER).active_for(reference and reference.public_name)
