"""Splits documents into train, validation and test splits.

The validation split selects the best state. The test split decides whether to keep the result, and is never trained on.
Few documents are split into folds, so that each document is in the test split of one fold.
"""

import random
from dataclasses import dataclass

from sebp_edge.errors import TextsError
from sebp_edge.texts.examples import Example

MIN_DOCUMENTS = 6
MIN_TOKENS = 300
FOLDS_BELOW = 20
NUM_FOLDS = 3


@dataclass(frozen=True)
class Split:
    """The train, validation and test examples; no document is in two of them."""

    train: list[Example]
    validation: list[Example]
    test: list[Example]


def split_documents(examples: list[Example], seed: int) -> list[Split]:
    """Returns one split of 20 or more documents, else three folds whose test splits make up all documents.

    Raises:
        TextsError: there are too few tokens or documents to train and test on.
    """
    documents = sorted({example.document for example in examples})
    tokens = sum(example.num_loss_tokens for example in examples)
    if tokens < MIN_TOKENS or len(documents) < MIN_DOCUMENTS:
        raise TextsError(
            f"Too little text: {tokens} tokens to train on, but at least {MIN_TOKENS} are needed to train on some of "
            "them and test on the others; give more text."
        )
    random.Random(seed).shuffle(documents)
    if len(documents) >= FOLDS_BELOW:
        # With 200 test documents the standard error is small; more are better used for training.
        test = documents[: min(200, max(5, len(documents) * 15 // 100))]
        validation = documents[len(test) :][: min(100, max(4, len(documents) // 10))]
        return [_split(examples, validation, test)]
    folds = [documents[fold::NUM_FOLDS] for fold in range(NUM_FOLDS)]
    return [_split(examples, folds[(fold + 1) % NUM_FOLDS], folds[fold]) for fold in range(NUM_FOLDS)]


def _split(examples: list[Example], validation: list[int], test: list[int]) -> Split:
    validation, test = set(validation), set(test)
    return Split(
        train=[example for example in examples if example.document not in validation | test],
        validation=[example for example in examples if example.document in validation],
        test=[example for example in examples if example.document in test],
    )
