"""The facts of a run: one report, which its version, its page and its result read."""

import functools
import importlib.metadata
import platform
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from statistics import fmean

import torch

from sebp_edge.engine.training.comparison import interval
from sebp_edge.engine.training.evaluation import HeldOutLoss
from sebp_edge.engine.training.gate import TOLERANCE, GateResult
from sebp_edge.engine.training.loop import TrainingProgress
from sebp_edge.engine.training.run import TrainingRun
from sebp_edge.run.assessment import Assessment
from sebp_edge.run.probing import Probed
from sebp_edge.run.version_texts import VersionTexts
from sebp_edge.store.record import AdapterRecord
from sebp_edge.store.training_report import (
    CopiedRun,
    Cost,
    Curve,
    Gains,
    KeptSamples,
    LearntOn,
    RowCounts,
    Tested,
    TestLoss,
    Texts,
    TrainingReport,
)

# A curve with more steps has means of several, so that the report of a long training stays small.
MAX_POINTS = 300


@dataclass(frozen=True)
class Report:
    """The facts of a run, which its version, its page and its result read.

    Attributes:
        record: counts, losses and settings, which lists of adapters read.
        training: how it was trained and tested; counts and figures only.
        words: words and names of the user's, which are kept only if the user asked for that.
    """

    record: AdapterRecord
    training: TrainingReport
    words: KeptSamples

    @classmethod
    def of(cls, run: TrainingRun, assessment: Assessment | None, texts: VersionTexts) -> "Report":
        """Makes the report; `assessment` is None if it was stopped, and the run's result if the training was."""
        training = TrainingReport(
            tested=_tested(run, run.result) if run.result and run.result.gain else None,
            curves=tuple(_curve(progress) for progress in run.progress),
            texts=_texts(run),
            rows=_rows(run),
            cost=_cost(run),
            copies=tuple(CopiedRun(copy.run, copy.base_run) for copy in assessment.copies) if assessment else None,
            expectation=assessment.expectation if assessment else "",
            concerns=run.task.dataset.concerns,
            learnt_on=_learnt_on(texts),
        )
        quiz = run.result.quiz if run.result else None
        words = KeptSamples(
            samples=assessment.samples if assessment else (),
            left_out=tuple(run.task.dataset.left_out),
            copies=tuple(copy.document for copy in assessment.copies) if assessment else (),
            answers=tuple(quiz.answered) if quiz else (),
        )
        return cls(_record(run, training, assessment.probed if assessment else None), training, words)


def _record(run: TrainingRun, report: TrainingReport, probed: Probed | None) -> AdapterRecord:
    base, task, result = run.base, run.task, run.result
    gain, over_active, over_best = (
        (result.gain, result.gain_over_active, result.gain_over_best) if result else (None, None, None)
    )
    active = result.life.active if result else None
    return AdapterRecord(
        base_model=base.reference.public_name,
        model=base.reference.name,
        fingerprint=base.fingerprint,
        recipe=asdict(task.recipe),
        documents=report.texts.documents,
        examples=report.texts.examples,
        tokens=report.texts.tokens,
        heldout_loss_before=gain.before if gain else None,
        heldout_loss_after=gain.after if gain else None,
        verdict=str(result.verdict) if result else None,
        explanation=result.explain(task.recipe.margin, report.concerns) if result else None,
        compared_with=active.version if active else None,
        compared_loss_before=over_active.before if over_active else None,
        compared_loss_after=over_active.after if over_active else None,
        best_before=result.life.best_version if result else None,
        best_loss_before=over_best.before if over_best else None,
        best_loss_after=over_best.after if over_best else None,
        is_best=bool(result and result.is_best),
        refused=result.refused if result else None,
        packages=package_versions(),
        threads=torch.get_num_threads() if base.model.device.type == "cpu" else None,
        trained_on_all=result.is_refit if result else False,
        general_loss_before=probed.general_before if probed else None,
        general_loss_after=probed.general_after if probed else None,
        language=probed.language if probed else None,
        facts=probed.facts if probed else None,
        seed=task.seed,
        chat=task.dataset.is_chat,
        learnt_on_from=report.learnt_on.version if report.learnt_on else None,
        quiz=asdict(result.quiz.figures) if result and result.quiz else None,
        words=result.words if result else None,
    )


