"""An adaptation with the recipe `ask` can be stopped at any time."""

import threading

import pytest
from reader_notes import ANSWER, RECIPE

from sebp_edge.errors import Interrupted
from sebp_edge.events import ExamplesEvaluated, StepDone, TrainingStarted
from sebp_edge.run import replies as asking


def is_teaching(event, events):
    """The base model reads general text, before the training."""
    return isinstance(event, ExamplesEvaluated) and not any(isinstance(each, TrainingStarted) for each in events)


def is_training(event, events):
    return isinstance(event, StepDone) and event.epoch == 2


STOPPED = "Stopped; nothing was changed."
BEST_STATE = (
    "Interrupted. The best state so far is saved as version 2 of the adapter 'reader'; it is not active. To activate "
    "it: store.adapter('reader').activate(2)"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("begins", "message", "versions"),
    [(is_teaching, STOPPED, [1]), (is_training, BEST_STATE, [1, 2])],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_stop_says_what_was_saved_and_loses_nothing(make, begins, message, versions):
    personalizer, stop, events = make(after=True, recipe=RECIPE.replace(epochs=2)), threading.Event(), []

    def on_event(event):
        assert not stop.is_set() or event.event == "saved"
        events.append(event)
        if begins(event, events):
            stop.set()

    personalizer.on_event = on_event
    with pytest.raises(Interrupted) as stopped:
        personalizer.adapt(fresh=True, stop_when=stop)
    assert str(stopped.value) == message
    assert_nothing_is_lost(personalizer, versions)
    if begins is is_training:
        result = personalizer.adapt(fresh=True)
        assert (result.passed, result.version) == (True, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "message", "versions"),
    [
        (2, "Interrupted. No state better than the start was found, so nothing was saved.", [1]),
        (3, BEST_STATE, [1, 2]),
        (4, BEST_STATE, [1, 2]),
    ],
    ids=["active version", "base model", "new version"],
)
def test_a_quiz_can_be_stopped(make, monkeypatch, asked, message, versions):
    """While it is asked: the active version before the training, or the base model or the new version after it.

    What is asked first are the questions whose replies the base model teaches.
    """
    personalizer, stop, answer_all, calls = make(after=True), threading.Event(), asking.answer_all, []

    def stopping(*arguments):
        calls.append(arguments)
        if len(calls) == asked:
            stop.set()
        return answer_all(*arguments)

    monkeypatch.setattr(asking, "answer_all", stopping)
    with pytest.raises(Interrupted) as stopped:
        personalizer.adapt(fresh=True, stop_when=stop)
    assert (str(stopped.value), len(calls)) == (message, asked)
    assert_nothing_is_lost(personalizer, versions)
    if versions == [1, 2]:
        # The quiz decides, and it was not asked to the end.
        record = personalizer.store.adapter("reader").open(2).record
        assert record.is_interrupted and record.quiz is record.explanation is None


def assert_nothing_is_lost(personalizer, versions):
    """Asserts that the first version is active and works as before."""
    personalizer.on_event = personalizer.events.append
    store = personalizer.store
    assert (store.adapter("reader").versions(), store.adapter("reader").active()) == (versions, 1)
    question = "Where does the samovar stand?"
    assert ANSWER in personalizer.generate(question, adapter="reader", temperature=0, max_new_tokens=16)
