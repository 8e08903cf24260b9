"""The gate: a new version must be better than the base model, and not worse than the active and the best version.

It decides by the losses of test documents that the judged states have not been trained on: over the base model with
95 % confidence in each decision, over earlier versions with 95 % confidence in all decisions of an adapter together.
`kernels/bench/how-the-gate-decides.md` has the error rates.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from sebp_edge.basics.units import percents_apart, plural
from sebp_edge.engine.training.comparison import Comparison, compare, compare_words
from sebp_edge.engine.training.evaluation import HeldOutLoss
from sebp_edge.engine.training.quiz import QuizResult
from sebp_edge.values.draw import MIN_CLUSTERS
from sebp_edge.values.word_figures import WordFigures

# How much worse than an earlier version a new one may be, as a share of that version's loss.
TOLERANCE = 0.02
# The chance of a wrong replacement that all decisions of an adapter share, by Student's t. Real losses are skewed: with
# this, up to 5 % of lives of 50 decisions replace a version by one that is worse beyond the tolerance.
_CHANCE = 0.003


class Verdict(StrEnum):
    """What the gate says of a new version. Only `BETTER` activates it."""

    BETTER = "better"
    NO_GAIN = "no gain"
    WORSE_THAN_ACTIVE = "worse than active"
    WORSE_THAN_BEST = "worse than best"
    NOT_COMPARABLE = "not comparable"
    NOT_JUDGED = "not judged"
    REFIT_FAILED = "refit failed"
    FORGETS = "forgets"


@dataclass(frozen=True)
class EarlierVersion:
    """A version that a new one is compared with."""

    version: int
    losses: HeldOutLoss | None  # its judged states' losses of test documents; None if there are none
    reason: str = ""  # why it is not comparable, as the end of a sentence; empty if it is


@dataclass(frozen=True)
class Life:
    """What an adapter has been through when an adaptation begins."""

    active: EarlierVersion | None = None
    best: EarlierVersion | None = None  # the best version so far, if it is another one and can be compared
    left_out: EarlierVersion | None = None  # a version that was better still, but cannot be compared
    refused: int = 0  # how many versions the gate has refused beside an earlier one

    @property
    def best_version(self) -> int | None:
        """The number of the best version so far that a new one can be compared with; None if there is none."""
        best = self.best or self.active
        return None if best is None or best.losses is None else best.version

    @property
    def level(self) -> float:
        """The level of the next decision.

        The shares of the chance, one for each number of refusals, add up to it. A version that is worse beyond the
        tolerance is refused, or is the one error that counts; so no share is used for two such versions.
        """
        return 1 - _CHANCE / ((self.refused + 1) * (self.refused + 2))


@dataclass(frozen=True)
class GateResult:
    """A verdict, and the losses that led to it."""

    verdict: Verdict
    # The test losses of the base model and of the judged states; with folds, those of all folds together; None if there
    # were no test documents.
    before: HeldOutLoss | None = None
    after: HeldOutLoss | None = None
    gain: Comparison | None = None  # the comparison of the two, without boilerplate lines; None if it was not judged
    # What ghost text would have done in the test documents; None if that was not counted.
    words: WordFigures | None = None
    life: Life = Life()
    # The comparison with the active version, on documents that neither has been trained on; None if there was none.
    gain_over_active: Comparison | None = None
    gain_over_best: Comparison | None = None  # the same with the best version so far, which may be the active one
    # The loss on the validation documents after the last training, which has seen them, in nats per token; None if
    # there was no such training.
    refit_loss: float | None = None
    is_refit: bool = False  # whether the final state was trained on all documents
    # What a quiz showed; None if none was asked. It decides then, and the losses are those of answers.
    quiz: QuizResult | None = None

    @property
    def passed(self) -> bool:
        return self.verdict is Verdict.BETTER

    @property
    def is_best(self) -> bool:
        """Whether it passed, and is surely no worse than the best version so far.

        A version that is better by chance would lower what the next ones are compared with.
        """
        return self.passed and (self.gain_over_best is None or self.gain_over_best.lower >= 0)

    @property
    def refused(self) -> int:
        """How many versions the gate has refused beside an earlier one, this one included."""
        decided = self.life.active is not None and self.verdict not in (Verdict.NOT_JUDGED, Verdict.NOT_COMPARABLE)
        return self.life.refused + (decided and not self.passed)

    def explain(self, margin: float, concerns: Sequence[str]) -> str:
        """Returns why the new version is better or not, in one sentence or more."""
        if self.quiz is not None:
            return _explain_quiz(self.quiz, self.verdict, self.life.active)
        if self.verdict is Verdict.NOT_JUDGED:
            return " ".join(concerns) or self._unjudged()
        active, best, left_out = self.life.active, self.life.best, self.life.left_out
        if self.verdict is Verdict.WORSE_THAN_ACTIVE:
            return _worse_than(self.gain_over_active, active, "which is active" if best else "the best so far")
        if self.verdict is Verdict.WORSE_THAN_BEST:
            return _worse_than(self.gain_over_best, best, "the best so far")
        tested = plural(len(self.after.rest.tokens), "document")
        change = f"On {tested} that it was not trained on, it {_describe(self.gain, margin)}"
        if self.verdict is Verdict.NO_GAIN and self.gain.gain == 0:
            return "The loss on validation documents fell in no epoch, so nothing was learnt; lower the learning rate."
        if self.verdict is Verdict.NO_GAIN:
            return f"{change}; more text helps most."
        if self.verdict is Verdict.NOT_COMPARABLE:
            return (
                f"{change}. But it cannot be compared with version {active.version}, which is active: {active.reason}."
            )
        if self.verdict is Verdict.REFIT_FAILED:
            return f"{change}. But the last training, on all documents, made it worse again; try a lower learning rate."
        typing = f" {self.words.sentence}" if self.words and self.words.sentence else ""
        if left_out is not None:
            typing += f" It was not compared with version {left_out.version}, the best so far: {left_out.reason}."
        return f"{change}.{typing}"

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
        elif self.life.active is not None and quiz.active is None:
            verdict = Verdict.NOT_COMPARABLE
        else:
            verdict = Verdict.WORSE_THAN_ACTIVE if quiz.is_worse_than_active else Verdict.BETTER
        return replace(self, verdict=verdict, quiz=quiz)


def _describe(gain: Comparison, margin: float) -> str:
    """Returns how much lower the loss is, and what the gate asks for if that is too little, as a predicate."""
    if math.isnan(gain.gain):
        return "predicts nothing, since its loss, which measures how wrong it is, is not a finite number"
    change = _visible(gain.gain, margin)
    if gain.gain <= 0:
        return f"predicts the text {change} worse than the base model"
    if gain.lower >= margin:
        return f"predicts the text {change} better than the base model, which is more than chance"
    lower, asked = percents_apart(gain.lower, margin)
    if gain.lower > 0:
        return f"surely predicts the text only {lower} better than the base model, and the gate asks for {asked}"
    return f"predicts the text {change} better than the base model, which may be chance; {asked} must be sure"


def _visible(change: float, margin: float) -> str:
    """Formats the size of a change with as many digits as tell it from nothing, and from the margin."""
    return percents_apart(abs(change), 0, margin)[0]


def _worse_than(gain: Comparison, other: EarlierVersion, which: str) -> str:
    """Returns how a new version compares with an earlier one that may be better."""
    name = f"version {other.version}, {which}"
    if not math.isfinite(gain.lower):
        return f"It cannot be compared with {name}: a loss, which measures how wrong it is, is not a finite number."
    at_worst, allowed = percents_apart(-gain.lower, TOLERANCE)
    change = _visible(gain.gain, TOLERANCE)
    found, then = (f"{change} better", "but") if gain.gain > 0 else (f"{change} worse", "and")
    return (
        "It predicts the text better than the base model. But on documents that neither was trained on, it is "
        f"{found} than {name}, {then} may be {at_worst} worse; the gate allows {allowed}."
    )


def _explain_quiz(quiz: QuizResult, verdict: Verdict, active: EarlierVersion | None) -> str:
    figures = quiz.figures
    found = (
        f"Of {figures.questions} questions about notes that it has not seen, it answers {figures.right_after} right, "
    )
    before = f"{found}{figures.right_before} before, given the passage that the search finds"
    if verdict is Verdict.NO_GAIN and figures.right_after <= figures.right_before:
        return f"{before}, so it does not read better than the base model."
    if verdict is Verdict.NO_GAIN:
        return f"{before}: too few more for the gate to tell them from chance."
    if verdict is Verdict.FORGETS:
        return (
            f"Of {figures.general_questions} general questions, it answers {figures.general_after} right, "
            f"{figures.general_before} before: it has forgotten what the base model knew; try a lower learning rate."
        )
    if verdict is Verdict.WORSE_THAN_ACTIVE:
        return f"{found}and the version that is active {figures.right_active}."
    if verdict is Verdict.NOT_COMPARABLE:
        return f"{before}. But version {active.version}, which is active, could not be asked: {active.reason}."
    as_before = figures.general_after >= figures.general_before
    general = "It answers as many general questions as before" if as_before else "It answers fewer general questions"
    return f"{before}. {general}{'' if as_before else ', by no more than chance explains'}."


@dataclass(frozen=True)
class Gate:
    """Judges a new version."""

    margin: float  # the gain over the base model that counts, as a share of its loss
    # The cluster of near-duplicates of each document; clusters are the units of the statistics.
    cluster_of: Mapping[int, int]
    can_judge: bool = True
    life: Life = Life()

    def judge(self, before: HeldOutLoss | None, after: HeldOutLoss | None) -> GateResult:
        """Judges by the test losses of the base model and of the judged states, without boilerplate lines."""
        result, life = GateResult(Verdict.NOT_JUDGED, before, after, life=self.life), self.life
        if before is None or not self.can_judge:
            return result
        own = after.rest
        if not own.tokens:  # all lines are boilerplate
            return result
        words = compare_words(before, after, self.cluster_of)
        result = replace(result, gain=compare(before.rest, own, self.cluster_of), words=words)
        if not result.gain.lower >= self.margin:
            return replace(result, verdict=Verdict.NO_GAIN)
        if life.active is None:
            return replace(result, verdict=Verdict.BETTER)
        if life.active.losses is None:
            return replace(result, verdict=Verdict.NOT_COMPARABLE)
        over_active = self._compare(life.active, own)
        if reason := _too_few(over_active):
            life = replace(life, active=replace(life.active, reason=reason))
            return replace(result, verdict=Verdict.NOT_COMPARABLE, life=life)
        over_best = self._compare(life.best, own) if life.best else over_active
        if reason := _too_few(over_best):
            life = replace(life, best=None, left_out=replace(life.best, reason=reason))
            over_best = over_active
        verdict = Verdict.BETTER
        if not over_best.lower >= -TOLERANCE:
            verdict = Verdict.WORSE_THAN_BEST if life.best else Verdict.WORSE_THAN_ACTIVE
        elif not over_active.lower >= -TOLERANCE:
            verdict = Verdict.WORSE_THAN_ACTIVE
        return replace(result, verdict=verdict, life=life, gain_over_active=over_active, gain_over_best=over_best)

    def _compare(self, earlier: EarlierVersion, own: HeldOutLoss) -> Comparison:
        """Compares on the documents that neither has been trained on."""
        losses = earlier.losses.rest
        return compare(losses, own.only(losses.nats), self.cluster_of, self.life.level)


def _too_few(difference: Comparison) -> str:
    """Returns why the documents are too few for a comparison; empty if they are not."""
    if difference.num_clusters >= 2:
        return ""
    return f"this takes 2 test documents that it was not trained on, but there are {difference.num_clusters}"
