"""The gate: a new version must be better than the base model, and not worse than the active version.

Both are decided with 95 % confidence, from the losses of test documents that the judged states have not been trained
on. `kernels/bench/studies.md`, "The gate's test", has the error rates of the two tests.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from sebp_edge.basics.units import percents_apart, plural
from sebp_edge.texts.splits import MIN_CLUSTERS
from sebp_edge.texts.word_figures import WordFigures
from sebp_edge.training.comparison import Comparison, compare, compare_words
from sebp_edge.training.evaluation import HeldOutLoss
from sebp_edge.training.quiz import QuizResult

# How much worse than the active version a new one may be, as a share of the active version's loss.
TOLERANCE = 0.02


class Verdict(StrEnum):
    """What the gate says of a new version. Only `BETTER` activates it."""

    BETTER = "better"
    NO_GAIN = "no gain"
    WORSE_THAN_ACTIVE = "worse than active"
    NOT_COMPARABLE = "not comparable"
    NOT_JUDGED = "not judged"
    REFIT_FAILED = "refit failed"
    FORGETS = "forgets"


@dataclass(frozen=True)
class ActiveVersion:
    """The version that is active when an adaptation begins.

    Attributes:
        version: its number.
        losses: its judged states' losses of test documents; None if there are none.
        reason: why it is not comparable, as the end of a sentence; empty if it is.
    """

    version: int
    losses: HeldOutLoss | None
    reason: str = ""


@dataclass(frozen=True)
class GateResult:
    """A verdict, and the losses that led to it.

    Attributes:
        before, after: the test losses of the base model and of the judged states; with folds, those of all folds
            together; None if there were no test documents.
        gain: the comparison of the two, without boilerplate lines; None if it was not judged.
        words: what ghost text would have done in the test documents; None if that was not counted.
        active: the active version; None if there was none.
        gain_over_active: the comparison with it, on documents that neither has been trained on; None if there was none.
        refit_loss: the loss on the validation documents after the last training, which has seen them, in nats per
            token; None if there was no such training.
        is_refit: whether the final state was trained on all documents.
        quiz: what a quiz showed; None if none was asked. It decides then, and the losses are those of answers.
    """

    verdict: Verdict
    before: HeldOutLoss | None = None
    after: HeldOutLoss | None = None
    gain: Comparison | None = None
    words: WordFigures | None = None
    active: ActiveVersion | None = None
    gain_over_active: Comparison | None = None
    refit_loss: float | None = None
    is_refit: bool = False
    quiz: QuizResult | None = None

    @property
    def passed(self) -> bool:
        return self.verdict is Verdict.BETTER

    def explain(self, margin: float, concerns: Sequence[str]) -> str:
        """Returns why the new version is better or not, in one sentence or more."""
        if self.quiz is not None:
            return _explain_quiz(self.quiz, self.verdict, self.active)
        if self.verdict is Verdict.NOT_JUDGED:
            return " ".join(concerns) or self._unjudged()
        tested = plural(len(self.after.rest.tokens), "document")
        change = f"On {tested} held out of the training, {self._described(margin)}"
        if self.verdict is Verdict.NO_GAIN:
            _, asked = percents_apart(self.gain.lower, margin)
            return f"{change}. The gate asks for a fall of at least {asked} with 95 % confidence; more text helps most."
        if self.verdict is Verdict.WORSE_THAN_ACTIVE:
            return (
                f"{change}. But version {self.active.version}, which is active, {_worse_than(self.gain_over_active)}."
            )
        if self.verdict is Verdict.NOT_COMPARABLE:
            return (
                f"{change}. But it cannot be compared with version {self.active.version}, which is active: "
                f"{self.active.reason}."
            )
        if self.verdict is Verdict.REFIT_FAILED:
            return (
                f"{change}. But the last training, on all documents, ended with a higher loss than before "
                f"({self.refit_loss:.3f}); try a lower learning rate."
            )
        return f"{change}."

    def _described(self, margin: float) -> str:
        """Returns what the test showed: in words of use if they were counted, and of the loss."""
        change = _describe(self.gain, margin)
        return change if self.words is None else f"{self.words.sentence}. {change[0].upper()}{change[1:]}"

    def _unjudged(self) -> str:
        if self.before is not None:
            return "All lines of the test documents stand in many documents, so the adapter was not judged."
        return (
            f"Judging takes at least {MIN_CLUSTERS} documents that are not copies of each other, so the adapter was "
            "not judged."
        )

    def with_refit(self, loss: float | None, judged_loss: float | None, *, has_judged_state: bool) -> "GateResult":
        """Adds the result of the last training.

        Args:
            loss, judged_loss: the losses on the validation documents after it, and in the judged states; None if there
                are no validation documents.
            has_judged_state: whether a judged state can be used instead if the loss is not lower.
        """
        if loss is None or loss < judged_loss:
            return replace(self, refit_loss=loss, is_refit=True)
        if has_judged_state or not self.passed:
            return replace(self, refit_loss=loss, is_refit=not has_judged_state)
        return replace(self, refit_loss=loss, is_refit=True, verdict=Verdict.REFIT_FAILED)

    def with_quiz(self, quiz: QuizResult) -> "GateResult":
        """Judges by a quiz: more right answers than the base model, and not fewer than the active version.

        General questions must be answered as well as before.
        """
        if not quiz.has_learnt:
            verdict = Verdict.NO_GAIN
        elif quiz.forgets:
            verdict = Verdict.FORGETS
        elif self.active is not None and quiz.active is None:
            verdict = Verdict.NOT_COMPARABLE
        else:
            verdict = Verdict.WORSE_THAN_ACTIVE if quiz.is_worse_than_active else Verdict.BETTER
        return replace(self, verdict=verdict, quiz=quiz)


def _describe(gain: Comparison, margin: float) -> str:
    """Returns how the loss changed, and how much it may have changed at worst, as the end of a sentence."""
    if math.isnan(gain.gain):
        return "the loss is not a finite number"
    change = _visible(gain.gain, margin)
    lower = _visible(gain.lower, margin) if math.isfinite(gain.lower) else ""
    if gain.gain <= 0:
        sure = f" (with 95 % confidence, by no more than {lower})" if lower else ""
        return f"predictions got no better: the loss rose by {change}{sure}"
    if gain.lower > 0:
        return f"predictions got better: the loss fell by {change} (with 95 % confidence, by at least {lower})"
    but = f", but may have risen by up to {lower} (95 % confidence)" if lower else ", which may be chance"
    return f"predictions may not be better: the loss fell by {change}{but}"


def _visible(change: float, margin: float) -> str:
    """Formats the size of a change with as many digits as tell it from nothing, and from the margin."""
    return percents_apart(abs(change), 0, margin)[0]


def _worse_than(gain: Comparison) -> str:
    """Returns how the version that is active compares with a worse one, as the end of a sentence."""
    if not math.isfinite(gain.lower):
        return "cannot be compared with it: a loss is not a finite number"
    at_worst, allowed = percents_apart(-gain.lower, TOLERANCE)
    limit = f"{at_worst} higher (95 % confidence); the gate allows {allowed}"
    held_out = "On documents held out of both trainings, the new loss is"
    if gain.gain > 0:
        return f"may be better. {held_out} {_visible(gain.gain, TOLERANCE)} lower, but may be {limit}"
    return f"is better. {held_out} {_visible(gain.gain, TOLERANCE)} higher, and may be {limit}"


def _explain_quiz(quiz: QuizResult, verdict: Verdict, active: ActiveVersion | None) -> str:
    figures = quiz.figures
    found = (
        f"It answers {figures.right_after} of {figures.questions} questions about notes that it has not seen "
        f"({figures.right_before} before), given the passage that the search finds, and {figures.general_after} of "
        f"{figures.general_questions} general questions ({figures.general_before} before)"
    )
    if verdict is Verdict.NO_GAIN and figures.right_after <= figures.right_before:
        return f"{found}, so it does not read better than the base model."
    if verdict is Verdict.NO_GAIN:
        return f"{found}: too few more for the gate to tell them from chance."
    if verdict is Verdict.FORGETS:
        return f"{found}: it has forgotten what the base model knew; try a lower learning rate."
    if verdict is Verdict.WORSE_THAN_ACTIVE:
        return f"{found}, but the version that is active answers {figures.right_active}."
    if verdict is Verdict.NOT_COMPARABLE:
        return f"{found}, but version {active.version}, which is active, could not be asked: {active.reason}."
    return f"{found}."


@dataclass(frozen=True)
class Gate:
    """Judges a new version.

    Attributes:
        margin: the gain over the base model that counts, as a share of its loss.
        cluster_of: the cluster of near-duplicates of each document; clusters are the units of the statistics.
        can_judge: whether the documents allow a judgement.
        active: the active version; None if there is none.
    """

    margin: float
    cluster_of: Mapping[int, int]
    can_judge: bool = True
    active: ActiveVersion | None = None

    def judge(self, before: HeldOutLoss | None, after: HeldOutLoss | None) -> GateResult:
        """Judges by the test losses of the base model and of the judged states, without boilerplate lines."""
        result = GateResult(Verdict.NOT_JUDGED, before, after, active=self.active)
        if before is None or not self.can_judge:
            return result
        own = after.rest
        if not own.tokens:  # all lines are boilerplate
            return result
        words = compare_words(before, after, self.cluster_of)
        result = replace(result, gain=compare(before.rest, own, self.cluster_of), words=words)
        if not result.gain.lower >= self.margin:
            return replace(result, verdict=Verdict.NO_GAIN)
        if self.active is None:
            return replace(result, verdict=Verdict.BETTER)
        if self.active.losses is None:
            return replace(result, verdict=Verdict.NOT_COMPARABLE)
        of_active = self.active.losses.rest
        difference = compare(of_active, own.only(of_active.nats), self.cluster_of)
        if difference.num_clusters < 2:
            reason = f"this takes 2 test documents that it was not trained on, but there are {difference.num_clusters}"
            return replace(result, verdict=Verdict.NOT_COMPARABLE, active=replace(self.active, reason=reason))
        verdict = Verdict.BETTER if difference.lower >= -TOLERANCE else Verdict.WORSE_THAN_ACTIVE
        return replace(result, verdict=verdict, gain_over_active=difference)
