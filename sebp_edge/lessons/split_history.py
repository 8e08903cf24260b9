"""Recognises documents of earlier versions of an adapter, and tells which documents a version has not seen.

Nothing here contains text: documents are recognised by salted hashes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from sebp_edge.lessons.near_duplicates import Relations, Shingler, compare
from sebp_edge.values.draw import Fingerprint
from sebp_edge.values.preparation_progress import SILENT, Progress
from sebp_edge.values.remembered import FOLD_ROLES, TEST, KnownDocument, Shingles, SplitHistory


def take_fingerprints(texts: Mapping[int, str], salt: bytes, progress: Progress = SILENT) -> dict[int, Fingerprint]:
    """Returns the documents' fingerprints by number, in an order that depends on the texts only.

    Args:
        texts: the texts of the documents by number. They should be those that have examples.
        salt: up to 64 secret bytes, the same for all versions of an adapter.
    """
    shingler = Shingler(salt)
    progress.begin("comparing", sum(map(len, texts.values())))
    found = {}
    for number, text in texts.items():
        content = text.encode(errors="surrogatepass")
        digest, key = blake2b(content, digest_size=16).digest(), blake2b(content, digest_size=8, key=salt).digest()
        shingles = shingler.shingles(text, progress)
        found[number] = Fingerprint(digest, int.from_bytes(key, "little"), shingles)
    progress.end()
    return dict(sorted(found.items(), key=lambda item: item[1].digest))


@dataclass(frozen=True)
class Unseen:
    """What can be used to test a version of an adapter.

    Attributes:
        states: the numbers of the documents that one of its judged states has neither trained on nor validated with,
            and the index of that state: the fold's, or 0 without folds; None if no state has seen the document.
        num_tests: the number of the version's own test documents.
        num_found: how many of these are among the documents, unchanged or as a near-duplicate.
    """

    states: dict[int, int | None]
    num_tests: int
    num_found: int


def find_unseen(history: SplitHistory, current: Mapping[int, Fingerprint]) -> Unseen:
    """Returns which of the current documents a version has not seen, not even a near-duplicate of them."""
    used = history.known
    matches = match(list(current.values()), used)
    states = {}
    for number, relatives in zip(current, matches.relatives, strict=True):
        roles = {used[relative].split for relative in relatives}
        if not roles:
            states[number] = None
        elif roles == {TEST}:
            states[number] = 0
        elif len(roles) == 1 and roles.issubset(FOLD_ROLES):
            states[number] = FOLD_ROLES.index(roles.pop())
    own = ((index, document.split) for index, document in enumerate(used) if not document.absent)
    tests = {index for index, role in own if role in (TEST, *FOLD_ROLES)}
    return Unseen(states, len(tests), len(tests - matches.absent))


@dataclass(frozen=True)
class Matches:
    """Which remembered documents the current ones are related to; all are indices.

    Attributes:
        relations: the relations between current documents. Those with larger indices are remembered documents.
        relatives: for each current document, the remembered ones that it is the same as, a near-duplicate of, holds or
            is held by.
        unchanged: for each current document, the remembered one with the same text, or None.
        absent: the remembered documents that are not among the current ones, not even as a near-duplicate.
    """

    relations: Relations
    relatives: list[set[int]]
    unchanged: list[int | None]
    absent: set[int]


def match(current: Sequence[Fingerprint], remembered: Sequence[KnownDocument]) -> Matches:
    """Recognises remembered documents among the current ones."""
    index_of = {document.key: index for index, document in enumerate(remembered)}
    unchanged = [index_of.get(fingerprint.key) for fingerprint in current]
    # An unchanged document is compared by all its shingles, the others by their sketches.
    keys = {fingerprint.key for fingerprint in current}
    others = [index for index, document in enumerate(remembered) if document.key not in keys]
    sketches = ((remembered[index].sketch, remembered[index].num_shingles) for index in others)
    shingles = (Shingles(np.asarray(sketch, np.uint32), number) for sketch, number in sketches)
    relations = compare([*(fingerprint.shingles for fingerprint in current), *shingles])
    memory = [*unchanged, *others]
    relatives = [{index} - {None} for index in memory]
    for first, second in (*relations.near, *relations.holding):
        relatives[first] |= {memory[second]} - {None}
        relatives[second] |= {memory[first]} - {None}
    edited = {memory[index] for pair in relations.near for index in pair if index >= len(current)}
    absent = set(others) - edited
    return Matches(relations, relatives[: len(current)], unchanged, absent)
