"""Renders examples as a person can read them: what the model gets, and which part of it is trained.

Rendered examples contain the user's text: they are for the screen, never for logs, metadata or the store.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from sebp_edge.basics.labels import IGNORE
from sebp_edge.lessons.conversations import is_of_people
from sebp_edge.values.documents import Document
from sebp_edge.values.example import Example

# Stands for what other people wrote.
OTHERS_WORDS = "[what others wrote]"


@dataclass(frozen=True)
class Piece:
    """A run of an example's text; `trained` says whether its tokens have loss.

    What other people wrote is not shown: the text says so instead.
    """

    text: str
    trained: bool


@dataclass(frozen=True)
class RenderedExample:
    """An example in words, special tokens included.

    Attributes:
        tokens, trained_tokens: the number of its tokens, and of those with loss.
    """

    document: str
    tokens: int
    trained_tokens: int
    pieces: tuple[Piece, ...]


def render_examples(
    examples: Iterable[Example], documents: list[Document], tokenizer, number: int
) -> tuple[RenderedExample, ...]:
    """Renders the first examples of the first documents, one of each kind of content first."""
    firsts = {}
    for example in examples:
        firsts.setdefault(example.document, example)
    kinds = {}
    for document in firsts:
        kinds.setdefault(type(documents[document].content), document)
    chosen = list(dict.fromkeys([*kinds.values(), *firsts]))[:number]
    return tuple(
        RenderedExample(
            documents[document].source,
            len(firsts[document].input_ids),
            firsts[document].num_loss_tokens,
            tuple(_pieces(firsts[document], tokenizer, hides_given=is_of_people(documents[document].content))),
        )
        for document in sorted(chosen)
    )


def _pieces(example: Example, tokenizer, *, hides_given: bool) -> Iterator[Piece]:
    # The first token has no loss, since no token predicts it.
    trained = [False, *(label != IGNORE for label in example.labels[1:])]
    end, before = 0, ""
    for has_loss, run in groupby(trained):
        end += len(list(run))
        # Some tokenizers drop the blank before the first token, so runs are not decoded by themselves.
        text = tokenizer.decode(
            example.input_ids[:end].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        yield Piece(OTHERS_WORDS if hides_given and not has_loss else text[len(before) :], has_loss)
        before = text
