"""Trainings side by side: each makes the steps that it makes alone, whatever becomes of the others."""

import math

import pytest
import torch
from builders import make_examples, schedule_of
from failing_memory import Failing, recovering_learner
from graph_learners import LoraAdaptation, make_learner

from sebp_edge import Recipe
from sebp_edge.errors import NonFiniteLoss, SparsityError
from sebp_edge.events import Evaluated, StepDone
from sebp_edge.memory.options import FASTEST, MemoryOptions
from sebp_edge.texts.examples import IGNORE, Example
from sebp_edge.texts.schedule import shuffled_batches
from sebp_edge.training.evaluation import evaluate
from sebp_edge.training.loop import Trainer, run_in_lockstep
from sebp_edge.training.side_by_side import SideBySide, can_lie_side_by_side

RECIPE = Recipe(name="test", description="", r=4, learning_rate=2e-2, epochs=4, patience=2, batch_tokens=60)
# Of three trainings: other texts, other rates, other numbers of steps.
SHARES = ((0, 9), (4, 12), (2, 5))
RATES = (2e-2, 5e-3, 0.5)


@pytest.fixture
def examples():
    note = make_examples([30])[0].input_ids
    about_it = [Example([*note, own], [IGNORE] * 30 + [own], 20 + own) for own in (5, 6)]
    return [*make_examples([31, 2, 17, 40, 5, 23, 27, 30, 12, 9]), *about_it]


@pytest.fixture
def learner(base, examples):
    with recovering_learner(base, examples, RECIPE) as learner:
        yield learner


def trainings(learner, examples, patience=RECIPE.patience):
    """Returns the recipe and the schedule of each training, laid out."""
    for rate, (begin, end) in zip(RATES, SHARES, strict=True):
        recipe = RECIPE.replace(learning_rate=rate, patience=patience)
        batches = shuffled_batches(examples[begin:end], recipe.batch_tokens, recipe.epochs, seed=begin)
        schedule = schedule_of(learner, batches, examples[:2], examples[2:4])
        schedule.lay_out(learner.limit)
        yield recipe, schedule


def alone(learner, examples, events, **options):
    """Returns the progress of each training, one after another."""
    start, found = learner.snapshot(), []
    for number, (recipe, schedule) in enumerate(trainings(learner, examples, **options)):
        learner.start_again(start)
        learner.prepare(schedule)
        found.append(Trainer(learner, recipe, events.append, f"fold {number + 1}").train(schedule))
    learner.start_again(start)
    return found


def side_by_side(learner, examples, events, **options):
    """Returns the progress of each training, at once."""
    recipes, schedules = zip(*trainings(learner, examples, **options), strict=True)
    start = learner.snapshot()
    with SideBySide(learner, RECIPE, FASTEST, len(recipes)) as together:
        together.prepare(schedules, [0] * len(recipes))
        trainers = [
            Trainer(place, recipe, events.append, f"fold {number + 1}")
            for number, (place, recipe) in enumerate(zip(together.places, recipes, strict=True))
        ]
        steps = {number: each.steps(schedules[number]) for number, each in enumerate(trainers)}
        run_in_lockstep(steps, together.run)
    learner.start_again(start)
    return [trainer.progress for trainer in trainers]


