"""An adaptation with the recipe `ask` can be stopped at any time."""

import threading

import pytest
from reader_notes import ANSWER, NO_EFFECT, NOTES, RECIPE

from sebp_edge.errors import Interrupted, Paused
from sebp_edge.events import ExamplesEvaluated, StepDone, TrainingStarted


def is_teaching(event, events):
    """The base model reads general text, before the training."""
    return isinstance(event, ExamplesEvaluated) and not any(isinstance(each, TrainingStarted) for each in events)


def is_training(event, events):
    return isinstance(event, StepDone) and event.epoch == 2


STOPPED = "Stopped; nothing was changed."
BEST_STATE = (
    "Interrupted. The best state so far is saved as version 2 of the adapter 'reader'; it is not active. To activate "
    "it: store.adapter('reader').activate(2); to go on with the training: personalizer.resume("
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
    assert str(stopped.value).startswith(message)
    assert_nothing_is_lost(personalizer, versions)
    if begins is is_training:
        personalizer.recipe = NO_EFFECT
        result = personalizer.adapt(fresh=True)
        assert (result.passed, result.version) == (False, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "message", "versions"),
    [
        (2, "Interrupted. No state better than the start was found, so no", [1]),
        (3, BEST_STATE, [1, 2]),
    ],
    ids=["active version", "base model"],
)
def test_a_quiz_can_be_stopped(make, when_asked, asked, message, versions):
    """While it is asked: the active version before the training, or the base model after it.

    What is asked first are the questions whose replies the base model teaches.
    """
    personalizer, stop, calls = make(after=True), threading.Event(), []

    def stopping(model):
        calls.append(model)
        if len(calls) == asked:
            stop.set()

    when_asked(stopping)
    with pytest.raises(Interrupted) as stopped:
        personalizer.adapt(fresh=True, stop_when=stop)
    assert str(stopped.value).startswith(message)
    assert len(calls) == asked
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
    texts = [note["text"] for note in NOTES[:2]]
    assert personalizer.ask("Where does the samovar stand?", texts, adapter="reader").text == ANSWER


@pytest.mark.slow
def test_a_quiz_can_be_paused_and_is_asked_again(make, when_asked, learnt):
    personalizer, calls = make(after=True), []

    def pausing(model):
        calls.append(None)  # a model is freed by the pause
        if len(calls) == 4:  # the new version is asked after the base model
            assert personalizer.pause()

    when_asked(pausing)
    with pytest.raises(Paused) as paused:
        personalizer.adapt(fresh=True)
    store = personalizer.store
    assert not any(text.encode() in path.read_bytes() for text in texts_of(learnt) for path in files_of(store))
    resumed = make()
    result = resumed.resume(paused.value.job)
    assert not any(isinstance(event, StepDone) for event in resumed.events)
    assert result.passed == learnt.result.passed
    weights = "adapter_model.safetensors"
    first, second = (store.adapter("reader").version_folder(number) / weights for number in (1, 2))
    assert first.read_bytes() == second.read_bytes()


def files_of(store):
    return [path for path in store.jobs.folder.rglob("*") if path.is_file()]


def texts_of(learnt):
    """The questions of the quiz, and their answers if they are no single words."""
    asked = learnt.training.task.dataset.quiz.about_notes
    return [text for each in asked for text in (each.question, *each.answers) if " " in text]
