"""Documents are split three ways: to train on, to select the best state on, to judge the result on.

The judge never sees what it judges during training. Few documents are split by folds, so that each one is judged.
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
    """Examples by their use. No document is in two of them."""

    train: list[Example]
    select: list[Example]
    judge: list[Example]


def split_documents(examples: list[Example], seed: int) -> list[Split]:
    """One split of 20 documents or more, else three folds whose judges together are all documents.

    Raises:
        TextsError: too few tokens to learn from and to judge on.
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
        # Enough to judge by, never more than needed: a judge of 200 documents has a small standard error.
        judge = documents[: min(200, max(5, len(documents) * 15 // 100))]
        select = documents[len(judge) :][: min(100, max(4, len(documents) // 10))]
        return [_split(examples, select, judge)]
    folds = [documents[fold::NUM_FOLDS] for fold in range(NUM_FOLDS)]
    return [_split(examples, folds[(fold + 1) % NUM_FOLDS], folds[fold]) for fold in range(NUM_FOLDS)]


def _split(examples: list[Example], select: list[int], judge: list[int]) -> Split:
    select, judge = set(select), set(judge)
    return Split(
        train=[example for example in examples if example.document not in select | judge],
        select=[example for example in examples if example.document in select],
        judge=[example for example in examples if example.document in judge],
    )
