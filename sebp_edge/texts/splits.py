"""Splits documents three ways: train, validation (`validation`) and test (`test`).

The validation split selects the best state; the test split judges the result and is never trained on. Few documents
are split into folds, so that each document is in a test split.
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
    """The train, validation (`validation`) and test (`test`) examples. No document is in two of them."""

    train: list[Example]
    validation: list[Example]
    test: list[Example]


def split_documents(examples: list[Example], seed: int) -> list[Split]:
    """Returns one split of 20 or more documents, else three folds whose test splits together are all documents.

    Raises:
        TextsError: there are too few tokens or documents to train and to test on.
    """
    documents = sorted({example.document for example in examples})
    tokens = sum(example.num_loss_tokens for example in examples)
    if tokens < MIN_TOKENS or len(documents) < MIN_DOCUMENTS:
        raise TextsError(
            f"Too little text: {tokens} tokens to learn; at least {MIN_TOKENS} are needed to learn from some of them "
            "and to check the result on the others, so give more."
        )
    random.Random(seed).shuffle(documents)
    if len(documents) >= FOLDS_BELOW:
        # A test split of 200 documents has a small standard error; more would only be lost to the training.
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
