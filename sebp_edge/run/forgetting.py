"""Makes an adapter forget documents: trains a version without them, then removes every version that knew them.

A version knows a document if it was trained, validated or tested on it. The new version is saved and activated before
anything is removed, so that a process that is killed loses no adapter. `erasure` removes, and can be completed later.
"""

import difflib
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from sebp_edge.basics.files import expand_user
from sebp_edge.errors import AdapterError, OwnerUnknown, TextsError
from sebp_edge.lessons.split_history import match, take_fingerprints
from sebp_edge.reading.readers import read_texts
from sebp_edge.run.call import Call
from sebp_edge.store.adapter import Adapter
from sebp_edge.store.erasure import Receipt, complete, erase
from sebp_edge.store.history import history_of
from sebp_edge.store.record import AdapterRecord
from sebp_edge.store.saved import SavedAdapter
from sebp_edge.store.version_documents import DocumentList, KnownDocument
from sebp_edge.store.where import Where
from sebp_edge.values.documents import Document, printable
from sebp_edge.values.draw import Fingerprint
from sebp_edge.values.folder import Folder
from sebp_edge.values.reading import Reading
from sebp_edge.values.remembered import SplitHistory

# The number of documents that a message names.
_NAMED = 3
# What follows the name of a file in the name of a document that is a part of it: a record, a day of a chat, a mail.
_PART = re.compile(r", (?:record \d+|(?:[^,]+, )?\d{4}-\d{2}-\d{2}|[0-9a-f]{8})")


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
    call: Call,
    adapter: Adapter,
    documents: Sequence[str | Path],
    texts: list | None,
    *,
    with_near_duplicates: bool,
) -> tuple[Forgetting | None, Receipt | None]:
    """Returns what it takes to forget documents of an adapter; or the receipt, if a call that was killed is completed.

    Args:
        documents, texts: see `Personalizer.forget`.
    """
    completed = complete(adapter)
    try:
        return _find_forgetting(call, adapter, documents, texts, with_near_duplicates=with_near_duplicates), None
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
    hidden = {version.number for version in _read_versions(adapter) if version.knows(found.keys)} - set(found.versions)
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


def _find_forgetting(
    call: Call,
    adapter: Adapter,
    documents: Sequence[str | Path],
    texts: list | None,
    *,
    with_near_duplicates: bool,
) -> Forgetting:
    """Finds what has to go, and what to train on."""
    versions = list(_read_versions(adapter))
    base = _base(versions, adapter.active())
    where = adapter.wheres().get(base.number, Where())
    reading = _read_where_learnt(where, call) if texts is None else call.read(texts)
    given = where.paths if texts is None else [item for item in texts if isinstance(item, Path | Folder)]
    folders = [_folder_of(item) for item in given]
    found = defaultdict(set)
    for document in documents:
        for salt, hash in _find(str(document), versions, base, folders, adapter.name, call):
            found[salt].add(hash)
    numbered = {number: document.own_text for number, document in enumerate(reading.documents)}
    fingerprints = take_fingerprints(numbered, base.salt)
    near = _relatives(versions, base.salt, fingerprints, found[base.salt])
    if with_near_duplicates:
        found[base.salt] |= near
    # A text that is there is found in versions from other stores, too.
    own = {number: numbered[number] for number, one in fingerprints.items() if one.key in found[base.salt]}
    for salt in {version.salt for version in versions if version.listed} - {base.salt}:
        found[salt] |= {one.key for one in take_fingerprints(own, salt).values()}
    keys = {salt: hashes for salt, hashes in found.items() if hashes}
    if base.salt not in keys:
        raise TextsError(
            f"Only versions from another store are known to have these documents, and version {base.number} can be "
            "searched for them only by their texts; give these with the others."
        )
    listed = {one.key: one for version in [*versions, base] if version.salt == base.salt for one in version.own}
    everywhere = {one.key: one for version in versions for one in version.own} | listed
    chosen = {hash for hashes in keys.values() for hash in hashes if hash in everywhere} - near
    unlisted = tuple(version.number for version in versions if not version.listed or version.salt not in keys)
    known = {version.number for version in versions if version.knows(keys)}
    return Forgetting(
        name=adapter.name,
        documents=_sorted(everywhere[hash] for hash in chosen),
        near_duplicates=_sorted(listed[hash] for hash in near),
        with_near_duplicates=with_near_duplicates,
        versions=tuple(sorted({*known, *unlisted})),
        unlisted=unlisted,
        lost=_lost(versions, base, {*known, *unlisted}, keys[base.salt]),
        remaining=_remaining(base, keys[base.salt], reading, fingerprints, call, where if texts is None else None)
        if base.knows(keys)
        else None,
        keys=keys,
    )


