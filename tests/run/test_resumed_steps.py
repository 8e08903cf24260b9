"""What goes on keeps its steps: a step that was paused within is repeated, with the options of before."""

from dataclasses import asdict

import pytest
from paused_jobs import RECIPE, THIRD_STEP, adapt, at_step, bits, checkpoint_of, personalizer, resume, verdict

from sebp_edge import AdapterStore
from sebp_edge.engine.memory.guard import MemoryGuard
from sebp_edge.engine.memory.memory_options import MemoryOptions
from sebp_edge.engine.sparse.patches import stops
from sebp_edge.engine.training.learner import Learner
from sebp_edge.engine.training.recovery import RecoveringLearner
from sebp_edge.errors import Paused
from sebp_edge.events import MemoryPlanned, StepDone
from sebp_edge.run.adaptation_job import Fixed, Resumed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unassessed")]

RECIPES = {
    "8-bit moments": {},
    "all weights": {"method": "full", "learning_rate": 1e-3},
    "updated in the backward pass": {"method": "full", "learning_rate": 1e-3},
}


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_pause_within_a_micro_batch_discards_it_and_waits_for_one_layer_at_most(
    model, notes, whole, tmp_path, monkeypatch, way
):
    store, run, layers = AdapterStore(tmp_path / "store"), stops._run_checked, []

    def run_checked(forward, check, *given, **options):
        now = "forward"

        def pausing():
            if now == way:
                layers.append(any(isinstance(event, StepDone) for event in paused.events))
                if layers.count(True) == 3:
                    assert paused.pause()
            check()

        output, now = run(forward, pausing, *given, **options), "backward"
        return output

    paused = personalizer(model, store)
    with monkeypatch.context() as patch:
        patch.setattr(stops, "_run_checked", run_checked)
        with pytest.raises(Paused):
            paused.adapt(notes[30], activate_anyway=True)
    assert layers.count(True) == 3
    assert sum(isinstance(event, StepDone) for event in paused.events) == 1
    resumed = personalizer(**store.jobs.get().arguments(), store=store)
    result = resumed.resume()
    assert (bits(store), verdict(result), result.curves) == whole[30][:3]


def test_a_pause_within_a_long_step_repeats_that_step(model, notes, tmp_path, run_with, monkeypatch):
    run_with(MemoryOptions(max_rows=80))
    lay_out, compute, calls, found, steps = RecoveringLearner.lay_out, Learner.accumulate, [], [], []

    def keep_steps(learner, schedule):
        lay_out(learner, schedule)
        steps[:] = schedule.epochs[0]

    def accumulate(learner, micro_batch, loss_tokens):
        compute(learner, micro_batch, loss_tokens)
        calls.append(len(steps[1].micro_batches))
        if len(found) == 1 and len(calls) == len(steps[0].micro_batches) + 2:
            assert made.pause()

    monkeypatch.setattr(RecoveringLearner, "lay_out", keep_steps)
    monkeypatch.setattr(Learner, "accumulate", accumulate)
    for number in range(2):
        store = AdapterStore(tmp_path / f"store-{number}")
        calls.clear()
        made = personalizer(model, store, recipe=RECIPE.replace(epochs=1))
        if number:
            with pytest.raises(Paused):
                made.adapt(notes[30], activate_anyway=True)
            assert [event.step for event in made.events if isinstance(event, StepDone)] == [1]
            assert calls[-1] > 2
            found.append(None)
            _, result = resume(store)
        else:
            result = made.adapt(notes[30], activate_anyway=True)
        found.append((bits(store), verdict(result)))
    assert found[0] == found[2]


@pytest.mark.parametrize("kind", RECIPES)
def test_every_kind_of_training_goes_on_bit_for_bit(model, notes, tmp_path, run_with, request, kind):
    recipe, found = RECIPE.replace(**RECIPES[kind]), []
    if kind == "8-bit moments":
        run_with(MemoryOptions(moments_in_8_bits=True))
    if kind == "updated in the backward pass":
        request.getfixturevalue("updated_in_backward")
    for at in (None, at_step("train", 5)):
        store = AdapterStore(tmp_path / f"store-{at is None}")
        result = adapt(model, store, notes[30], at, recipe=recipe)
        found.append((bits(store), verdict(result), result.curves))
    assert found[0] == found[1]


def test_the_plan_and_smaller_micro_batches_stay(model, notes, tmp_path, monkeypatch):
    found, steps = [], []

    def shortfall(_guard):
        steps.append(None)
        return int(len(steps) == 2)  # before the second step, for example because of other programs

    monkeypatch.setattr(MemoryGuard, "shortfall", shortfall)
    for number in range(2):
        store = AdapterStore(tmp_path / f"store-{number}")
        steps.clear()
        options = {"memory_budget": "30GB", "recipe": RECIPE.replace(epochs=1)}
        if number:
            with pytest.raises(Paused):
                personalizer(model, store, THIRD_STEP, **options).adapt(notes[30], activate_anyway=True)
            (learner,) = checkpoint_of(store.jobs.get())["learners"].values()
            assert learner["max_rows"] < learner["prepared_rows"]
            resumed, result = resume(store)
            assert not any(isinstance(event, MemoryPlanned) for event in resumed.events)
        else:
            result = personalizer(model, store, **options).adapt(notes[30], activate_anyway=True)
        found.append((bits(store), verdict(result)))
    assert found[0] == found[1]


def test_options_that_no_longer_exist_are_left_out():
    options = asdict(MemoryOptions(max_rows=80)) | {"folds_at_once": True}
    fixed = Fixed(salt="", recipe={}, options=options, fingerprint="", examples="", packages={})
    assert Resumed(fixed, None, None, []).options == MemoryOptions(max_rows=80)