def package_versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries that compute."""
    versions = {"python": platform.python_version()}
    for name in ("torch", "transformers", "peft", "safetensors"):
        with suppress(importlib.metadata.PackageNotFoundError):  # a frozen app may lack it
            versions[name] = _version(name)
    return versions


# Reading it takes 4 ms for each package.
_version = functools.cache(importlib.metadata.version)


def _learnt_on(texts: VersionTexts) -> LearntOn | None:
    lessons = texts.lessons
    if lessons is None:
        return None
    new, changed, replayed, gone = map(len, (lessons.new, lessons.changed, lessons.replayed, lessons.gone))
    return LearntOn(texts.learnt_on_from, new, changed, replayed, gone)


def _tested(run: TrainingRun, result: GateResult) -> Tested:
    active, over_active, over_best = result.life.active, result.gain_over_active, result.gain_over_best
    before, after = result.before.boilerplate, result.after.boilerplate
    return Tested(
        base=_test_loss(run, result.before),
        active=_test_loss(run, active.losses) if active and active.losses else None,
        adapted=_test_loss(run, result.after),
        gains=Gains(
            over_base=result.gain.gain,
            over_base_at_least=result.gain.lower,
            over_active=over_active.gain if over_active else None,
            over_active_at_least=over_active.lower if over_active else None,
            over_best=over_best.gain if over_best else None,
            over_best_at_least=over_best.lower if over_best else None,
            margin=run.task.recipe.margin,
            tolerance=TOLERANCE,
            not_comparable=active.reason if active else "",
        ),
        boilerplate_base=before.mean if before.nats else None,
        boilerplate_adapted=after.mean if before.nats else None,
        refit_loss=result.refit_loss,
        boilerplate_share=sum(before.tokens.values()) / sum(result.before.tokens.values()),
    )


def _test_loss(run: TrainingRun, losses: HeldOutLoss) -> TestLoss:
    rest = losses.rest
    lowest, highest = interval(rest, run.task.dataset.draw.cluster_of) or (None, None)
    return TestLoss(rest.mean, lowest, highest, len(rest.tokens), sum(rest.tokens.values()))


def _curve(progress: TrainingProgress) -> Curve:
    size = max(1, -(-len(progress.losses) // MAX_POINTS))
    begins = range(0, len(progress.losses), size)
    means = [round(fmean(progress.losses[begin : begin + size]), 4) for begin in begins]
    return Curve(
        phase=progress.phase,
        best_epoch=progress.best_epoch,
        steps=tuple(min(number * size, len(progress.losses)) for number in range(1, len(means) + 1)),
        losses=tuple(means),
        evaluated_after=tuple(steps for steps, _ in progress.validations),
        validation=tuple(round(loss, 4) for _, loss in progress.validations),
    )


def _texts(run: TrainingRun) -> Texts:
    data = run.task.dataset
    roles = Counter(document.role for document in data.draw.history.known)
    reasons = Counter(item.kind for item in data.left_out)
    return Texts(
        documents=data.num_documents,
        examples=len(data.examples),
        tokens=data.num_tokens,
        splits=dict(sorted(roles.items())),
        left_out=dict(reasons.most_common()),
    )


def _rows(run: TrainingRun) -> RowCounts:
    data = run.task.dataset
    return RowCounts(
        context_length=data.context_length,
        padded=len(data.examples) * data.context_length,
        tokens=data.num_tokens,
        active=sum(example.num_active_tokens for example in data.examples),
        loss=sum(example.num_loss_tokens for example in data.examples),
        padding_in_forward=None if run.is_hoisted is None else not run.is_hoisted,
    )


def _cost(run: TrainingRun) -> Cost:
    training_seconds = sum(progress.seconds for progress in run.progress)
    tokens = sum(progress.tokens for progress in run.progress)
    return Cost(
        device=run.base.device.type,
        budget=run.guard.budget,
        predicted=run.guard.predicted,
        peak=run.guard.peak,
        allocator_peak=run.guard.allocator_peak,
        seconds=round(run.clock() - run.began, 3),
        training_seconds=round(training_seconds, 3),
        tokens_per_second=tokens / training_seconds if training_seconds else None,
    )