# ------------------------------------------------------------------------------------------------------------ versions


@dataclass(frozen=True)
class _Version:
    """A version, with its list of documents; without, if that cannot be read."""

    number: int
    folder: Path
    listed: DocumentList | None

    @property
    def salt(self) -> bytes:
        return self.listed.salt if self.listed else b""

    @cached_property
    def own(self) -> tuple[KnownDocument, ...]:
        return self.listed.own if self.listed else ()

    def knows(self, keys: Mapping[bytes, set[int]]) -> bool:
        hashes = keys.get(self.salt, set())
        return any(document.key in hashes for document in self.own)


def _read_versions(adapter: Adapter) -> Iterator[_Version]:
    for number in adapter.versions():
        folder, listed = adapter.version_folder(number), None
        with suppress(AdapterError):
            listed = adapter.document_list(number)
        yield _Version(number, folder, listed)


def _base(versions: list[_Version], active: int | None) -> _Version:
    """Returns the version that is made again: the active one, else the newest whose documents are known."""
    candidates = [version for version in versions if version.listed and active in (None, version.number)]
    if candidates:
        return candidates[-1]
    raise AdapterError(
        "It is not known which documents this adapter was made from, so it cannot be made again without one; adapt to "
        "the other documents under a new name, and remove this adapter."
    )


# ----------------------------------------------------------------------------------------------------------- documents


def _find(
    wanted: str,
    versions: list[_Version],
    base: _Version,
    folders: list[Path],
    name: str,
    call: Call,
) -> list[tuple[bytes, int]]:
    """Returns the salts and hashes of what is meant: a name, number or hash, else a path, else a file's content."""

    def is_called(name: str, document: KnownDocument) -> bool:
        return document.name is not None and (
            document.name == name or bool(_PART.fullmatch(document.name.removeprefix(name)))
        )

    def is_exactly(version: _Version, document: KnownDocument) -> bool:
        number = document.number if version is base and document.name is None else None
        return is_called(wanted, document) or wanted in (document.hash, str(number))

    paths, listed = set(_names_of(wanted, folders)), [(version, one) for version in versions for one in version.own]
    found = [(version.salt, one.key) for version, one in listed if is_exactly(version, one)] or [
        (version.salt, one.key) for version, one in listed if any(is_called(path, one) for path in paths)
    ]
    if not found and (path := expand_user(wanted)).is_file():
        texts = [document.own_text for document in _documents_of(path, call)]
        hashes = {
            version.salt: {one.key for one in take_fingerprints(dict(enumerate(texts)), version.salt).values()}
            for version in versions
        }
        if any(one.key in hashes[version.salt] for version, one in listed):
            found = [(salt, hash) for salt, own in hashes.items() for hash in own]
    if found:
        return found
    names = {one.name for version in versions for one in version.own if one.name is not None}
    close = difflib.get_close_matches(wanted, names, n=_NAMED)
    advice = (
        f"did you mean {' or '.join(map(repr, close))}?" if close else "`sebp-edge adapters show` lists what it knows."
    )
    raise UnknownDocument(f"No version of the adapter {name!r} knows a document {wanted!r}; {advice}")


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


def _relatives(
    versions: list[_Version], salt: bytes, fingerprints: Mapping[int, Fingerprint], hashes: set[int]
) -> set[int]:
    """Returns the hashes of near-duplicates that a version knows; of each two, one must be among the texts."""
    known = {
        document.key: document
        for version in versions
        if version.listed and version.salt == salt
        for document in history_of(version.listed).documents
        if document.role is not None
    }
    forgotten = [document for key, document in known.items() if key in hashes]
    others = [document for key, document in known.items() if key not in hashes]
    here = [one for one in fingerprints.values() if one.key in known and one.key not in hashes]
    own = [one for one in fingerprints.values() if one.key in hashes]
    found = {one.key for one, near in zip(here, match(here, forgotten).relatives, strict=True) if near}
    return found | {others[index].key for near in match(own, others).relatives for index in near}


