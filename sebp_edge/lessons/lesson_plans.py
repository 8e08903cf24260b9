"""Decides what a training that learns on from a version of an adapter trains on.

New and changed documents, and a replay share of the others, so that these are not forgotten (Rolnick et al. 2019).
"""

import random
from collections.abc import Container, Iterable, Mapping

from sebp_edge.lessons.split_history import match
from sebp_edge.values.draw import Draw, Fingerprint
from sebp_edge.values.lessons import Lesson, Lessons
from sebp_edge.values.remembered import FOLD_ROLES, ROLES, TEST, TRAIN, VALIDATION, SplitHistory

# Documents that are replayed for each new or changed one.
REPLAY = 1
_MIN_VALIDATED = 5


def plan_lessons(
    draw: Draw,
    history: SplitHistory,
    learnt: Container[int],
    seed: int,
    *,
    trained_on_all: bool,
    refits: bool,
) -> Lessons | None:
    """Plans the trainings that follow on from those of a version.

    Args:
        draw: the splits of the current documents.
        learnt: the numbers of the documents whose content the version has learnt, in whichever split.
        seed: draws the replayed documents.
        trained_on_all: whether the version's final state was trained on all its documents.
        refits: whether a training on all documents follows a single split; it always follows folds.

    Returns:
        The lessons; None if a judged state of the version has seen a document that it would be judged by now, or has
        no judged state for a split.
    """
    known, current = history.known, draw.fingerprints
    matches = match(list(current.values()), known)
    # How the version has used each document, and all that are related to it.
    used = {
        number: None if own is None else known[own].split
        for number, own in zip(current, matches.unchanged, strict=True)
    }
    related = {
        number: {known[index].split for index in relatives}
        for number, relatives in zip(current, matches.relatives, strict=True)
    }
    # A version has a judged state for each split if it has used documents so.
    is_split = any(document.split == TEST for document in known)
    if draw.kind == "none" or (draw.kind == "split") != is_split or draw.num_folds != history.num_folds:
        return None
    sides = draw.sides()
    seen = [({TRAIN}, {VALIDATION})] if is_split else [_fold_roles(fold, len(sides)) for fold in range(len(sides))]
    if any(
        _has_seen(each, related, trained, validated) for each, (trained, validated) in zip(sides, seen, strict=True)
    ):
        return None
    unknown = {number for number, use in used.items() if number not in learnt or use is None}
    changed = frozenset(number for number in unknown if related[number])
    order = _shuffled(current, unknown, seed)

    def choose(candidates: Iterable[int], seen: Container[str]) -> frozenset[int]:
        candidates = set(candidates)
        unseen = {number for number in candidates if number in unknown or used[number] not in seen}
        others = [number for number in order if number in candidates - unseen]
        return frozenset(unseen.union(others[: REPLAY * len(unknown)]))

    def sample(candidates: Iterable[int], size: int) -> frozenset[int]:
        """All unknown documents, and as many others as keep evaluations shorter than the training."""
        candidates = set(candidates)
        others = [number for number in order if number in candidates - unknown]
        return frozenset((candidates & unknown).union(others[: max(_MIN_VALIDATED, size)]))

    judged = []
    for each, (trained, _) in zip(sides, seen, strict=True):
        chosen = choose(_on(each, TRAIN), trained)
        judged.append(Lesson(chosen, sample(_on(each, VALIDATION), len(chosen))))
    last = None
    if refits or len(judged) > 1:
        validated = frozenset().union(*(lesson.validated for lesson in judged))
        last = Lesson(choose(current, ROLES if trained_on_all else {TRAIN}), validated)
    replayed = frozenset().union(*(lesson.trained for lesson in (*judged, last) if lesson)) - unknown
    gone = frozenset(known[index].key for index in matches.absent)
    return Lessons(
        judged=tuple(judged),
        last=last,
        new=frozenset(unknown) - changed,
        changed=changed,
        unchanged=frozenset(used) - unknown,
        replayed=replayed,
        gone=gone,
    )


def _fold_roles(fold: int, num_folds: int) -> tuple[set[str], set[str]]:
    """Returns the roles of what a fold's judged state was trained on, and of the documents that chose its epoch."""
    validation = FOLD_ROLES[(fold + 1) % num_folds]
    return {TRAIN, *FOLD_ROLES} - {FOLD_ROLES[fold], validation}, {validation}


def _has_seen(sides: Mapping[int, str], related: Mapping[int, set], trained: set[str], validated: set[str]) -> bool:
    """Whether a state was trained on a document that is held out now, or its epoch was chosen by a test document."""
    held_out, test = [*_on(sides, VALIDATION), *_on(sides, TEST)], _on(sides, TEST)
    return any(related[number] & trained for number in held_out) or any(related[number] & validated for number in test)


def _on(sides: Mapping[int, str], side: str) -> list[int]:
    return [number for number, each in sides.items() if each == side]


def _shuffled(current: Mapping[int, Fingerprint], unknown: set[int], seed: int) -> list[int]:
    """Returns all documents in a random order, which differs with what is new, so that replays differ too."""
    order = list(current)
    first = next((fingerprint.digest for number, fingerprint in current.items() if number in unknown), b"")
    random.Random(f"{seed} {first.hex()}").shuffle(order)
    return order
