"""Splits documents into train, validation and test splits.

The validation split selects the best state. The test split decides whether to keep the result, and is never trained on.
Few documents are split into folds, so that each document is in the test split of one fold; more documents too if there
is time for it. If there are fewer still, all are trained on and nothing can be judged.

Clusters of near-duplicates are drawn, not documents. A document keeps the side that it had in earlier versions of the
adapter, an edited copy of it takes that side too, and new documents fill the quotas. Documents that connect two sides
are trained on, and so is all that they connect.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from sebp_edge.lessons.near_duplicates import Clusters, find_clusters
from sebp_edge.lessons.split_history import Matches, match
from sebp_edge.values.draw import MIN_CLUSTERS, Draw, Fingerprint
from sebp_edge.values.remembered import (
    FEW_FOLDS,
    FOLD_ROLES,
    MANY_FOLDS,
    TEST,
    TRAIN,
    VALIDATION,
    KnownDocument,
    SplitHistory,
    num_folds,
)

FOLDS_BELOW = 20
# The least clusters in a split; the quotas are larger.
_MIN_TEST, _MIN_VALIDATION = 5, 4


def draw_splits(
    current: Mapping[int, Fingerprint],
    seed: int,
    history: SplitHistory | None = None,
    *,
    keeps: bool = False,
    most_in_folds: int = 0,
) -> Draw:
    """Draws the splits of documents; the result does not depend on their numbers.

    Args:
        current: the documents' fingerprints by number, from `take_fingerprints`.
        seed: draws the sides of clusters that are not in the history.
        history: the history of the version before, with fingerprints of the same salt; without documents, or None, for
            the first version.
        keeps: whether all documents keep their sides, however few are left on one.
        most_in_folds: up to how many clusters are split into folds though they are enough for a split.
    """
    fingerprints = list(current.values())
    remembered = history.documents if history else ()
    matches = match(fingerprints, remembered)
    clusters = find_clusters(len(fingerprints), matches.relations)
    order = _rank(clusters, fingerprints, seed)
    split_before = _sides(order, clusters, matches, [document.drawn_split for document in remembered])
    fold_before = _sides(order, clusters, matches, [document.drawn_fold for document in remembered])
    split = fold = {}
    roles = {document.split for document in remembered} if keeps else set()
    if roles & {VALIDATION, TEST}:
        split = {own: side or TRAIN for own, side in split_before.items()}
    elif roles & {*FOLD_ROLES}:
        fold = {own: side for own, side in fold_before.items() if side is not None}
    elif len(split_before) >= FOLDS_BELOW and not FOLDS_BELOW <= len(fold_before) <= most_in_folds:
        split = _draw_split(split_before, Counter(clusters.cluster_of))
    elif len(split_before) >= FOLDS_BELOW:
        large = _large(Counter(clusters.cluster_of))
        fold = _draw_folds({own: side for own, side in fold_before.items() if own not in large}, MANY_FOLDS)
    elif len(fold_before) >= MIN_CLUSTERS:
        fold = _draw_folds(fold_before, FEW_FOLDS)

    documents = []
    for fingerprint, own in zip(fingerprints, clusters.cluster_of, strict=True):
        # A cluster that connects two sides is in neither, and is trained on.
        new_split, new_fold = (split or split_before).get(own, TRAIN), (fold or fold_before).get(own)
        role = new_split if split else FOLD_ROLES[fold[own]] if own in fold else TRAIN
        sketch = fingerprint.shingles.sketch()
        documents.append(
            KnownDocument(
                hash=f"{fingerprint.key:016x}",
                split=role,
                drawn_split=new_split,
                drawn_fold=new_fold,
                num_shingles=sketch.number,
                sketch=sketch.hashes,
            )
        )
    absent = (remembered[index] for index in sorted(matches.absent))
    documents += [dataclasses.replace(document, split=None, absent=False) for document in absent]
    numbered = list(zip(current, clusters.cluster_of, strict=True))
    return Draw(
        fingerprints=current,
        cluster_of=dict(numbered),
        split_of={number: split.get(own, TRAIN) for number, own in numbered if split},
        fold_of={number: fold[own] for number, own in numbered if own in fold},
        history=SplitHistory(tuple(documents), history.salt if history else b""),
    )


def _rank(clusters: Clusters, fingerprints: Sequence[Fingerprint], seed: int) -> list[int]:
    """Returns the clusters in the order of the draw, which depends on the seed and the clusters' texts only."""
    digests = {}
    for own, fingerprint in zip(clusters.cluster_of, fingerprints, strict=True):
        digests[own] = min(digests.get(own, fingerprint.digest), fingerprint.digest)
    return sorted(digests, key=lambda own: blake2b(str(seed).encode() + digests[own]).digest())


