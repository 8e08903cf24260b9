"""A question about a note, worded in several ways."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Question:
    """A question about one note, and its answer in the note's own words.

    Attributes:
        wordings: those that are trained on; one or more, all different.
        kept_out: those that are never trained on: the first chooses the best epoch, the second is in the quiz. Fewer
            than two if there are not enough different ones.
        answer: a few words that stand in the note.
    """

    wordings: tuple[str, ...]
    kept_out: tuple[str, ...]
    answer: str
