"""What the trainings of an adaptation train on if they learn on from a version."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Lesson:
    """The documents of one training, by their numbers.

    Attributes:
        trained: those that it trains on.
        validated: those that choose its best epoch.
    """

    trained: frozenset[int]
    validated: frozenset[int]


@dataclass(frozen=True)
class Lessons:
    """What the trainings of an adaptation train on if they learn on from a version.

    Attributes:
        judged: the lessons of the trainings that are judged, one for each split.
        last: the lesson of the last training, on all documents; None if there is none.
        new, changed: the documents that the version does not know; those that have changed are related to some that it
            knows.
        unchanged: those that it knows.
        replayed: the documents that it knows and that are trained on again.
        gone: the keys of the documents that it knows and that are gone; those that have changed are not.
    """

    judged: tuple[Lesson, ...]
    last: Lesson | None
    new: frozenset[int]
    changed: frozenset[int]
    unchanged: frozenset[int]
    replayed: frozenset[int]
    gone: frozenset[int]

    @property
    def has_nothing_new(self) -> bool:
        return not (self.new or self.changed)