def _sides(order: Sequence[int], clusters: Clusters, matches: Matches, sides: Sequence) -> dict:
    """Returns the side that each cluster had before, without the clusters that connect two sides.

    Args:
        order: the clusters; the result has their order.
        sides: the sides of the remembered documents.

    Returns:
        A side for each cluster; None if it had none.
    """
    found = defaultdict(set)
    for own, relatives in zip(clusters.cluster_of, matches.relatives, strict=True):
        found[own] |= {sides[index] for index in relatives} - {None}
    return {own: next(iter(found[own]), None) for own in order if own not in clusters.bridged and len(found[own]) < 2}


def _draw_split(before: Mapping[int, str | None], sizes: Counter) -> dict[int, str]:
    """Returns the splits of 20 or more clusters.

    Args:
        before: the clusters in the order of the draw, with the splits that they had.
        sizes: the number of documents in each cluster.
    """
    # With 200 test clusters the standard error is small; more are better used for training.
    quotas = {
        TEST: (_MIN_TEST, min(200, max(_MIN_TEST, len(before) * 15 // 100))),
        VALIDATION: (_MIN_VALIDATION, min(100, max(_MIN_VALIDATION, len(before) // 10))),
    }
    large = _large(sizes)
    split = dict.fromkeys(before, TRAIN)
    for name, (_, quota) in quotas.items():
        # There are more if most documents were removed, but not those of this split.
        split |= dict.fromkeys([own for own in before if before[own] == name][: 2 * quota], name)
    for name, (least, quota) in quotas.items():
        trained = [own for own in before if split[own] == TRAIN]
        new = [own for own in trained if before[own] is None and own not in large]
        missing = quota - list(split.values()).count(name)
        split |= dict.fromkeys(new[: max(0, missing)], name)
        # Documents that were trained on are tested with if the others are too few.
        trained = sorted((own for own in trained if split[own] == TRAIN), key=large.__contains__)
        missing = least - list(split.values()).count(name)
        split |= dict.fromkeys(trained[: max(0, missing)], name)
    return split


def _large(sizes: Counter) -> set[int]:
    """Returns the clusters with more than a tenth of the documents, which would be most of a split or fold."""
    return {own for own, size in sizes.items() if 10 * size > sizes.total()}


def _draw_folds(before: Mapping[int, int | None], number: int) -> dict[int, int]:
    """Returns the folds that test the clusters.

    Args:
        before: the clusters in the order of the draw, with the folds that they had; all are drawn again if these were
            of another number.
        number: the number of folds.
    """
    if num_folds({*before.values()} - {None}) != number:
        before = dict.fromkeys(before)
    clusters_of = [[own for own in before if before[own] == fold] for fold in range(number)]
    for own in before:
        if before[own] is None:
            min(clusters_of, key=len).append(own)
    # The folds differ if documents were removed.
    while 2 * len(smallest := min(clusters_of, key=len)) < len(largest := max(clusters_of, key=len)):
        smallest.append(largest.pop())
    return {own: fold for fold, members in enumerate(clusters_of) for own in members}
