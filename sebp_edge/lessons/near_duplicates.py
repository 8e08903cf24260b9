"""Finds near-duplicate documents: edited copies, notes from one template, and notes that are quoted in others.

A document is compared by its shingles: the hashes of all runs of three words in it. Words are lower-cased, numbers are
all the same, and spaces and punctuation do not count, so that a template with another date has the same shingles.
"""

import re
import unicodedata
from collections import defaultdict
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from sebp_edge.values.documents import PIECE, pieces
from sebp_edge.values.preparation_progress import SILENT, Progress
from sebp_edge.values.remembered import Shingles

# Near-duplicates share this part of the larger one's shingles, and at least this number (a run of eight words) unless
# all their shingles are the same.
_NEAR_SHARE = 0.4
_MIN_NEAR = 6
# A document holds a smaller one that has at least this number of shingles if it has this part of them.
_HELD_SHARE = 0.5
_MIN_HELD = 16
# An incomplete sketch has to share at least this number of shingles, since one or two may be common phrases.
_MIN_IN_SKETCH = 4

# All pairs of documents that share a shingle of at most this number of documents are compared. The documents of a more
# frequent shingle are compared with the first few of them only, so that those of one template take linear time.
_MAX_DOCUMENTS = 32
_FIRST_DOCUMENTS = 4
_MAX_OCCURRENCES = 2_000_000
# Pairs that are compared at once, which limits the memory.
_PAIRS_AT_ONCE = 100_000

# Chinese and Japanese have no spaces between words; each of their characters counts as one.
_WIDE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_WIDE}]|\d+|[^\W\d_{_WIDE}]+")
_SIGN = re.compile(r"\S")
# The most words whose hashes are kept, which limits the memory.
_MAX_WORDS = 100_000
# Odd numbers without a pattern, one for each word of a shingle.
_FACTORS = [np.uint64(factor) for factor in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)]


class Shingler:
    """Computes shingles. Without the salt, nobody can tell from them which words a document has."""

    def __init__(self, salt: bytes, piece: int = PIECE, max_words: int = _MAX_WORDS):
        self._hash_of, self._piece = _WordHashes(salt, max_words), piece

    def shingles(self, text: str, progress: Progress = SILENT) -> Shingles:
        """Returns the shingles of a text, which are one at least.

        Args:
            progress: is told how many characters of each piece are done.
        """
        for pattern in (_WORD, _SIGN):
            carried, found = np.empty(0, np.uint64), [np.empty(0, np.uint32)]
            for piece in pieces(text, self._piece):
                words = pattern.finditer(unicodedata.normalize("NFKC", piece).lower())
                hashes = np.append(carried, np.fromiter((self._hash_of[word[0]] for word in words), np.uint64))
                found.append(_mix(hashes))
                carried = hashes[-2:]
                if pattern is _WORD:
                    progress.advance(len(piece))
            if len(carried):
                break
        else:
            carried = np.array([self._hash_of[""]], np.uint64)
        hashes = np.concatenate(found)
        if not len(hashes):
            hashes = _mix(np.pad(carried, (0, 3 - len(carried))))
        # NumPy's unique() takes several times the memory.
        hashes.sort()
        hashes = hashes[np.append(True, hashes[1:] != hashes[:-1])]
        return Shingles(hashes, len(hashes))


def _mix(hashes: np.ndarray) -> np.ndarray:
    """Returns a hash of each three neighbours."""
    first, second, third = _FACTORS
    mixed = hashes[:-2] * first + hashes[1:-1] * second + hashes[2:] * third
    return (mixed >> np.uint64(32)).astype(np.uint32)


class _WordHashes(dict):
    """The hashes of the words that were looked up."""

    def __init__(self, salt: bytes, most: int):
        self._salt, self._most = salt, most

    def __missing__(self, word: str) -> int:
        if len(self) >= self._most:
            self.clear()
        plain = "0" if word[:1].isdecimal() else word
        digest = blake2b(plain.encode(errors="surrogatepass"), digest_size=8, key=self._salt).digest()
        self[word] = found = int.from_bytes(digest, "little")
        return found


