"""What a version of an adapter remembers of a document, without its text; imports no numpy."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

# The number of shingles in a sketch.
SKETCH_SIZE = 64
NUM_FOLDS = 3
SPLITS = TRAIN, VALIDATION, TEST = "train", "validation", "test"
FOLD_ROLES = tuple(f"fold {fold + 1}" for fold in range(NUM_FOLDS))
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
