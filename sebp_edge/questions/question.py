"""A question about a note, worded in several ways."""

from collections import Counter
from dataclasses import dataclass, replace

# More words are no answer that one remembers.
MAX_ANSWER_WORDS = 12


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


def distinct(questions: list[Question], least: int = 1) -> list[Question]:
    """Leaves out wordings that two questions share, and questions with fewer than `least` left or with one kept out."""
    counts = Counter(wording for question in questions for wording in (*question.wordings, *question.kept_out))
    unique = [
        replace(question, wordings=tuple(wording for wording in question.wordings if counts[wording] == 1))
        for question in questions
    ]
    return [
        question
        for question in unique
        if len(question.wordings) >= least and all(counts[wording] == 1 for wording in question.kept_out)
    ]
