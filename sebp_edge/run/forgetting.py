"""Makes an adapter forget documents: trains a version without them, then removes every version that knew them.

A version knows a document if it was trained, validated or tested on it. The new version is saved and activated before
anything is removed, so that a process that is killed loses no adapter. `erasure` removes, and can be completed later.
"""

import difflib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sebp_edge.basics.files import expand_user
from sebp_edge.errors import AdapterError, OwnerUnknown, TextsError
from sebp_edge.lessons.split_history import match, take_fingerprints
from sebp_edge.reading.readers import read_texts
from sebp_edge.run.call import Call
from sebp_edge.run.remaining import DocumentsNow, Remaining, Version, in_order, read_versions, remaining_of
from sebp_edge.store.adapter import Adapter
from sebp_edge.store.erasure import Receipt, complete, erase
from sebp_edge.store.saved import SavedAdapter
from sebp_edge.values.documents import Document, printable
from sebp_edge.values.folder import Folder
from sebp_edge.values.remembered import KnownDocument

# The number of documents that a message names.
_NAMED = 3
# What follows the name of a file in the name of a document that is a part of it: a record, a day of a chat, a mail.
_PART = re.compile(r", (?:record \d+|(?:[^,]+, )?\d{4}-\d{2}-\d{2}|[0-9a-f]{8})")


@dataclass(frozen=True)
class Forgetting:
    """What it takes to forget documents; nothing has been changed yet.

    Attributes:
        documents: the documents, as the newest version that knows them lists them.
        near_duplicates: documents that are near-duplicates of them, hold parts of them, or are parts of them.
        versions: the versions that are removed.
        unlisted: those of them whose documents are unknown.
        lost: other documents that were learnt after the active version, by versions that are removed; the next
            adaptation learns them again.
        remaining: what a new version is trained on; None if the active version does not know the documents.
        keys: the documents' hashes by salt.
    """

    name: str
    documents: tuple[KnownDocument, ...]
    near_duplicates: tuple[KnownDocument, ...]
    with_near_duplicates: bool
    versions: tuple[int, ...]
    unlisted: tuple[int, ...]
    lost: tuple[KnownDocument, ...]
    remaining: Remaining | None
    keys: Mapping[bytes, set[int]]


class UnknownDocument(AdapterError):
    """No version of the adapter knows the document."""


def begin_forgetting(
    call: Call, adapter: Adapter, documents: Sequence[str | Path], texts: list | None, *, with_near_duplicates: bool
) -> tuple[Forgetting | None, Receipt | None]:
    """Returns what it takes to forget documents of an adapter; or the receipt, if a call that was killed is completed.

    Args:
        documents, texts: see `Personalizer.forget`.
    """
    completed = complete(adapter)
    try:
        found = _Search(call, adapter, texts).forgetting(documents, with_near_duplicates=with_near_duplicates)
        return found, None
    except UnknownDocument as error:
        if completed is not None:
            return None, completed
        if jobs := [job.id for job in adapter.jobs if not job.is_running]:
            raise UnknownDocument(
                f"{error} A training that did not end may know it; to delete that: sebp-edge jobs remove {jobs[0]}"
            ) from error
        raise


def end_forgetting(adapter: Adapter, found: Forgetting, new: SavedAdapter | None, *, is_exact: bool) -> Receipt:
    """Removes the versions that know the documents; returns the receipt, which is also saved in the adapter's folder.

    Args:
        new: the version that was trained on what remains, if anything had to be.
        is_exact: whether equal trainings give equal bits here.
    """
    hidden = {version.number for version in read_versions(adapter) if version.knows(found.keys)} - set(found.versions)
    if hidden:
        raise AdapterError(
            f"Nothing was removed: version {max(hidden)} of the adapter {adapter.name!r} was saved meanwhile, and "
            "knows what is to be forgotten; run this again."
        )
    hashes, near = (tuple(one.hash for one in some) for some in (found.documents, found.near_duplicates))
    receipt = Receipt(
        name=adapter.name,
        documents=hashes + near if found.with_near_duplicates else hashes,
        near_duplicates=() if found.with_near_duplicates else near,
        versions_removed=found.versions,
        lost=len(found.lost),
        replaced_by=new.version if new else None,
        exact=_exactness(found.remaining, new, is_exact=is_exact),
        weights=new.weights_hash() if new and is_exact else None,
    )
    return erase(adapter, receipt, found.keys)


