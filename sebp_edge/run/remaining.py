"""Finds what a version of an adapter was trained on: its own documents, as they are now, without some of them."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from sebp_edge.basics.units import are, some
from sebp_edge.errors import AdapterError, OwnerUnknown, TextsError
from sebp_edge.lessons.split_history import take_fingerprints
from sebp_edge.run.call import Call
from sebp_edge.store.adapter import Adapter
from sebp_edge.store.record import AdapterRecord
from sebp_edge.store.where import Where
from sebp_edge.values.documents import Document
from sebp_edge.values.draw import Fingerprint
from sebp_edge.values.folder import Folder
from sebp_edge.values.reading import Reading
from sebp_edge.values.remembered import KnownDocument, SplitHistory

# The number of documents that a message names.
_NAMED = 3


@dataclass(frozen=True)
class Remaining:
    """What the new version is trained on.

    Attributes:
        version: the version that it takes the place of.
        record: that version's record: its model, recipe and seed.
        reading: that version's other documents.
        history: their splits.
        num_new: how many documents of the texts that version has not learnt; they are left out.
        num_gone: how many documents it knew only from the version that it learnt on from; they are left out, too.
    """

    version: int
    record: AdapterRecord
    reading: Reading
    history: SplitHistory
    num_new: int
    num_gone: int


@dataclass(frozen=True)
class Version:
    """A version, with its list of documents; without, if that cannot be read."""

    number: int
    folder: Path
    listed: SplitHistory | None

    @property
    def salt(self) -> bytes:
        return self.listed.salt if self.listed else b""

    @cached_property
    def own(self) -> tuple[KnownDocument, ...]:
        return self.listed.own if self.listed else ()

    def knows(self, keys: Mapping[bytes, set[int]]) -> bool:
        """Whether it knows one of the documents of these hashes, by salt."""
        hashes = keys.get(self.salt, set())
        return any(document.key in hashes for document in self.own)


def read_versions(adapter: Adapter) -> Iterator[Version]:
    """Yields the versions of an adapter, oldest first."""
    for number in adapter.versions():
        folder, listed = adapter.version_folder(number), None
        with suppress(AdapterError):
            listed = adapter.document_list(number)
        yield Version(number, folder, listed)


@dataclass(frozen=True)
class DocumentsNow:
    """The documents that are there now, beside those of a version.

    Attributes:
        fingerprints: theirs, by the documents' numbers, with the version's salt.
        where: where they were looked for; None if they were given.
    """

    reading: Reading
    fingerprints: Mapping[int, Fingerprint]
    where: Where | None

    @classmethod
    def of(cls, call: Call, adapter: Adapter, version: Version, texts) -> "DocumentsNow":
        """Reads the given texts, or else those of a version where it was made."""
        where = adapter.wheres().get(version.number, Where()) if texts is None else None
        reading = call.read(texts) if where is None else _read_where_learnt(where, call)
        numbered = {number: document.own_text for number, document in enumerate(reading.documents)}
        return cls(reading, take_fingerprints(numbered, version.salt), where)


def _read_where_learnt(where: Where, call: Call) -> Reading:
    """Reads the texts of a version where it was made; leaves out what is not there any more."""
    reading, seen = Reading(), set()
    for group in where.texts:
        there = [folder for folder in group if os.path.lexists(folder.path)]
        with suppress(TextsError):  # nothing in it can be read any more
            try:
                found = call.read(there) if there else Reading()
            except OwnerUnknown as error:
                raise AdapterError(str(error)) from error
            new = [document for document in found.documents if _hashes([document]).isdisjoint(seen)]
            seen |= _hashes(new)
            reading = Reading(
                reading.documents + new,
                reading.left_out + found.left_out,
                reading.num_equal + found.num_equal,
                reading.folders + found.folders,
            )
    return reading


def _still_needed(reading: Reading, kept: list[Document], call: Call) -> tuple[Folder, ...]:
    """Returns the files and folders that have documents which are kept; the others are remembered no longer."""
    if len(reading.folders) == 1:
        return reading.folders
    wanted, needed = _hashes(kept), []
    for folder in reading.folders:
        with suppress(TextsError):  # nothing in it can be read
            if found := wanted & _hashes(call.read([folder]).documents):
                needed.append(folder)
                wanted -= found
    return tuple(needed)


def _hashes(documents: Iterable[Document]) -> set[str]:
    return {document.hash(b"") for document in documents}


def remaining_of(base: Version, hashes: set[int], now: DocumentsNow, call: Call, what: str = "forgotten") -> Remaining:
    """Returns what the new version is trained on: what `base` knows, without the documents of these hashes."""
    reading, fingerprints = now.reading, now.fingerprints
    given = {one.key for one in fingerprints.values()}
    others = {document.key: document for document in base.own if document.key not in hashes}
    gone = {hash for hash, document in others.items() if document.absent and hash not in given}
    others = {hash: document for hash, document in others.items() if hash not in gone}
    if not others:
        raise TextsError(
            "No other document would remain to train on; to forget everything, remove the adapter with `sebp-edge "
            "adapters remove`."
        )
    if missing := in_order(document for hash, document in others.items() if hash not in given):
        raise TextsError(f"Nothing was {what}: {_missing(missing, base, len(others), now.where)}")
    kept = [document for number, document in enumerate(reading.documents) if fingerprints[number].key in others]
    unused = {
        document.source for number, document in enumerate(reading.documents) if fingerprints[number].key not in others
    }
    copies = {f"the same as {source}" for source in unused}
    left_out = [item for item in reading.left_out if item.reason not in copies]
    num_equal = reading.num_equal - (len(reading.left_out) - len(left_out))
    return Remaining(
        version=base.number,
        record=AdapterRecord.read(base.folder),
        reading=replace(
            reading, documents=kept, left_out=left_out, num_equal=num_equal, folders=_still_needed(reading, kept, call)
        ),
        history=base.listed.without(hashes | gone),
        num_new=len(given - others.keys() - hashes),
        num_gone=len(gone),
    )


def _missing(missing: Sequence[KnownDocument], base: Version, num_others: int, where: Where | None) -> str:
    """Returns which documents are missing, and what to do, in sentences."""
    named = some([document.label for document in missing], _NAMED)
    found = f"of the {num_others} other documents of version {base.number}, {len(missing)} {are(len(missing))} not"
    if num_others == 1:
        found = f"the only other document of version {base.number} is not"
    learn = "or first learn the texts as they are now with `sebp-edge adapt`."
    if where is None:
        return f"{found} among these texts as they were then ({named}). Give all texts and restore these, {learn}"
    if not where.paths:
        return (
            f"it is not known where the texts of version {base.number} are: it was made from texts without files, on "
            "another machine or by an older sebp-edge. Give them with --texts (texts=)."
        )
    paths = [Path(folder.path) for folder in where.texts[0]]
    gone = [path for path in paths if not os.path.lexists(path)]
    there = ", ".join(repr(str(path)) for path in gone or paths)
    if gone:
        return (
            f"{found} found ({named}). They were expected in {there}, which {are(len(gone))} not there any more; give "
            "their new place with --texts (texts=)."
        )
    return (
        f"{found} in {there} as they were then ({named}). Restore them, give another place that has them with "
        f"--texts (texts=), {learn}"
    )


def versions_with(adapter: Adapter, hashes: set[int]) -> list[int]:
    """Returns the versions that know a document of these salted hashes."""
    return [version.number for version in read_versions(adapter) if version.knows({version.salt: hashes})]


def find_remaining(call: Call, adapter: Adapter, version: int, texts) -> Remaining:
    """Returns what a version was trained on, to train it again."""
    (own,) = (each for each in read_versions(adapter) if each.number == version)
    if own.listed is None:
        raise AdapterError(f"It is not known which documents version {version} of the adapter {adapter.name!r} has.")
    return remaining_of(own, set(), DocumentsNow.of(call, adapter, own, texts), call, "verified")


def in_order(documents: Iterable[KnownDocument]) -> tuple[KnownDocument, ...]:
    """Returns documents by their numbers and names."""
    return tuple(sorted(documents, key=lambda document: (document.number or 0, document.label)))
