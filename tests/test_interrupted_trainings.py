"""What a training that ends early leaves: by an interruption at any moment, an error, or a loss that is no number."""

import functools
import math
import shutil
import threading
from pathlib import Path

import pytest
import torch
from builders import make_sentences
from learnt import RECIPE, logits
from safetensors.torch import load_file

from sebp_edge.errors import Interrupted, MachineError, NonFiniteLoss, StorageError
from sebp_edge.events import AdapterSaved, Evaluated, ExamplesEvaluated, JobProgress, Notice, StepDone, silent

pytestmark = pytest.mark.usefixtures("unassessed")


@pytest.fixture
def make(make):
    return functools.partial(make, recipe=RECIPE)


def interrupt_at(step, error):
    def sink(event):
        if isinstance(event, StepDone) and event.step == step:
            raise error

    return sink


def interrupt_when_better(event):
    if isinstance(event, Evaluated) and event.epoch and event.best:
        raise KeyboardInterrupt


def test_a_best_state_that_the_store_cannot_save_is_saved_elsewhere(make, notes_folder, tmp_path, temporary_folder):
    personalizer = make()
    before = logits(personalizer, personalizer.in_use.load(silent).model)

    def sink(event):
        if isinstance(event, Evaluated) and event.epoch:
            shutil.rmtree(personalizer.store.folder)
            personalizer.store.folder.write_text("a file where the folder should be")
            raise KeyboardInterrupt

    personalizer.on_event = sink
    with pytest.raises(StorageError, match=r"^Interrupted\. Cannot save to '.*Instead, the adapter is saved in '"):
        personalizer.adapt(notes_folder)
    (folder,) = temporary_folder.glob("sebp-edge-default-*")
    assert make(store=tmp_path / "other").load_adapter(folder).heldout_loss_after is None
    assert torch.equal(before, logits(personalizer, personalizer.in_use.base.model))


def bytes_of(folder):
    return (folder / "adapter_model.safetensors").read_bytes()


@pytest.mark.slow
def test_an_interruption_of_the_last_training_saves_the_tested_state_with_its_verdict(
    make, notes_folder, store_of_notes
):
    def sink(event):
        if isinstance(event, Evaluated) and event.phase == "all documents":
            raise KeyboardInterrupt

    whole = store_of_notes.adapter("default").open()
    personalizer = make(on_event=sink)
    message = (
        r"^Interrupted\. The state that was tested is saved as version 1 of .* 'default'; it is not active\. To "
        r"activate it: store\.adapter\('default'\)\.activate\(1\); to go on with the training: "
        r".*\.resume\('[0-9a-f]{12}'\)"
    )
    with pytest.raises(Interrupted, match=message):
        personalizer.adapt(notes_folder)
    saved = personalizer.store.adapter("default").open(1)
    assert bytes_of(saved.path) == bytes_of(whole.path / "judged" / "1") != bytes_of(whole.path)
    assert not (saved.path / "judged").exists()
    record = saved.record
    assert (record.verdict, record.trained_on_all, record.general_loss_after) == ("better", False, None)
    assert record.heldout_loss_after == whole.record.heldout_loss_after
    # It is comparable, since its test documents were not trained on.
    personalizer.store.adapter(saved.name).activate(saved.version)
    later = make().adapt(notes_folder)
    assert (later.compared_with, later.gain_over_active, later.passed) == (1, 0.0, True)


@pytest.mark.slow
def test_what_an_interruption_of_folds_saves_is_not_comparable(make):
    """It has been trained on documents that another fold tests."""
    texts, events = make_sentences(9, words=60), []

    def sink(event):
        events.append(event)
        if isinstance(event, StepDone) and (event.phase, event.step) == ("fold 2", 2):
            raise KeyboardInterrupt

    personalizer = make(on_event=sink, recipe=RECIPE.replace(epochs=2))
    with pytest.raises(Interrupted, match=r"The best state so far is saved as version 1 .*; it is not active"):
        personalizer.adapt(texts)
    saved = personalizer.store.adapter("default").open(1)
    assert (saved.record.verdict, saved.record.heldout_loss_after) == (None, None)
    personalizer.store.adapter(saved.name).activate(saved.version)
    result = make().adapt(texts)
    assert (result.verdict, result.not_comparable) == ("not comparable", "it was not judged itself")
    # Its splits are remembered nevertheless.
    adapter = personalizer.store.adapter("default")
    fold_of = [[document.drawn_fold for document in adapter.documents(version)] for version in (1, 2)]
    assert fold_of[0] == fold_of[1]


def test_an_interruption_of_out_leaves_no_unsalted_hashes_in_the_store(make, notes_folder, tmp_path):
    personalizer = make(on_event=interrupt_when_better)
    with pytest.raises(Interrupted, match="saved as version 1 of the adapter 'default'"):
        personalizer.adapt(notes_folder, out=tmp_path / "out")
    assert not (personalizer.store.adapter("default").open(1).path / "documents.json").exists()


def after_training(last_phase, do):
    """A sink that calls `do` with each event after the training of this phase."""
    is_over = []

    def sink(event):
        if is_over:
            do(event)
        elif isinstance(event, Evaluated) and event.phase == last_phase and event.split != "validation" and event.best:
            is_over.append(True)

    return sink


def stop_once_it_is_saved(event):
    if isinstance(event, AdapterSaved):
        raise KeyboardInterrupt


def stop_in_copies(event):
    # The pass over the probes has more examples.
    if isinstance(event, ExamplesEvaluated) and event.examples < 10:
        raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.usefixtures("assessed")