@dataclass(frozen=True)
class Relations:
    """Pairs of related documents, as indices.

    Attributes:
        near: the near-duplicates.
        holding: documents with a smaller one that they hold.
    """

    near: list[tuple[int, int]]
    holding: list[tuple[int, int]]


def compare(documents: list[Shingles], max_occurrences: int = _MAX_OCCURRENCES) -> Relations:
    """Finds near-duplicates, and documents that hold a large part of a smaller one.

    The time is nearly linear in the number of shingles. Among many documents with the same shingles not all pairs are
    found, and which ones depends on the documents' order.

    Args:
        documents: the shingles of each document, or a sketch of them. Two sketches are not compared.
        max_occurrences: with more of them, a part of the shingles is used to find the pairs.
    """
    if len(documents) < 2:
        # The search for pairs would take eight times the memory of a large document's shingles.
        return Relations([], [])
    numbers = np.array([shingles.number for shingles in documents], np.int64)
    parts = np.array([len(shingles.hashes) for shingles in documents], np.int64)
    firsts, seconds = _candidates(documents, parts, parts < numbers, max_occurrences)
    found = _num_found(documents, firsts, seconds)
    # The part of a sketch that is found in a document estimates the part of all shingles.
    scale = np.maximum(numbers[firsts] / parts[firsts], numbers[seconds] / parts[seconds])
    shared = found * scale
    smaller, larger = np.minimum(numbers[firsts], numbers[seconds]), np.maximum(numbers[firsts], numbers[seconds])
    is_certain = (scale == 1) | (found >= _MIN_IN_SKETCH)
    is_near = is_certain & (shared >= _NEAR_SHARE * larger) & ((shared >= _MIN_NEAR) | (shared == larger))
    is_held = is_certain & ~is_near & (smaller < larger) & (smaller >= _MIN_HELD) & (shared >= _HELD_SHARE * smaller)
    is_first_larger = numbers[firsts] > numbers[seconds]
    holders, held = np.where(is_first_larger, firsts, seconds), np.where(is_first_larger, seconds, firsts)
    return Relations(
        near=list(zip(firsts[is_near].tolist(), seconds[is_near].tolist(), strict=True)),
        holding=list(zip(holders[is_held].tolist(), held[is_held].tolist(), strict=True)),
    )


@dataclass(frozen=True)
class Clusters:
    """Clusters of near-duplicates.

    A document that holds parts of documents of one cluster belongs to that cluster. One that holds parts of several
    bridges them. Bridged clusters stay apart, since a single large document would join unrelated ones; they have to
    stay on the same side of a split.

    Attributes:
        cluster_of: the cluster of each document, numbered in the order of the documents.
        bridged: the clusters that documents bridge, and their own.
    """

    cluster_of: list[int]
    bridged: set[int]


def find_clusters(num_documents: int, relations: Relations) -> Clusters:
    """Clusters the documents below `num_documents`; others in the relations do not count."""
    parents = list(range(num_documents))

    def find(document: int) -> int:
        while parents[document] != document:
            parents[document] = document = parents[parents[document]]
        return document

    def join(first: int, second: int) -> None:
        first, second = sorted((find(first), find(second)))
        parents[second] = first

    near, holding = (
        [pair for pair in pairs if max(pair) < num_documents] for pairs in (relations.near, relations.holding)
    )
    for first, second in near:
        join(first, second)
    while True:
        touched = defaultdict(set)
        for holder, held in holding:
            if find(holder) != find(held):
                touched[find(holder)].add(find(held))
        alone = [(first, *others) for first, others in touched.items() if len(others) == 1]
        if not alone:
            break
        for first, second in alone:
            join(first, second)
    numbers = {}
    cluster_of = [numbers.setdefault(find(document), len(numbers)) for document in range(num_documents)]
    bridging = {holder for holder, held in holding if cluster_of[holder] != cluster_of[held]}
    bridged = {cluster_of[document] for pair in holding if pair[0] in bridging for document in pair}
    return Clusters(cluster_of, bridged)