class _Search:
    """A search for documents in all versions of an adapter, and among its texts as they are now."""

    def __init__(self, call: Call, adapter: Adapter, texts: list | None):
        self._call, self._name, self._versions = call, adapter.name, list(read_versions(adapter))
        self._base = _base(self._versions, adapter.active())
        self._listed = [(version, one) for version in self._versions for one in version.own]
        self._now = DocumentsNow.of(call, adapter, self._base, texts)
        where = self._now.where
        given = where.paths if where else [item for item in texts if isinstance(item, Path | Folder)]
        self._folders = [_folder_of(item) for item in given]

    def forgetting(self, documents: Sequence[str | Path], *, with_near_duplicates: bool) -> Forgetting:
        """Finds what has to go, and what to train on."""
        base, versions, keys = self._base, self._versions, defaultdict(set)
        for document in documents:
            for salt, hash in self._find(str(document)):
                keys[salt].add(hash)
        near = self._near_duplicates(keys[base.salt])
        if with_near_duplicates:
            keys[base.salt] |= near
        self._add_from_texts(keys)
        keys = {salt: hashes for salt, hashes in keys.items() if hashes}
        if base.salt not in keys:
            raise TextsError(
                f"Only versions from another store are known to have these documents, and version {base.number} can be "
                "searched for them only by their texts; give these with the others."
            )
        listed = {one.key: one for version in [*versions, base] if version.salt == base.salt for one in version.own}
        everywhere = {one.key: one for _, one in self._listed} | listed
        chosen = {hash for hashes in keys.values() for hash in hashes if hash in everywhere} - near
        unlisted = tuple(version.number for version in versions if not version.listed or version.salt not in keys)
        removed = {*unlisted, *(version.number for version in versions if version.knows(keys))}
        return Forgetting(
            name=self._name,
            documents=in_order(everywhere[hash] for hash in chosen),
            near_duplicates=in_order(listed[hash] for hash in near),
            with_near_duplicates=with_near_duplicates,
            versions=tuple(sorted(removed)),
            unlisted=unlisted,
            lost=self._lost(removed, keys[base.salt]),
            remaining=remaining_of(base, keys[base.salt], self._now, self._call) if base.knows(keys) else None,
            keys=keys,
        )

    def _find(self, wanted: str) -> list[tuple[bytes, int]]:
        """Returns the salts and hashes of what is meant: a name, number or hash, else a path, else a file's content."""
        paths = set(_names_of(wanted, self._folders))
        exact = [each for each in self._listed if self._is_exactly(wanted, *each)]
        called = exact or [each for each in self._listed if any(_is_called(path, each[1]) for path in paths)]
        found = [(version.salt, one.key) for version, one in called]
        if not found and (path := expand_user(wanted)).is_file():
            found = self._find_content(path)
        if found:
            return found
        names = {one.name for _, one in self._listed if one.name is not None}
        close = difflib.get_close_matches(wanted, names, n=_NAMED)
        advice = "`sebp-edge adapters show` lists what it knows."
        if close:
            advice = f"did you mean {' or '.join(map(repr, close))}?"
        raise UnknownDocument(f"No version of the adapter {self._name!r} knows a document {wanted!r}; {advice}")

    def _is_exactly(self, wanted: str, version: Version, document: KnownDocument) -> bool:
        number = document.number if version is self._base and document.name is None else None
        return _is_called(wanted, document) or wanted in (document.hash, str(number))

    def _find_content(self, path: Path) -> list[tuple[bytes, int]]:
        texts = dict(enumerate(document.own_text for document in _documents_of(path, self._call)))
        salts = {version.salt for version in self._versions}
        hashes = {salt: {one.key for one in take_fingerprints(texts, salt).values()} for salt in salts}
        if not any(one.key in hashes[version.salt] for version, one in self._listed):
            return []
        return [(salt, hash) for salt, own in hashes.items() for hash in own]

    def _add_from_texts(self, keys: dict[bytes, set[int]]) -> None:
        """Adds what a text that is there is called in versions from other stores."""
        here, salt = self._now, self._base.salt
        numbers = [number for number, one in here.fingerprints.items() if one.key in keys[salt]]
        own = {number: here.reading.documents[number].own_text for number in numbers}
        for other in {version.salt for version in self._versions if version.listed} - {salt}:
            keys[other] |= {one.key for one in take_fingerprints(own, other).values()}

    def _near_duplicates(self, hashes: set[int]) -> set[int]:
        """Returns the hashes of near-duplicates that a version knows; of each two, one must be among the texts."""
        known = {
            document.key: document
            for version in self._versions
            if version.listed and version.salt == self._base.salt
            for document in version.listed.known
        }
        forgotten = [document for key, document in known.items() if key in hashes]
        others = [document for key, document in known.items() if key not in hashes]
        texts = self._now.fingerprints.values()
        here = [one for one in texts if one.key in known and one.key not in hashes]
        own = [one for one in texts if one.key in hashes]
        found = {one.key for one, near in zip(here, match(here, forgotten).relatives, strict=True) if near}
        return found | {others[index].key for near in match(own, others).relatives for index in near}

    def _lost(self, removed: set[int], hashes: set[int]) -> tuple[KnownDocument, ...]:
        """Returns the other documents that removed versions have learnt after the version that is made again."""
        base = self._base
        kept = hashes | {one.key for one in base.own}
        lost = {
            one.hash: one
            for version, one in self._listed
            if version.number in removed and version.number > base.number and version.salt == base.salt
            if one.key not in kept and not one.absent
        }
        return in_order(lost.values())


