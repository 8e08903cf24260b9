"""Says what a quiz before and after a training shows."""

from dataclasses import dataclass

from sebp_edge.values.answers import Answered, QuizFigures, is_right
from sebp_edge.values.dataset import Quiz, QuizQuestion
from sebp_edge.values.probe_figures import CHANCE, by_chance


@dataclass(frozen=True)
class Replies:
    """A model's replies to the questions of a quiz."""

    # To those about notes: below the passage that the search finds, below the one with the answer, and alone.
    found: tuple[str, ...]
    right: tuple[str, ...]
    alone: tuple[str, ...]
    general: tuple[str, ...]  # to general questions


@dataclass(frozen=True)
class QuizResult:
    """The replies of the base model, the trained model, and the version that was active before."""

    quiz: Quiz
    before: Replies
    after: Replies
    active: Replies | None = None  # None if there was no such version

    @property
    def figures(self) -> QuizFigures:
        before, after = self.before, self.after
        return QuizFigures(
            questions=len(self.quiz.about_notes),
            right_before=sum(self._notes(before.found)),
            right_after=sum(self._notes(after.found)),
            right_passage_before=sum(self._notes(before.right)),
            right_passage_after=sum(self._notes(after.right)),
            alone_before=sum(self._notes(before.alone)),
            alone_after=sum(self._notes(after.alone)),
            refused=self.quiz.refused,
            rightly_refused=self.quiz.rightly_refused,
            general_questions=len(self.quiz.general),
            general_before=sum(self._general(before)),
            general_after=sum(self._general(after)),
            right_active=sum(self._notes(self.active.found)) if self.active else None,
        )

    @property
    def has_learnt(self) -> bool:
        """Whether more questions are answered right below the found passage than before, by more than chance."""
        return is_more(self._notes(self.before.found), self._notes(self.after.found))

    @property
    def forgets(self) -> bool:
        """Whether fewer general questions are answered right than before, by more than chance."""
        return is_more(self._general(self.after), self._general(self.before))

    @property
    def is_worse_than_active(self) -> bool:
        """Whether the version that was active before answers more questions right, by more than chance."""
        return self.active is not None and is_more(self._notes(self.after.found), self._notes(self.active.found))

    @property
    def answered(self) -> list[Answered]:
        """The questions about notes with the trained model's replies below the found passage."""
        rows = zip(self.quiz.about_notes, self.after.found, self._notes(self.after.found), strict=True)
        return [Answered(asked.question, asked.answers[0], reply, right) for asked, reply, right in rows]

    def _notes(self, replies: tuple[str, ...]) -> list[bool]:
        return _right(replies, self.quiz.about_notes)

    def _general(self, replies: Replies) -> list[bool]:
        return _right(replies.general, self.quiz.general)


def _right(replies: tuple[str, ...], questions: tuple[QuizQuestion, ...]) -> list[bool]:
    return [is_right(reply, asked.answers) for reply, asked in zip(replies, questions, strict=True)]


def is_more(before: list[bool], after: list[bool]) -> bool:
    """Whether more are right after than before, by the sign test on those that differ (McNemar 1947, exact)."""
    gained = sum(new and not old for old, new in zip(before, after, strict=True))
    lost = sum(old and not new for old, new in zip(before, after, strict=True))
    return by_chance(gained, gained + lost) <= CHANCE
