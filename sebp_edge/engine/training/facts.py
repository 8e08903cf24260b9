"""Collects the facts of a run: counts, losses, curves, memory and time."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean

import torch

from sebp_edge.engine.training.comparison import Comparison, interval
from sebp_edge.engine.training.evaluation import HeldOutLoss
from sebp_edge.engine.training.gate import TOLERANCE, EarlierVersion, GateResult
from sebp_edge.engine.training.loop import TrainingProgress
from sebp_edge.engine.training.run import Task, TrainingRun
from sebp_edge.machine.packages import package_versions
from sebp_edge.values.dataset import Dataset
from sebp_edge.values.training_facts import Cost, Curve, Gains, RowCounts, Tested, TestLoss, Texts, TrainingFacts

# A curve with more steps has means of several, so that the report of a long training stays small.
MAX_POINTS = 300
# In place of a comparison, or of the version that was active, if there is none.
_NOT_COMPARED, _NO_VERSION = Comparison(None, None, None, None, 0), EarlierVersion(None, None)


def facts_of(run: TrainingRun) -> TrainingFacts:
    """Returns what a run has found so far; nothing of the gate if it was stopped before."""
    task, dataset = run.task, run.task.dataset
    facts = TrainingFacts(
        documents=dataset.num_documents,
        examples=len(dataset.examples),
        tokens=dataset.num_tokens,
        seed=task.seed,
        trained_on_all=False,
        chat=dataset.is_chat,
        is_best=False,
        packages=package_versions(),
        threads=torch.get_num_threads() if run.base.model.device.type == "cpu" else None,
        curves=tuple(map(_curve, run.progress)),
        texts=_texts(dataset),
        rows=_rows(dataset, run.is_hoisted),
        cost=_cost(run),
        concerns=dataset.concerns,
        left_out=tuple(dataset.left_out),
    )
    return _judged(facts, task, run.result) if run.result else facts


def _judged(facts: TrainingFacts, task: Task, result: GateResult) -> TrainingFacts:
    """Adds what the gate has seen and said."""
    active, quiz = result.life.active or _NO_VERSION, result.quiz
    gain, over_active, over_best = (
        comparison or _NOT_COMPARED for comparison in (result.gain, result.gain_over_active, result.gain_over_best)
    )
    gains = Gains(
        over_base=gain.gain,
        over_base_at_least=gain.lower,
        over_active=over_active.gain,
        over_active_at_least=over_active.lower,
        over_best=over_best.gain,
        over_best_at_least=over_best.lower,
        margin=task.recipe.margin,
        tolerance=TOLERANCE,
        not_comparable=active.reason,
    )
    return replace(
        facts,
        heldout_loss_before=gain.before,
        heldout_loss_after=gain.after,
        verdict=str(result.verdict),
        trained_on_all=result.is_refit,
        explanation=result.explain(task.recipe.margin, task.dataset.concerns),
        compared_with=active.version,
        compared_loss_before=over_active.before,
        compared_loss_after=over_active.after,
        best_before=result.life.best_version,
        best_loss_before=over_best.before,
        best_loss_after=over_best.after,
        is_best=result.is_best,
        refused=result.refused,
        quiz=quiz.figures if quiz else None,
        words=result.words,
        tested=_tested(result, active, gains, task.dataset.draw.cluster_of) if result.gain else None,
        answers=tuple(quiz.answered) if quiz else (),
        refit_loss=result.refit_loss,
        gains=gains,
    )


def _tested(result: GateResult, active: EarlierVersion, gains: Gains, cluster_of: Mapping[int, int]) -> Tested:
    before, after = result.before.boilerplate, result.after.boilerplate
    return Tested(
        base=_test_loss(result.before, cluster_of),
        active=_test_loss(active.losses, cluster_of) if active.losses else None,
        adapted=_test_loss(result.after, cluster_of),
        gains=gains,
        boilerplate_base=before.mean if before.nats else None,
        boilerplate_adapted=after.mean if before.nats else None,
        refit_loss=result.refit_loss,
        boilerplate_share=sum(before.tokens.values()) / sum(result.before.tokens.values()),
    )


def _test_loss(losses: HeldOutLoss, cluster_of: Mapping[int, int]) -> TestLoss:
    rest = losses.rest
    lowest, highest = interval(rest, cluster_of) or (None, None)
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


def _texts(data: Dataset) -> Texts:
    roles = Counter(document.split for document in data.draw.history.known)
    reasons = Counter(item.kind for item in data.left_out)
    return Texts(
        documents=data.num_documents,
        examples=len(data.examples),
        tokens=data.num_tokens,
        splits=dict(sorted(roles.items())),
        left_out=dict(reasons.most_common()),
    )


def _rows(data: Dataset, is_hoisted: bool | None) -> RowCounts:
    return RowCounts(
        context_length=data.context_length,
        padded=len(data.examples) * data.context_length,
        tokens=data.num_tokens,
        active=sum(example.num_active_tokens for example in data.examples),
        loss=sum(example.num_loss_tokens for example in data.examples),
        padding_in_forward=None if is_hoisted is None else not is_hoisted,
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