def assert_alike(found, expected):
    assert (found.steps, found.total_steps, found.tokens) == (expected.steps, expected.total_steps, expected.tokens)
    assert (found.best_epoch, found.epoch, found.is_over) == (expected.best_epoch, expected.epoch, expected.is_over)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.validations == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in expected.validations]
    for one, other in zip(found.best_state, expected.best_state, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


@pytest.mark.parametrize("has_graphs", [False, True])
def test_each_makes_the_steps_that_it_makes_alone(learner, examples, plain_graphs, has_graphs):
    if has_graphs:
        learner.begin_graphs()
    events, expected_events = [], []
    expected = alone(learner, examples, expected_events)
    found = side_by_side(learner, examples, events)
    assert len({progress.steps for progress in expected}) == 3  # some are over before others
    for one, other in zip(found, expected, strict=True):
        assert_alike(one, other)
    for phase in ("fold 1", "fold 2", "fold 3"):
        for kind in (StepDone, Evaluated):
            own, of_each = (
                [e for e in all_ if isinstance(e, kind) and e.phase == phase] for all_ in (events, expected_events)
            )
            assert len(own) == len(of_each) > 0
    # Afterwards the learner is as it was.
    again = alone(learner, examples, [])
    assert [progress.losses for progress in again] == [progress.losses for progress in expected]


def _copied(state):
    return state._replace(tensors=[each.clone() for each in state.tensors])


def test_a_training_goes_on_alone_from_where_it_was(learner, examples):
    expected = alone(learner, examples, [])
    recipes, schedules = zip(*trainings(learner, examples), strict=True)
    with SideBySide(learner, RECIPE, FASTEST, 3) as together:
        trainers = [Trainer(*each, [].append, "") for each in zip(together.places, recipes, strict=True)]
        steps, done, states = {n: each.steps(schedules[n]) for n, each in enumerate(trainers)}, [], []

        def run(own):
            if len(done) == 3:
                states.extend(_copied(place.state) for place in together.places)
                raise KeyboardInterrupt
            done.append(own)
            return together.run(own)

        with pytest.raises(KeyboardInterrupt):
            run_in_lockstep(steps, run)
    for number, trainer in enumerate(trainers):
        learner.prepare(schedules[number], state=states[number])
        own = Trainer(learner, recipes[number], [].append, "", trainer.progress)
        assert_alike(own.train(schedules[number]), expected[number])


def test_one_that_diverges_is_named_and_the_others_have_a_state(learner, examples):
    recipes, schedules = zip(*trainings(learner, examples), strict=True)
    with SideBySide(learner, RECIPE, FASTEST, 3) as together:
        trainers = [Trainer(*each, [].append, "") for each in zip(together.places, recipes, strict=True)]
        together.places[1].parameters[0].data.fill_(math.nan)
        before = [place.snapshot() for place in together.places]
        with pytest.raises(NonFiniteLoss, match="At step 1"):
            run_in_lockstep({n: each.steps(schedules[n]) for n, each in enumerate(trainers)}, together.run)
        assert trainers[0].progress.steps == 1
        for number in (0, 2):
            state = together.places[number].snapshot()
            assert all(each.isfinite().all() for each in state)
            assert not all(map(torch.equal, state, before[number]))


def test_if_memory_runs_out_nobody_has_made_a_step(learner, examples):
    _, schedules = zip(*trainings(learner, examples), strict=True)
    with SideBySide(learner, RECIPE, FASTEST, 3) as together:
        steps = {number: (schedule.epochs[0][0], 1e-2) for number, schedule in enumerate(schedules)}
        before = [place.snapshot() for place in together.places]
        with Failing(400), pytest.raises(torch.OutOfMemoryError):
            together.run(steps)
        for place, state in zip(together.places, before, strict=True):
            assert all(map(torch.equal, place.snapshot(), state))
        assert not any(each.grad.any() for place in together.places for each in place.parameters)
        again = together.run(steps)
        expected = [evaluate(place, schedules[0].validation) for place in together.places]
    assert len(expected) == 3
    assert all(float(outcome.loss) > 0 for outcome in again.values())


def test_only_captured_steps_without_checkpoints_can_be_those_of_several_trainings(base, examples, plain_graphs):
    for options, expected in ((FASTEST, True), (MemoryOptions(checkpoints=1), False)):
        with recovering_learner(base, examples, RECIPE, options=options) as learner:
            assert not can_lie_side_by_side(learner)
            learner.begin_graphs()
            assert can_lie_side_by_side(learner) == expected


def test_a_model_on_padded_batches_is_refused(base, examples):
    with (
        recovering_learner(base, examples, RECIPE, padded=True) as learner,
        pytest.raises(SparsityError, match="padded"),
    ):
        SideBySide(learner, RECIPE, FASTEST, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and there is none here")
def test_captured_steps_are_those_of_each_alone(examples):
    # In bf16, rounding would decide which epoch is the best, and so when a training ends.
    patience = RECIPE.epochs
    with make_learner(LoraAdaptation(), examples) as learner:
        expected = alone(learner, examples, [], patience=patience)
        found, again = (side_by_side(learner, examples, [], patience=patience) for _ in range(2))
    for one, same, other in zip(found, again, expected, strict=True):
        assert one.losses[0] == same.losses[0] == pytest.approx(other.losses[0], rel=1e-3)
        assert one.losses == pytest.approx(same.losses, rel=1e-3)
        assert one.losses == pytest.approx(other.losses, rel=3e-2)