def _base(versions: list[Version], active: int | None) -> Version:
    """Returns the version that is made again: the active one, else the newest whose documents are known."""
    candidates = [version for version in versions if version.listed and active in (None, version.number)]
    if candidates:
        return candidates[-1]
    raise AdapterError(
        "It is not known which documents this adapter was made from, so it cannot be made again without one; adapt to "
        "the other documents under a new name, and remove this adapter."
    )


def _is_called(name: str, document: KnownDocument) -> bool:
    return document.name is not None and (
        document.name == name or bool(_PART.fullmatch(document.name.removeprefix(name)))
    )


def _documents_of(path: Path, call: Call) -> list[Document]:
    """Returns the documents of a file; of a chat whose owner is not said, those that it would be for each author."""
    try:
        return call.read([path]).documents
    except OwnerUnknown as error:
        found = error.reading
    return [document for author in found.authors for document in read_texts(found, me=author.id).documents]


def _folder_of(item: Path | Folder) -> Path:
    path = expand_user(item.path if isinstance(item, Folder) else item)
    return (path.parent if path.is_file() else path).absolute()


def _names_of(wanted: str, folders: list[Path]) -> Iterator[str]:
    """Yields the names that a file at this path has, relative to one of the folders; it need not be there any more."""
    path = expand_user(wanted).absolute()
    for folder in folders:
        if path.is_relative_to(folder) and path != folder:
            relative = path.relative_to(folder).as_posix()
            for begin in range(1, len(folder.parts) + 1):
                yield printable("/".join([*folder.parts[begin:], relative]))


def _exactness(remaining: Remaining | None, new: SavedAdapter | None, *, is_exact: bool) -> str:
    if remaining is None:
        return "The version that stays was never trained, validated or tested on the documents."
    bits = "bit for bit" if is_exact else "up to this device's rounding"
    return (
        f"Version {new.version} was trained from the base model on the other documents only, with the splits, recipe "
        f"and seed of version {remaining.version}: on this machine, its weights are {bits} those of a training that "
        "never had the documents."
    )
