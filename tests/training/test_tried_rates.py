"""Of several learning rates, each trains the first epoch from the start, and the training goes on at the best one."""

import math
import random

import pytest
import torch
from builders import WORDS, schedule_of

from sebp_edge import Recipe
from sebp_edge.engine.models.adaptation import attach, snapshot, trainable
from sebp_edge.engine.sparse.rows.batches import Collator
from sebp_edge.engine.sparse.rows.schedule import shuffled_batches
from sebp_edge.engine.training.loop import Trainer, next_rate
from sebp_edge.engine.training.recovery import RecoveringLearner
from sebp_edge.errors import NonFiniteLoss
from sebp_edge.events import Evaluated, StepDone
from sebp_edge.lessons.examples import encode
from sebp_edge.values.documents import Document

LOW, HIGH, FAR = 1e-4, 5e-3, 3.0
RECIPE = Recipe(name="test", description="", r=4, learning_rate=HIGH, epochs=3, batch_tokens=120, context_length=64)


@pytest.fixture
def examples(base):
    order = random.Random(0)
    documents = [Document(f"text {n}", " ".join(order.choices(WORDS, k=24)) + ".") for n in range(16)]
    return encode(documents, base.tokenizer, 64)[0]


@pytest.fixture
def train(base, examples):
    """Trains at the given rates; returns the progress, the best state, and the events."""

    def run(*rates, on_event=None, **changes):
        recipe, events = RECIPE.replace(learning_rate=rates, **changes), []

        def sink(event):
            events.append(event)
            if on_event is not None:
                on_event(event, trainer)

        adaptation = attach(base, recipe, seed=0)
        learner = RecoveringLearner(adaptation, recipe, examples, Collator(64, base.pad_token_id), sink)
        trainer = Trainer(learner, recipe, sink, "train", snapshot(adaptation))
        try:
            with learner:
                batches = shuffled_batches(examples[:12], recipe.batch_tokens, recipe.epochs, seed=0)
                schedule = schedule_of(learner, batches, examples[12:], tries=len(rates))
                learner.prepare(schedule)
                return trainer.train(schedule), snapshot(adaptation), events
        finally:
            adaptation.detach()

    return run


def of_kind(kind, events):
    return [event for event in events if isinstance(event, kind)]


def test_each_rate_begins_at_the_start_and_a_best_last_one_trains_as_if_it_were_the_only_one(train):
    alone, state, events = train(HIGH)
    tried, other_state, other_events = train(LOW, HIGH)
    assert tried.learning_rate == HIGH and tried.tried[1][1] < tried.tried[0][1]
    assert all(torch.equal(a, b) for a, b in zip(state, other_state, strict=True))
    assert (tried.losses, tried.validations) == (alone.losses, alone.validations)
    assert tried.best_epoch == alone.best_epoch
    first = len(tried.losses) // 3
    assert tried.steps == tried.total_steps == len(tried.losses) + first
    steps = of_kind(StepDone, other_events)
    assert [step.loss for step in steps[first:]] == [step.loss for step in of_kind(StepDone, events)]
    assert [step.loss for step in steps[:1]] == [steps[first].loss]  # both before an update
    assert [step.epoch for step in steps[:: first or 1]] == [1, 1, 2, 3]


def test_the_training_goes_on_from_the_state_of_an_earlier_rate_if_that_is_best(train):
    alone, _, _ = train(HIGH)
    tried, _, events = train(HIGH, FAR)
    assert tried.learning_rate == HIGH and tried.tried[0][1] == alone.validations[1][1] < tried.tried[1][1]
    per_epoch = len(alone.losses) // 3
    assert tried.losses[: per_epoch + 1] == alone.losses[: per_epoch + 1]  # the next step's loss is before its update
    assert len(tried.losses) == 3 * per_epoch
    assert [steps for steps, _ in tried.validations] == [0, per_epoch, 2 * per_epoch, 3 * per_epoch]
    after = [step.learning_rate for step in of_kind(StepDone, events)[2 * per_epoch :]]
    assert LOW < after[0] == max(after) < HIGH  # of the second epoch of a schedule of three
    assert tried.best_loss < tried.tried[0][1]


def test_the_events_name_the_rate_of_each_trial_only(train):
    _, _, events = train(LOW, HIGH)
    found = [(event.epoch, event.learning_rate) for event in of_kind(Evaluated, events)]
    assert found[:3] == [(0, None), (1, LOW), (1, HIGH)]
    assert {rate for _, rate in found[3:]} == {None}


@pytest.mark.parametrize("rates", [(HIGH, FAR), (HIGH, FAR, 2 * FAR), (HIGH / 2, HIGH, FAR)])
def test_a_rate_at_which_the_training_diverges_is_left_out(train, rates):
    def poison(event, trainer):
        if isinstance(event, StepDone) and event.learning_rate > 1:
            trainable(trainer.learner.adaptation)[0].data.fill_(math.nan)

    progress, state, _ = train(*rates, on_event=poison)
    assert progress.learning_rate in (HIGH, HIGH / 2)
    assert {rate for rate, loss in progress.tried if math.isinf(loss)} == {rate for rate in rates if rate > 1}
    assert all(torch.isfinite(tensor).all() for tensor in state)
    assert progress.best_epoch > 0 and all(map(math.isfinite, progress.losses))


def test_a_training_that_diverges_at_each_rate_raises_and_restores_the_start(train, base):
    start = []

    def poison(event, trainer):
        start[:] = start or [tensor.clone() for tensor in trainer.start]
        if isinstance(event, StepDone):
            trainable(trainer.learner.adaptation)[0].data.fill_(math.nan)
        trainers[:] = [trainer]

    trainers = []
    with pytest.raises(NonFiniteLoss):
        train(LOW, HIGH, on_event=poison)
    assert all(torch.equal(a, b) for a, b in zip(start, trainers[0].progress.best_state, strict=True))


def test_a_training_that_improves_at_no_rate_ends_after_the_trials(train):
    def spoil(event, trainer):
        if isinstance(event, StepDone):
            for parameter in trainable(trainer.learner.adaptation):
                parameter.data.add_(0.5)

    progress, _, events = train(LOW, HIGH, epochs=5, on_event=spoil)
    assert (progress.epoch, progress.best_epoch) == (2, 0)
    assert min(loss for _, loss in progress.tried) > progress.best_loss == of_kind(Evaluated, events)[0].loss


RATES = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3)


@pytest.mark.parametrize("best", RATES)
def test_a_loss_with_one_minimum_is_climbed_down_from_the_middle(best):
    recipe, tried = RECIPE.replace(learning_rate=RATES), []
    while (rate := next_rate(recipe, tried)) is not None:
        tried.append((rate, abs(math.log(rate / best))))
    assert tried[0][0] == 5e-4 and len({rate for rate, _ in tried}) == len(tried)
    assert min(tried, key=lambda each: each[1])[0] == best
    place = RATES.index(best)
    assert {*RATES[max(0, place - 1) : place + 2]} <= {rate for rate, _ in tried}


def test_a_rate_above_the_middle_that_is_better_ends_the_trials_without_the_lower_one(train):
    progress, _, events = train(LOW / 10, LOW, HIGH)
    assert [rate for rate, _ in progress.tried] == [LOW, HIGH] and progress.learning_rate == HIGH
    assert progress.steps == progress.total_steps == of_kind(StepDone, events)[-1].steps
