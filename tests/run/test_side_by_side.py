"""Folds that are trained side by side end as those that are trained one after another; here without a GPU."""

import json

import pytest
import torch
from builders import make_sentences
from paused_jobs import RECIPE, at_step, bits, personalizer, verdict
from quick import skip_assessment
from safetensors.torch import load_file

from sebp_edge import AdapterStore
from sebp_edge.errors import Interrupted, Paused, SparsityError
from sebp_edge.events import Evaluated, Notice, StepDone, TrainingStarted
from sebp_edge.training.side_by_side import SideBySide

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unassessed")]

NUMBER = 13  # of notes, which are too few for one split


@pytest.fixture(scope="module")
def apart(model, notes, tmp_path_factory):
    """What folds that are trained one after another are."""
    with pytest.MonkeyPatch.context() as patch:
        skip_assessment(patch)
        return adapt(model, notes, tmp_path_factory.mktemp("apart") / "store")


@pytest.fixture
def at_once(monkeypatch):
    """Trains folds side by side, whatever they gain."""
    train_at_once(monkeypatch)


def train_at_once(patch):
    patch.setattr("sebp_edge.training.run.pays", lambda schedules, done: len(schedules) > 1)
    patch.setattr("sebp_edge.training.run.can_lie_side_by_side", lambda learner: True)


def adapt(model, notes, store, at=None, **options):
    made = personalizer(model, AdapterStore(store), at, recipe=RECIPE.replace(batch_tokens=60), **options)
    return made, made.adapt(notes[NUMBER], activate_anyway=True)


def notices(events):
    return [event.message for event in events if isinstance(event, Notice)]


def of_phase(events, phase):
    return [
        (event.step, event.loss, event.epoch, event.tokens)
        for event in events
        if isinstance(event, StepDone) and event.phase == phase
    ] + [
        (event.split, event.loss, event.epoch)
        for event in events
        if isinstance(event, Evaluated) and event.phase == phase
    ]


def weights(store):
    folder = store.adapter("default").version_folder(1)
    return {path.relative_to(folder): load_file(path) for path in sorted(folder.rglob("*.safetensors"))}


def test_folds_at_once_end_as_one_after_another(model, notes, apart, tmp_path, at_once):
    made, result = adapt(model, notes, tmp_path / "store")
    one, expected = apart
    events = one.events
    assert notices(made.events) == ["3 folds are trained side by side.", *notices(events)]
    assert verdict(result)[0] == verdict(expected)[0]
    assert verdict(result)[1:] == pytest.approx(verdict(expected)[1:], rel=1e-4)
    phases = [event.phase for event in events if isinstance(event, TrainingStarted)]
    assert [event.phase for event in made.events if isinstance(event, TrainingStarted)] == phases
    for phase in phases:
        found, before = of_phase(made.events, phase), of_phase(events, phase)
        assert len(found) > 4
        for own, other in zip(found, before, strict=True):
            assert own == tuple(pytest.approx(each, rel=1e-4) if type(each) is float else each for each in other)
    assert_alike(weights(made.store), weights(one.store))


@pytest.mark.parametrize("place", [("fold 1", 1), ("fold 2", 2), ("fold 3", 3), ("all documents", 1)], ids=str)
def test_a_pause_of_folds_at_once_leaves_no_trace(model, notes, tmp_path, at_once, place):
    made, result = adapt(model, notes, tmp_path / "whole")
    store = AdapterStore(tmp_path / "store")
    with pytest.raises(Paused):
        adapt(model, notes, tmp_path / "store", at_step(*place))
    job = store.jobs.get()
    running = json.loads((job.folder / "checkpoint.json").read_text())["learners"]
    assert len(running) == (1 if place[0] == "all documents" else 3)
    resumed = personalizer(**job.arguments(), store=store)
    again = resumed.resume()
    assert verdict(again) == verdict(result)
    assert again.report.training.curves == result.report.training.curves
    assert bits(store) == bits(made.store)


