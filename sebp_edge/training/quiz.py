"""Asks questions about documents before and after a training, and says what that shows.

Each question is asked alone, and after its document. Replies are the user's text: they are for the screen only.
"""

import math
from dataclasses import dataclass

from sebp_edge.questions.answers import Answered, is_right
from sebp_edge.texts.dataset import QuizQuestion

# A difference counts if chance alone would make it in at most this share of all cases.
CHANCE = 0.05


@dataclass(frozen=True)
class Replies:
    """A model's replies to the questions of a quiz.

    Attributes:
        alone: the reply to each question alone.
        with_document: the reply after the document; None if that is too long.
    """

    alone: tuple[str, ...]
    with_document: tuple[str | None, ...]


@dataclass(frozen=True)
class Score:
    """How many questions a model answered right.

    Attributes:
        alone: of all questions.
        with_document: of the questions that could be asked after their document.
    """

    alone: int
    with_document: int


@dataclass(frozen=True)
class QuizFigures:
    """The figures of a quiz, without text.

    Attributes:
        questions, questions_with_note: how many were asked, alone and with the note in the prompt.
        right_before, right_after: how many of the first the base model and the adapter answered right.
        right_with_note_before, right_with_note_after: how many of the second.
        right_active: how many of the first the version that was active before answered right; None without one.
    """

    questions: int
    questions_with_note: int
    right_before: int
    right_after: int
    right_with_note_before: int
    right_with_note_after: int
    right_active: int | None = None


@dataclass(frozen=True)
class QuizResult:
    """The replies of the base model, the trained model, and the version that was active before.

    Attributes:
        active: None if there was no such version.
    """

    questions: tuple[QuizQuestion, ...]
    before: Replies
    after: Replies
    active: Replies | None = None

    @property
    def num_with_document(self) -> int:
        """The number of questions that were asked after their document."""
        return sum(question.with_document is not None for question in self.questions)

    @property
    def figures(self) -> QuizFigures:
        before, after = self.score(self.before), self.score(self.after)
        return QuizFigures(
            questions=len(self.questions),
            questions_with_note=self.num_with_document,
            right_before=before.alone,
            right_after=after.alone,
            right_with_note_before=before.with_document,
            right_with_note_after=after.with_document,
            right_active=self.score(self.active).alone if self.active else None,
        )

    def score(self, replies: Replies) -> Score:
        """Counts the right replies."""
        return Score(sum(self._alone(replies)), sum(self._with_document(replies)))

    @property
    def has_learnt(self) -> bool:
        """Whether more questions are answered right than before, by more than chance."""
        return is_more(self._alone(self.before), self._alone(self.after))

    @property
    def reads_worse(self) -> bool:
        """Whether fewer questions are answered right after their document than before, by more than chance."""
        return is_more(self._with_document(self.after), self._with_document(self.before))

    @property
    def is_worse_than_active(self) -> bool:
        """Whether the version that was active before answers more questions right, by more than chance."""
        return self.active is not None and is_more(self._alone(self.after), self._alone(self.active))

    @property
    def answered(self) -> list[Answered]:
        """The questions with the trained model's replies to them alone."""
        rows = zip(self.questions, self.after.alone, self._alone(self.after), strict=True)
        return [Answered(question.question, question.answer, reply, right) for question, reply, right in rows]

    def _alone(self, replies: Replies) -> list[bool]:
        return [is_right(reply, one.answer) for reply, one in zip(replies.alone, self.questions, strict=True)]

    def _with_document(self, replies: Replies) -> list[bool]:
        pairs = zip(replies.with_document, self.questions, strict=True)
        return [reply is not None and is_right(reply, one.answer) for reply, one in pairs]


def is_more(before: list[bool], after: list[bool]) -> bool:
    """Whether more are right after than before, by the sign test on those that differ (McNemar 1947, exact)."""
    gained = sum(new and not old for old, new in zip(before, after, strict=True))
    lost = sum(old and not new for old, new in zip(before, after, strict=True))
    differing = gained + lost
    chance = sum(math.comb(differing, number) for number in range(gained, differing + 1)) / 2**differing
    return gained > lost and chance <= CHANCE
