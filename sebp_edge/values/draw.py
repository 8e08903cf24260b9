"""The splits of documents, as they were drawn."""

from collections.abc import Mapping
from dataclasses import dataclass

from sebp_edge.errors import TextsError
from sebp_edge.values.example import Outline
from sebp_edge.values.remembered import SPLITS, TEST, TRAIN, VALIDATION, Shingles, SplitHistory, num_folds

MIN_CLUSTERS = 6
MIN_TOKENS = 300


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a document is recognised by.

    Attributes:
        digest: a hash of the text without the salt, so that a seed draws the same splits with any salt; never saved.
        key: a salted hash of the text, of 64 bits.
        shingles: its shingles, also salted.
    """

    digest: bytes
    key: int
    shingles: Shingles


@dataclass(frozen=True)
class Split:
    """The train, validation and test examples; no document is in two of them."""

    train: list[Outline]
    validation: list[Outline]
    test: list[Outline]


@dataclass(frozen=True)
class Draw:
    """The splits of documents, which are identified by the numbers that `Outline.document` has.

    Attributes:
        fingerprints: what each document is recognised by, in later versions.
        cluster_of: the cluster of near-duplicates that each document is in.
        split_of: the split that each document is in; empty unless there is one split.
        fold_of: the fold that each document is tested in; empty unless there are folds. Documents without a fold are
            trained on in all folds.
        history: what the version has to remember.
    """

    fingerprints: Mapping[int, Fingerprint]
    cluster_of: dict[int, int]
    split_of: dict[int, str]
    fold_of: dict[int, int]
    history: SplitHistory

    @property
    def kind(self) -> str:
        """Either "split", "folds", or "none" if nothing can be judged."""
        return "split" if self.split_of else "folds" if self.fold_of else "none"

    def splits(self, examples: list[Outline]) -> list[Split]:
        """Returns one split, one for each fold, or nothing if nothing can be judged.

        Raises:
            TextsError: there are too few tokens to train on.
        """
        num_tokens = sum(example.num_loss_tokens for example in examples)
        if num_tokens < MIN_TOKENS:
            raise TextsError(
                f"Too little text: {num_tokens} tokens to train on, but at least {MIN_TOKENS} are needed; give more "
                "text."
            )
        return [
            Split(**{name: [each for each in examples if sides[each.document] == name] for name in SPLITS})
            for sides in self.sides()
        ]

    def sides(self) -> list[dict[int, str]]:
        """Returns the split that each document is in, for each of the splits."""
        if self.split_of:
            return [self.split_of]
        return [self._splits_in(fold) for fold in range(self.num_folds)]

    @property
    def num_folds(self) -> int:
        """The number of folds; 0 without folds."""
        return num_folds(self.fold_of.values())

    def _splits_in(self, fold: int) -> dict[int, str]:
        name_of = {fold: TEST, (fold + 1) % self.num_folds: VALIDATION}
        return {document: name_of.get(self.fold_of.get(document), TRAIN) for document in self.cluster_of}