def test_a_checkpoint_of_folds_at_once_is_gone_on_with_one_after_another(model, notes, apart, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        train_at_once(patch)
        with pytest.raises(Paused):
            adapt(model, notes, tmp_path / "store", at_step("fold 2", 2))
    store = AdapterStore(tmp_path / "store")
    result = personalizer(**store.jobs.get().arguments(), store=store).resume()
    assert verdict(result)[1:] == pytest.approx(verdict(apart[1])[1:], rel=1e-4)


@pytest.mark.parametrize("call", [1, 3])
def test_if_memory_runs_out_folds_begin_again_one_after_another(
    model, notes, apart, tmp_path, at_once, monkeypatch, call
):
    run, calls = SideBySide.run, []

    def failing(together, steps):
        calls.append(steps)
        if len(calls) == call:
            raise torch.OutOfMemoryError
        return run(together, steps)

    monkeypatch.setattr(SideBySide, "run", failing)
    made, result = adapt(model, notes, tmp_path / "store")
    assert len(calls) == call
    assert notices(made.events)[1] == "The folds are trained one after another, which is slower: memory is short."
    assert (bits(made.store), verdict(result)) == (bits(apart[0].store), verdict(apart[1]))


def stopped(model, notes, store):
    """Returns the store of a training that is stopped once the first epoch of the last fold is evaluated."""

    def at(event, number):
        if isinstance(event, Evaluated) and (event.phase, event.epoch) == ("fold 3", 1):
            made.stop()
        return False

    made = personalizer(model, AdapterStore(store), at, recipe=RECIPE.replace(batch_tokens=60))
    with pytest.raises(Interrupted) as error:
        made.adapt(notes[NUMBER])
    assert error.value.version == 1
    return made.store


def test_a_stop_saves_the_best_state_of_the_last_fold(model, notes, tmp_path, request):
    expected = weights(stopped(model, notes, tmp_path / "apart"))
    request.getfixturevalue("at_once")
    assert_alike(weights(stopped(model, notes, tmp_path / "at once")), expected)


def assert_alike(found, expected):
    assert found.keys() == expected.keys()
    for name, saved in expected.items():
        for key, value in saved.items():
            assert (found[name][key] - value).norm() <= 1e-3 * value.norm()


def test_if_the_model_cannot_compute_side_by_side_folds_are_trained_one_after_another(
    model, notes, apart, tmp_path, at_once, monkeypatch
):
    def refuse(*_):
        raise SparsityError("Its layers cannot.")

    monkeypatch.setattr(
        "sebp_edge.sparse.hoist.Hoisted.lay_side_by_side", lambda hoisted, further: further and refuse()
    )
    made, result = adapt(model, notes, tmp_path / "store")
    assert notices(made.events)[0] == "The folds are trained one after another, which is slower: Its layers cannot."
    assert (bits(made.store), verdict(result)) == (bits(apart[0].store), verdict(apart[1]))


def test_folds_at_once_learn_on_from_where_each_was(model, notes, tmp_path, request):
    found = []
    for name in ("apart", "at once"):
        if name == "at once":
            request.getfixturevalue("at_once")
        made, _ = adapt(model, notes, tmp_path / name)
        more = [*(path.read_text() for path in sorted(notes[NUMBER].iterdir())), *make_sentences(3, seed=7)]
        found.append((made.adapt(more, activate_anyway=True), made))
    (expected, _), (result, made) = found
    assert notices(made.events).count("3 folds are trained side by side.") == 2
    assert result.version == expected.version == 2
    assert verdict(result)[1:] == pytest.approx(verdict(expected)[1:], rel=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and there is none here")
def test_captured_folds_at_once_end_as_one_after_another(model, notes, tmp_path, monkeypatch):
    _, expected = adapt(model, notes, tmp_path / "apart", device="cuda")
    monkeypatch.setattr("sebp_edge.training.run.pays", lambda *_: True)
    made, result = adapt(model, notes, tmp_path / "at once", device="cuda")
    assert notices(made.events).count("3 folds are trained side by side.") == 1
    assert not any("which is slower" in message for message in notices(made.events))
    assert verdict(result)[1:3] == pytest.approx(verdict(expected)[1:3], rel=2e-2)