def _lost(versions: list[_Version], base: _Version, removed: set[int], hashes: set[int]) -> tuple[KnownDocument, ...]:
    """Returns the other documents that removed versions have learnt after the version that is made again."""
    kept = hashes | {one.key for one in base.own}
    lost = {
        one.hash: one
        for version in versions
        if version.number in removed and version.number > base.number and version.salt == base.salt
        for one in version.own
        if one.key not in kept and not one.absent
    }
    return _sorted(lost.values())


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


def _remaining(
    base: _Version,
    hashes: set[int],
    reading: Reading,
    fingerprints: Mapping[int, Fingerprint],
    call: Call,
    where: Where | None,
    what: str = "forgotten",
) -> Remaining:
    """Returns what the new version is trained on; `where` the texts were looked for is None if they were given."""
    given = {one.key for one in fingerprints.values()}
    others = {document.key: document for document in base.own if document.key not in hashes}
    gone = {hash for hash, document in others.items() if document.absent and hash not in given}
    others = {hash: document for hash, document in others.items() if hash not in gone}
    if not others:
        raise TextsError(
            "No other document would remain to train on; to forget everything, remove the adapter with `sebp-edge "
            "adapters remove`."
        )
    if missing := _sorted(document for hash, document in others.items() if hash not in given):
        raise TextsError(f"Nothing was {what}: {_missing(missing, base, len(others), where)}")
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
            reading,
            documents=kept,
            left_out=left_out,
            num_equal=num_equal,
            folders=_still_needed(reading, kept, call),
        ),
        history=history_of(base.listed).without(hashes | gone),
        num_new=len(given - others.keys() - hashes),
        num_gone=len(gone),
    )


def _missing(missing: Sequence[KnownDocument], base: _Version, num_others: int, where: Where | None) -> str:
    """Returns which documents are missing, and what to do, in sentences."""
    named = ", ".join(document.label for document in missing[:_NAMED])
    more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
    verb = "is" if len(missing) == 1 else "are"
    found = f"of the {num_others} other documents of version {base.number}, {len(missing)} {verb} not"
    if num_others == 1:
        found = f"the only other document of version {base.number} is not"
    learn = "or first learn the texts as they are now with `sebp-edge adapt`."
    if where is None:
        return f"{found} among these texts as they were then ({named}{more}). Give all texts and restore these, {learn}"
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
            f"{found} found ({named}{more}). They were expected in {there}, which {'is' if len(gone) == 1 else 'are'} "
            "not there any more; give their new place with --texts (texts=)."
        )
    return (
        f"{found} in {there} as they were then ({named}{more}). Restore them, give another place that has them with "
        f"--texts (texts=), {learn}"
    )


def versions_with(adapter: Adapter, hashes: set[int]) -> list[int]:
    """Returns the versions that know a document of these salted hashes."""
    return [version.number for version in _read_versions(adapter) if version.knows({version.salt: hashes})]


def find_remaining(call: Call, adapter: Adapter, version: int, texts: list | None) -> Remaining:
    """Returns what a version was trained on, to train it again."""
    (own,) = (each for each in _read_versions(adapter) if each.number == version)
    if own.listed is None:
        raise AdapterError(f"It is not known which documents version {version} of the adapter {adapter.name!r} has.")
    where = adapter.wheres().get(version, Where())
    reading = _read_where_learnt(where, call) if texts is None else call.read(texts)
    numbered = {number: document.own_text for number, document in enumerate(reading.documents)}
    fingerprints = take_fingerprints(numbered, own.salt)
    return _remaining(own, set(), reading, fingerprints, call, where if texts is None else None, "verified")


def _sorted(documents: Iterable[KnownDocument]) -> tuple[KnownDocument, ...]:
    return tuple(sorted(documents, key=lambda document: (document.number or 0, document.label)))


def _exactness(remaining: Remaining | None, new: SavedAdapter | None, *, is_exact: bool) -> str:
    if remaining is None:
        return "The version that stays was never trained, validated or tested on the documents."
    bits = "bit for bit" if is_exact else "up to this device's rounding"
    return (
        f"Version {new.version} was trained from the base model on the other documents only, with the splits, recipe "
        f"and seed of version {remaining.version}: on this machine, its weights are {bits} those of a training that "
        "never had the documents."
    )
