"""What a version of an adapter remembers of documents, without their texts; imports no numpy."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
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


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownDocument:
    """A document that a version knows, or whose split it remembers, without its text.

    Attributes:
        hash: a salted hash of its text, as 16 hexadecimal digits.
        name: its name: the path of its file in the given folder, or what the app calls it; None if it has none.
        number: its number in the order in which the texts were given, from 1; None in versions saved before.
        tokens: how many tokens its examples have; None in versions saved before.
        split: how the version used it, one of ROLES: "fold 1" is tested by the first fold and trained on by another;
            None if only earlier versions know it.
        absent: whether it was gone from the texts; the version knows it from the version that it learnt on from.
        drawn_split, drawn_fold: the split, and the fold that tests it, which later versions keep; None if not drawn.
        num_shingles, sketch: the number of its shingles, and the smallest of them: an array, or one of numpy's, which
            is not copied. Whether two documents are equal is told by their hashes.
    """

    hash: str
    name: str | None = None
    number: int | None = None
    tokens: int | None = None
    split: str | None
    absent: bool = False
    drawn_split: str | None = field(repr=False)
    drawn_fold: int | None = field(repr=False)
    num_shingles: int = field(repr=False)
    sketch: Sequence[int] = field(repr=False, compare=False)

    @property
    def key(self) -> int:
        """Its hash as a number: the key of its fingerprint."""
        return int(self.hash, 16)

    @property
    def label(self) -> str:
        """What a person calls it: its name, else its number."""
        return self.name or str(self.number or "")

    def to_dict(self) -> dict:
        """Returns it as JSON-ready values, without what later versions need of it."""
        names = ("name", "number", "hash", "tokens", "split", "absent")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class SplitHistory:
    """The documents of a version, those of earlier versions whose splits later ones keep, and the salt of hashes."""

    documents: tuple[KnownDocument, ...] = ()
    salt: bytes = b""

    @property
    def known(self) -> tuple[KnownDocument, ...]:
        """The documents that this version knows."""
        return tuple(document for document in self.documents if document.split is not None)

    @property
    def own(self) -> tuple[KnownDocument, ...]:
        """The same in the order in which they were given; those that were gone are the last."""
        return tuple(sorted(self.known, key=lambda document: (document.absent, document.number or 0)))

    @property
    def num_folds(self) -> int:
        """The number of folds in which this version was judged; 0 if it was not in folds."""
        return num_folds({FOLD_ROLES.index(document.split) for document in self.known if document.split in FOLD_ROLES})

    def all_trained_on(self) -> "SplitHistory":
        """Returns the history of a version that may have been trained on all its documents; their splits stay."""
        documents = (replace(document, split=document.split and TRAIN) for document in self.documents)
        return SplitHistory(tuple(documents), self.salt)

    def without(self, keys: Collection[int]) -> "SplitHistory":
        """Returns the history without the documents of these keys."""
        return SplitHistory(tuple(document for document in self.documents if document.key not in keys), self.salt)

    def without_earlier(self, keys: Collection[int]) -> "SplitHistory":
        """Returns the history without documents of these keys that only earlier versions know."""
        return self.without(set(keys) - {document.key for document in self.known})

    def without_names(self) -> "SplitHistory":
        """Returns the history without the names of the documents."""
        return SplitHistory(tuple(replace(document, name=None) for document in self.documents), self.salt)

    def learnt_on_from(self, before: "SplitHistory") -> "SplitHistory":
        """Returns the history of a version that knows all that the version `before` knew."""
        own = {document.key for document in self.known}
        known = [document for document in before.known if document.key not in own]
        others = self.without_earlier({document.key for document in known}).documents
        return SplitHistory((*others, *(replace(document, absent=True) for document in known)), self.salt)


def num_folds(drawn: Collection[int]) -> int:
    """Returns how many folds there are if these were drawn; 0 if none was."""
    return 0 if not drawn else MANY_FOLDS if max(drawn) >= FEW_FOLDS else FEW_FOLDS
