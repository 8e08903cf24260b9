"""What a version of an adapter remembers of documents, without their texts; imports no numpy."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

# The number of shingles in a sketch.
SKETCH_SIZE = 64
# With few documents, and with more.
FEW_FOLDS, MANY_FOLDS = 3, 6
SPLITS = TRAIN, VALIDATION, TEST = "train", "validation", "test"
FOLD_ROLES = tuple(f"fold {fold + 1}" for fold in range(MANY_FOLDS))
ROLES = (*SPLITS, *FOLD_ROLES)


@dataclass(frozen=True, slots=True)
class Shingles:
    """The shingles of a document, or a sketch of them: the smallest only.

    Attributes:
        hashes: uint32, sorted, without duplicates.
        number: the number of different shingles of the document.
    """

    hashes: "np.ndarray"
    number: int

    def sketch(self) -> "Shingles":
        """Returns the smallest shingles, from which the number that two documents share can be estimated."""
        if len(self.hashes) <= SKETCH_SIZE:
            return self
        return Shingles(self.hashes[:SKETCH_SIZE].copy(), self.number)


@dataclass(frozen=True, slots=True)
class Remembered:
    """A document of a version of an adapter or of an earlier version, without its text.

    Attributes:
        key, sketch: the key of its fingerprint, and a sketch of its shingles.
        split: its split, one of SPLITS; None if none was drawn.
        fold: the fold that tests it; None if none was drawn.
        role: how this version used it: one of ROLES, where "fold 1" is tested by the first fold and trained on by
            another; None if this version does not know it.
        absent: whether this version knows it only from the version that it learnt on from.
    """

    key: int
    sketch: Shingles
    split: str | None
    fold: int | None
    role: str | None
    absent: bool = False


@dataclass(frozen=True)
class SplitHistory:
    """The documents of a version of an adapter, those of earlier versions that it did not have, and their salt."""

    documents: tuple[Remembered, ...] = ()
    salt: bytes = b""

    @property
    def known(self) -> tuple[Remembered, ...]:
        """The documents that this version knows."""
        return tuple(document for document in self.documents if document.role is not None)

    @property
    def num_folds(self) -> int:
        """The number of folds in which this version was judged; 0 if it was not in folds."""
        folds = {FOLD_ROLES.index(document.role) for document in self.known if document.role in FOLD_ROLES}
        return num_folds(folds)

    def all_trained_on(self) -> "SplitHistory":
        """Returns the history of a version that may have been trained on all its documents; their splits stay."""
        documents = tuple(replace(document, role=document.role and TRAIN) for document in self.documents)
        return SplitHistory(documents, self.salt)

    def without(self, keys: Collection[int]) -> "SplitHistory":
        """Returns the history without the documents of these keys."""
        return SplitHistory(tuple(document for document in self.documents if document.key not in keys), self.salt)

    def learnt_on_from(self, before: "SplitHistory") -> "SplitHistory":
        """Returns the history of a version that knows all that the version `before` knew."""
        own = {document.key for document in self.known}
        known = [document for document in before.known if document.key not in own]
        keys = {document.key for document in known}
        others = [document for document in self.documents if document.role is not None or document.key not in keys]
        return SplitHistory((*others, *(replace(document, absent=True) for document in known)), self.salt)


def num_folds(drawn: Collection[int]) -> int:
    """Returns how many folds there are if these were drawn; 0 if none was."""
    return 0 if not drawn else MANY_FOLDS if max(drawn) >= FEW_FOLDS else FEW_FOLDS
