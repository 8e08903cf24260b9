"""Which documents came, went and changed between two versions, told from their salted hashes."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from sebp_edge.errors import AdapterError
from sebp_edge.store.saved import SavedAdapter
from sebp_edge.store.version_documents import read_history
from sebp_edge.values.remembered import SKETCH_SIZE, KnownDocument, SplitHistory

# A document has changed, and is not another one, if this share of its shingles is still there.
_CHANGED_SHARE = 0.3
# Of the documents with the same shingle, as those of one template, only the first few are compared.
_MAX_HOLDERS = 32


@dataclass(frozen=True)
class Difference:
    """The documents of a version beside those of another one.

    Attributes:
        came, went: documents that only the new or only the old version has.
        changed: pairs of a document of the old version and what it is in the new one. A document that keeps less than
            about a third of its text has gone, and another one came.
        unchanged: how many documents are the same in both.
    """

    name: str
    old: int
    new: int
    came: tuple[KnownDocument, ...]
    went: tuple[KnownDocument, ...]
    changed: tuple[tuple[KnownDocument, KnownDocument], ...]
    unchanged: int

    def to_dict(self) -> dict:
        """Returns it as JSON-ready values."""
        return asdict(self) | {
            "came": [document.to_dict() for document in self.came],
            "went": [document.to_dict() for document in self.went],
            "changed": [[before.to_dict(), after.to_dict()] for before, after in self.changed],
        }


def compare_versions(old: SavedAdapter, new: SavedAdapter, store_salt: bytes) -> Difference:
    """Compares the documents of two versions; `store_salt` is that of lists without their own."""
    lists = [_documents_of(saved, store_salt) for saved in (old, new)]
    if lists[0].salt != lists[1].salt:
        raise AdapterError(
            f"Versions {old.version} and {new.version} of the adapter {new.name!r} cannot be compared: one of them "
            "came from another store, where hashes have another salt; compare it with versions that were made after it."
        )
    before, after = ({document.hash: document for document in listed.own if not document.absent} for listed in lists)
    went = [document for key, document in before.items() if key not in after]
    came = [document for key, document in after.items() if key not in before]
    pairs = _pairs(went, came)
    firsts, seconds = {first for first, _ in pairs}, {second for _, second in pairs}
    return Difference(
        name=new.name,
        old=old.version,
        new=new.version,
        came=tuple(document for index, document in enumerate(came) if index not in seconds),
        went=tuple(document for index, document in enumerate(went) if index not in firsts),
        changed=tuple((went[first], came[second]) for first, second in pairs),
        unchanged=len(before.keys() & after.keys()),
    )


def _documents_of(saved: SavedAdapter, store_salt: bytes) -> SplitHistory:
    listed = read_history(saved.path, store_salt)
    if listed is None:
        raise AdapterError(
            f"Version {saved.version} of the adapter {saved.name!r} was saved before sebp-edge recorded its documents; "
            "compare later versions."
        )
    return listed


def _pairs(went: Sequence[KnownDocument], came: Sequence[KnownDocument]) -> list[tuple[int, int]]:
    """Returns pairs of similar documents as indices, each document at most once, the most similar pairs first."""
    holders = defaultdict(list)
    for index, document in enumerate(went):
        for value in document.sketch:
            if len(holders[value]) < _MAX_HOLDERS:
                holders[value].append(index)
    found = []
    for second, document in enumerate(came):
        for first in Counter(index for value in document.sketch for index in holders.get(value, ())):
            found.append((_similarity(went[first].sketch, document.sketch), first, second))
    pairs, used = [], (set(), set())
    for similarity, first, second in sorted(found, key=lambda each: (-each[0], each[1:])):
        if similarity >= _CHANGED_SHARE and first not in used[0] and second not in used[1]:
            pairs.append((first, second))
            used[0].add(first)
            used[1].add(second)
    return sorted(pairs)


def _similarity(first: Sequence[int], second: Sequence[int]) -> float:
    """Estimates the share of shingles that two documents have in common, from the smallest hashes of both."""
    smallest = sorted({*first, *second})[:SKETCH_SIZE]
    return len({*smallest} & {*first} & {*second}) / len(smallest)