def _candidates(
    documents: list[Shingles], parts: np.ndarray, is_sketch: np.ndarray, max_occurrences: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the pairs of documents that share more than a few shingles, as two arrays of indices."""
    hashes = np.concatenate([np.empty(0, np.uint32), *(shingles.hashes for shingles in documents)])
    owners = np.repeat(np.arange(len(documents), dtype=np.uint64), parts)
    places = hashes.astype(np.uint64) << np.uint64(32) | owners
    places.sort()
    hashes = places >> np.uint64(32)
    is_first = np.append(True, hashes[1:] != hashes[:-1])[: len(hashes)]
    is_alone = is_first & np.append(is_first[1:], True)[: len(hashes)]
    places, is_first = places[~is_alone], is_first[~is_alone]
    # The smallest hashes are a random part of the shingles, and those that sketches have.
    sampled = min(1.0, max_occurrences / max(1, len(places)))
    pairs = _pairs((places & np.uint64(2**32 - 1))[:max_occurrences], is_first[:max_occurrences])
    del places, hashes, owners, is_first, is_alone
    pairs.sort()
    begins = np.flatnonzero(np.append(True, pairs[1:] != pairs[:-1])[: len(pairs)])
    ends = np.append(begins, len(pairs))[1:]
    kept = [np.empty(0, np.uint64)]
    for block in range(0, len(begins), _PAIRS_AT_ONCE):
        own = slice(block, block + _PAIRS_AT_ONCE)
        found, counts = pairs[begins[own]], ends[own] - begins[own]
        firsts, seconds = _split(found)
        # Up to three quarters of what near-duplicates share may be in frequent shingles, which are not all counted.
        enough = counts >= sampled * _NEAR_SHARE / 4 * np.minimum(parts[firsts], parts[seconds])
        enough &= ~(is_sketch[firsts] & is_sketch[seconds])
        kept.append(found[enough])
    return _split(np.concatenate(kept))


def _split(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the documents of each pair."""
    return (pairs >> np.uint64(32)).astype(np.int64), (pairs & np.uint64(2**32 - 1)).astype(np.int64)


def _pairs(owners: np.ndarray, is_first: np.ndarray) -> np.ndarray:
    """Returns each pair of documents once for each shingle that they share: the first times 2^32 plus the second.

    Args:
        owners: the documents with the first shingle, then those with the second, and so on.
        is_first: whether the document is the first one of its shingle.
    """
    begins = np.flatnonzero(is_first)
    counts = np.diff(np.append(begins, len(owners)))
    begins, counts = np.repeat(begins, counts), np.repeat(counts, counts)
    places = np.arange(len(owners))
    pairs = [np.empty(0, np.uint64)]
    for distance in range(1, _MAX_DOCUMENTS):
        places = places[(counts[places] <= _MAX_DOCUMENTS) & (places - begins[places] >= distance)]
        pairs.append(owners[places - distance] << np.uint64(32) | owners[places])
    places = np.flatnonzero(counts > _MAX_DOCUMENTS)
    for first in range(_FIRST_DOCUMENTS):
        places = places[places - begins[places] > first]
        pairs.append(owners[begins[places] + first] << np.uint64(32) | owners[places])
    return np.concatenate(pairs)


def _num_found(documents: list[Shingles], firsts: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Returns the number of hashes that are in both documents of each pair; `firsts` is sorted."""
    found = np.zeros(len(firsts), np.int64)
    begins = np.flatnonzero(np.append(True, firsts[1:] != firsts[:-1])[: len(firsts)])
    for begin, end in zip(begins, np.append(begins, len(firsts))[1:], strict=True):
        own = documents[firsts[begin]].hashes
        others = [documents[second].hashes for second in seconds[begin:end]]
        other = np.concatenate(others)
        is_found = own[np.minimum(own.searchsorted(other), len(own) - 1)] == other
        found[begin:end] = np.add.reduceat(is_found, np.cumsum([0, *map(len, others[:-1])]), dtype=np.int64)
    return found
