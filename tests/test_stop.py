"""stop(): which call it ends, where it takes effect, and what is saved."""

import threading

import pytest
from builders import make_sentences
from pace import at_most

from sebp_edge import SebpEdgeError
from sebp_edge.errors import Interrupted
from sebp_edge.events import (
    AdapterSaved,
    ExampleAnalyzed,
    ExamplesEvaluated,
    JobStarted,
    ModelLoaded,
    StepDone,
    TextsRead,
    silent,
)
from sebp_edge.research import analyze

pytestmark = pytest.mark.usefixtures("unassessed")


class Worker:
    """Runs a call in another thread, and stops it by `stop` or the given function at the first event of a kind."""

    def __init__(self, make, kind=None, step=None, **options):
        self.reached, self.stopped = threading.Event(), threading.Event()
        self.kind, self.step, self.events, self.error, self.result = kind, step, [], None, None
        self.personalizer = make(on_event=self._on_event, **options)

    def _on_event(self, event):
        self.events.append(event)
        if self.kind and isinstance(event, self.kind) and getattr(event, "step", None) == self.step:
            self._pause()

    def _pause(self):
        if not self.reached.is_set():
            self.reached.set()
            assert self.stopped.wait(30)

    def run(self, call, stop=None):
        def work():
            try:
                self.result = call(self.personalizer)
            except SebpEdgeError as error:
                self.error = error

        thread = threading.Thread(target=work)
        thread.start()
        assert self.reached.wait(60)
        (stop or self.personalizer.stop)()
        self.stopped.set()
        thread.join(60)
        assert not thread.is_alive()
        return self


@pytest.mark.slow
def test_a_training_ends_after_a_step_and_the_best_state_is_saved(make, notes_folder):
    """By an event that is set during the call."""
    recipe, stop = make().recipe.replace(learning_rate=2e-2, batch_tokens=200, epochs=3), threading.Event()
    worker = Worker(make, StepDone, 6, recipe=recipe)
    worker.run(lambda personalizer: personalizer.adapt(notes_folder, stop_when=stop), stop.set)
    assert isinstance(worker.error, Interrupted)
    assert "version 1 of the adapter 'default'; it is not active" in str(worker.error)
    assert (worker.error.name, worker.error.version, worker.error.exit_code) == ("default", 1, 130)
    assert [type(event) for event in worker.events[-2:]] == [StepDone, AdapterSaved]
    assert worker.personalizer.store.adapter("default").active() is None
    # The next call is not stopped, and may run in the app's own thread.
    assert worker.personalizer.adapt(notes_folder).passed


@pytest.mark.parametrize("kind", [ModelLoaded, TextsRead])
def test_a_stop_before_the_training_changes_nothing(make, notes_folder, kind):
    worker = Worker(make, kind).run(lambda personalizer: personalizer.adapt(notes_folder))
    assert isinstance(worker.error, Interrupted)
    assert str(worker.error) == "Stopped; nothing was changed."
    assert (worker.error.name, worker.error.version) == (None, None)
    assert isinstance(worker.events[-1], kind)
    assert worker.personalizer.store.names() == []


@pytest.mark.slow
def test_an_evaluation_reports_its_progress(make):
    recipe = make().recipe.replace(context_length=128, epochs=1)
    worker = Worker(make, recipe=recipe)
    worker.personalizer.adapt(make_sentences(120, words=60))
    evaluations = [[]]
    for event in (event for event in worker.events if isinstance(event, ExamplesEvaluated)):
        evaluations[-1].append(event.done)
        if event.done == event.examples:
            evaluations.append([])
    assert max(map(len, evaluations)) > 1
    assert all(done == sorted(set(done)) for done in evaluations)


def test_an_analysis_can_be_stopped(make, notes_folder):
    worker = Worker(make, ExampleAnalyzed).run(lambda personalizer: analyze(personalizer, notes_folder))
    assert isinstance(worker.error, Interrupted)
    assert sum(isinstance(event, ExampleAnalyzed) for event in worker.events) == 1


def test_a_stopped_generation_returns_the_text_so_far(make):
    chunks, worker = [], Worker(make)

    def on_text(chunk):
        chunks.append(chunk)
        if len(chunks) == 3:
            worker._pause()

    worker.run(lambda personalizer: personalizer.generate("the ferry", seed=0, max_new_tokens=100, on_text=on_text))
    assert isinstance(worker.error, Interrupted)
    assert worker.error.text == "".join(chunks)
    assert len(chunks) in (3, 4)
    whole = worker.personalizer.generate("the ferry", seed=0, max_new_tokens=100)
    assert len(whole) > len(worker.error.text) > 0


@pytest.mark.parametrize("memory_budget", [None, "30GB"])
def test_tokenising_can_be_stopped_between_texts(make, monkeypatch, memory_budget):
    worker, calls = Worker(make, memory_budget=memory_budget), []
    tokenise = type(worker.personalizer.in_use.load(silent).tokenizer).__call__

    def pausing(tokenizer, *arguments, **options):
        calls.append(arguments)
        if len(calls) == 9:
            worker._pause()
        return tokenise(tokenizer, *arguments, **options)

    monkeypatch.setattr(type(worker.personalizer.in_use.load(silent).tokenizer), "__call__", pausing)
    worker.run(lambda personalizer: personalizer.adapt(make_sentences(40)))
    assert isinstance(worker.error, Interrupted)
    assert len(calls) == 9
    assert not any(isinstance(event, TextsRead) for event in worker.events)


def test_an_event_set_before_the_call_stops_it(make, notes_folder):
    personalizer, stop = make(), threading.Event()
    stop.set()
    calls = (
        lambda: personalizer.adapt(notes_folder, stop_when=stop),
        lambda: personalizer.generate("the ferry", stop_when=stop),
        lambda: analyze(personalizer, notes_folder, stop_when=stop),
        lambda: personalizer.plan(notes_folder, stop_when=stop),
    )
    for call in calls:
        with pytest.raises(Interrupted, match="Stopped; nothing was changed"):
            call()
    assert personalizer.in_use.base is None
    assert stop.is_set()
    assert personalizer.generate("the ferry", max_new_tokens=2, temperature=0)


@pytest.mark.slow
def test_stop_changes_no_finished_and_no_later_call(make, notes_folder):
    recipe = make().recipe.replace(learning_rate=2e-2, batch_tokens=200, epochs=1)
    worker = Worker(make, AdapterSaved, recipe=recipe).run(lambda personalizer: personalizer.adapt(notes_folder))
    assert worker.error is None
    assert worker.personalizer.store.adapter("default").active() == 1
    idle = make()
    idle.stop()
    assert idle.generate("the ferry", max_new_tokens=8, temperature=0)
    idle.stop()
    assert analyze(idle, notes_folder, examples=1)


def test_a_call_can_be_stopped_from_its_start(make):
    worker, texts = Worker(make, JobStarted), make_sentences(2000)
    with at_most(5):
        worker.run(lambda personalizer: personalizer.adapt(texts))
        assert isinstance(worker.error, Interrupted)
        assert worker.personalizer.in_use.base is None