@pytest.mark.parametrize(
    ("stop", "recipe"),
    [(stop_in_copies, RECIPE), (stop_once_it_is_saved, RECIPE.replace(refit=False))],
    ids=["copies", "once it is saved, no refit"],
)
def test_an_interruption_after_the_training_keeps_the_adapter(make, notes_folder, store_of_notes, stop, recipe):
    whole = store_of_notes.adapter("default").open()
    personalizer = make(recipe=recipe, on_event=after_training("all documents" if recipe.refits else "train", stop))
    message = r"^Interrupted after the training: version 1 of the adapter 'default' is saved and active\.$"
    with pytest.raises(Interrupted, match=message) as caught:
        personalizer.adapt(notes_folder)
    assert (caught.value.name, caught.value.version) == ("default", 1)
    saved = personalizer.store.adapter("default").open()
    states = {path.relative_to(saved.path).parent for path in saved.path.rglob("adapter_model.*")}
    judged = Path("judged", "1")
    assert states == ({Path(), judged} if recipe.refits else {Path()})
    for state in states:
        # Without a refit, the judged state is the adapter.
        assert bytes_of(saved.path / state) == bytes_of(whole.path / (state if recipe.refits else judged))
    assert (saved.record.verdict, saved.record.heldout_loss_after) == ("better", whole.record.heldout_loss_after)
    assert saved.record.general_loss_after is None
    other = make()
    other.load_adapter("default")
    assert torch.equal(logits(personalizer), logits(other))


@pytest.mark.slow
@pytest.mark.usefixtures("assessed")
def test_a_stop_while_samples_are_written_keeps_the_adapter(make, notes_folder, store_of_notes):
    stop = threading.Event()

    def sink(event):
        if isinstance(event, JobProgress) and event.phase == "samples":
            stop.set()

    personalizer = make(on_event=sink)
    with pytest.raises(Interrupted, match=r"^Interrupted after the training: version 1 .* is saved and active\.$"):
        personalizer.adapt(notes_folder, stop_when=stop)
    saved = personalizer.store.adapter("default").open().path
    assert bytes_of(saved) == bytes_of(store_of_notes.adapter("default").open().path)
    other = make()
    other.load_adapter("default")
    assert torch.equal(logits(personalizer), logits(other))


@pytest.mark.parametrize("phase", ["active version", "fold 1", "fold 2", "all documents"])
def test_an_interruption_before_a_training_saves_no_untrained_adapter(make, phase):
    def sink(event):
        if isinstance(event, JobProgress) and event.phase == phase:
            raise KeyboardInterrupt

    personalizer = make(after=True, on_event=sink)
    with pytest.raises(Interrupted, match="No state better than the start was found, so no"):
        personalizer.adapt(make_sentences(9, words=60))
    assert personalizer.store.adapter("default").versions() == [1]


def test_a_deleted_adapter_in_use_hides_no_error(make, notes_folder):
    personalizer = make(after=True)
    before = logits(personalizer, personalizer.in_use.load(silent).model)
    personalizer.load_adapter("default")
    personalizer.store.adapter("default").remove()
    notices, interrupt = [], interrupt_when_better

    def sink(event):
        if isinstance(event, Notice):
            notices.append(event.message)
        interrupt(event)

    personalizer.on_event = sink
    with pytest.raises(Interrupted, match="best state so far is saved as version 1 of the adapter 'other'"):
        personalizer.adapt(notes_folder, name="other")
    assert notices[-1].endswith("The base model is used from now on.")
    assert torch.equal(before, logits(personalizer, personalizer.in_use.base.model))


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (KeyboardInterrupt, Interrupted, "No state better than the start was found"),
        (torch.OutOfMemoryError, MachineError, "Out of CPU memory while training; nothing was saved"),
        (ZeroDivisionError, ZeroDivisionError, None),  # of a sink
    ],
)
def test_an_error_in_a_step_saves_nothing_and_restores_the_base_model(make, notes_folder, error, kind, words):
    personalizer = make(on_event=interrupt_at(2, error))
    before = logits(personalizer, personalizer.in_use.load(silent).model)
    with pytest.raises(kind, match=words):
        personalizer.adapt(notes_folder)
    assert torch.equal(before, logits(personalizer, personalizer.in_use.base.model))
    assert personalizer.in_use.adaptation is None
    assert personalizer.store.names() == []


def test_a_nonfinite_loss_without_a_better_state_saves_nothing_and_names_the_step(make, notes_folder):
    personalizer = make(recipe=RECIPE.replace(learning_rate=1e30, max_grad_norm=1e30))
    with pytest.raises(NonFiniteLoss, match=r"step \d+.*No state better than the start was found"):
        personalizer.adapt(notes_folder)
    assert personalizer.store.names() == []


def test_a_nonfinite_loss_after_a_better_state_saves_that_state(make, notes_folder):
    def poison(event):
        if isinstance(event, Evaluated) and event.split == "validation" and event.epoch == 1:
            layer = next(p for p in personalizer.in_use.base.model.parameters() if p.requires_grad)
            layer.data.fill_(math.nan)

    personalizer = make(on_event=poison, recipe=RECIPE.replace(epochs=2))
    with pytest.raises(NonFiniteLoss, match=r"step \d+.*saved as version 1 of the adapter 'default'; it is not active"):
        personalizer.adapt(notes_folder)
    saved = load_file(personalizer.store.adapter("default").open(1).path / "adapter_model.safetensors")
    assert all(tensor.isfinite().all() for tensor in saved.values())
