"""The main path, as an app calls it: texts in, a tested and saved adapter out."""

import json
import logging
import math
import re
import shlex
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from builders import make_llama, make_sentences
from peft import PeftModel
from quick import skip_assessment
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.engine.models.decoding import Decoder
from sebp_edge.errors import (
    BaseModelMismatch,
    BusyError,
    Interrupted,
    MachineError,
    NonFiniteLoss,
    OptionError,
    StorageError,
    TextsError,
)
from sebp_edge.events import (
    AdapterSaved,
    Evaluated,
    ExamplesEvaluated,
    ModelLoaded,
    Notice,
    StepDone,
    TextsRead,
    TrainingStarted,
    silent,
)
from sebp_edge.research import analyze
from sebp_edge.run import assessment
from sebp_edge.run.start import latest_history
from sebp_edge.store.history import read_history

RECIPE = Recipe(name="test", description="", r=4, learning_rate=2e-2, epochs=1, batch_tokens=200, context_length=64)
NO_GAIN = RECIPE.replace(learning_rate=1e-12)


@pytest.fixture
def assessed():
    """Asks for what is assessed of an adaptation, which other tests leave out."""


@pytest.fixture(autouse=True)
def unassessed_by_default(request, monkeypatch):
    if "assessed" not in request.fixturenames:
        skip_assessment(monkeypatch)


@pytest.fixture
def make(model_folder, tmp_path, after_learning):
    """A function that makes a Personalizer; after=True: whose store has learnt the notes."""

    def personalizer(*, after=False, **options):
        options = {"recipe": RECIPE, "device": "cpu", "store": AdapterStore(tmp_path / "store")} | options
        if after:
            after_learning(options["store"])
        return Personalizer(options.pop("model", model_folder), **options)

    return personalizer


def logits(personalizer, model=None):
    model = model or personalizer.in_use.adaptation.model
    with torch.no_grad():
        return model(torch.arange(7, 27)[None]).logits


@pytest.mark.usefixtures("assessed")
def test_notes_become_an_adapter_that_is_better_on_unseen_notes(make, notes_folder):
    (notes_folder / "empty.md").touch()
    events = []
    personalizer = make(on_event=events.append)
    result = personalizer.adapt(notes_folder, name="mine")
    assert result.passed
    assert result.heldout_loss_after < result.heldout_loss_before
    assert (result.name, result.version, result.documents, result.examples) == ("mine", 1, 24, 24)
    assert [(item.source, item.reason) for item in result.left_out] == [("empty.md", "empty")]
    assert 0 < result.padding_share < 1
    assert result.tokens_per_second > 0
    assert result.peak_memory_bytes > 1e6
    assert (result.adapter_path / "adapter_model.safetensors").is_file()
    assert result.summary.startswith(
        "Better: version 1 of 'mine' is active, since it predicts your texts better. On 5 documents"
    )
    assert str(result.adapter_path) in result.summary
    planned = next(event for event in events if isinstance(event, TrainingStarted))
    assert (planned.train_documents, planned.validation_documents, planned.test_documents) == (15, 4, 5)
    assert {type(event) for event in events} >= {TextsRead, StepDone, AdapterSaved}


@pytest.mark.slow
def test_the_size_of_the_model_is_said_without_that_of_the_adapter(make, notes_folder, monkeypatch):
    events, sizes = [], []
    monkeypatch.setattr("sebp_edge.run.assessment.expectation", lambda reference, size, **_: sizes.append(size) or "")
    make(on_event=events.append).adapt(notes_folder)
    assert sizes == [event.parameters for event in events if isinstance(event, ModelLoaded)]


@pytest.mark.slow
def test_another_personalizer_by_name_and_plain_peft_load_the_same_adapter(make, notes_folder, model_folder):
    first, second = (make(store=AdapterStore()) for _ in range(2))
    result = first.adapt(notes_folder, name="mine", activate_anyway=True)
    assert shlex.split(result.command)[3:5] == ["--name", "mine"]
    base = logits(second, second.in_use.load(silent).model)
    second.load_adapter("mine")
    assert torch.equal(logits(first), logits(second))
    assert not torch.equal(base, logits(second))
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), result.adapter_path)
    assert torch.equal(logits(first), logits(None, plain.eval()))


@pytest.mark.slow
def test_an_adapter_that_is_no_better_can_be_activated_anyway(make, notes_folder):
    worse = make(after=True, recipe=NO_GAIN)
    result = worse.adapt(notes_folder, activate_anyway=True, fresh=True)
    assert (result.passed, result.active, result.verdict, result.version) == (False, True, "no gain", 2)
    assert result.summary.startswith("Not better: version 2 of 'default' is active, as you asked with activate_anyway.")
    assert worse.store.adapter("default").active() == 2
    assert worse.in_use.adapter_folder == result.adapter_path


@pytest.mark.slow
def test_a_slow_run_announces_its_duration(make, notes_folder, machine):
    # A token of this model costs about 4 * 21,000 operations; at 100,000 a second that is over half an hour.
    machine.multiplies(1e5)
    notices = []

    def sink(event):
        if isinstance(event, Notice):
            notices.append(event.message)
        if isinstance(event, TrainingStarted):
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        make(on_event=sink).adapt(notes_folder)
    assert re.search(r"Training will take about \d+(\.\d)? (min|h) on this CPU; a smaller model", notices[0])


@pytest.mark.slow
def test_few_documents_are_tested_with_folds(make):
    events = []
    result = make(on_event=events.append).adapt(make_sentences(6, words=60))
    phases = [event.phase for event in events if isinstance(event, TrainingStarted)]
    assert phases == ["fold 1", "fold 2", "fold 3", "all documents"]
    assert result.trained_on_all
    tested = [event.test_documents for event in events if isinstance(event, TrainingStarted)]
    assert sum(tested) == 6


@pytest.mark.slow
def test_one_long_text_is_cut_into_examples_and_not_judged(make):
    result = make().adapt("\n\n".join(make_sentences(40, words=30)))
    assert (result.documents, result.verdict) == (1, "not judged")
    assert result.examples >= 6


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "no files were found"),
        (["too short"], "at least 300 are needed"),
        (["one", "two", "three", "four", "five", "six"], "at least 300 are needed"),
        (Path("no-such-folder"), "no file or folder"),
    ],
)
def test_missing_or_too_little_text_is_refused(make, texts, message):
    with pytest.raises(TextsError, match=message):
        make().adapt(texts)


def interrupt_at(step, error=KeyboardInterrupt):
    def sink(event):
        if isinstance(event, StepDone) and event.step == step:
            raise error

    return sink


def interrupt_when_better(event):
    if isinstance(event, Evaluated) and event.epoch and event.best:
        raise KeyboardInterrupt


@pytest.mark.slow
def test_a_call_during_a_training_is_refused_and_the_training_continues(make, notes_folder):
    refused = []
    other = ThreadPoolExecutor(1)

    def call_meanwhile(event):
        if isinstance(event, StepDone) and (event.phase, event.step) == ("train", 1):
            for call in (
                lambda: personalizer.adapt(notes_folder, name="second"),
                lambda: personalizer.generate("the ferry"),
                lambda: analyze(personalizer, notes_folder),
                lambda: personalizer.load_adapter("first"),
            ):
                with pytest.raises(BusyError, match="is running another call; wait for it"):
                    other.submit(call).result()
                refused.append(call)
            assert personalizer.plan(notes_folder).chosen.peak > 0

    personalizer = make(on_event=call_meanwhile)
    with other:
        assert personalizer.adapt(notes_folder, name="first").passed
    assert len(refused) == 4
    assert personalizer.store.names() == ["first"]
    assert personalizer.generate("the ferry", max_new_tokens=2)


def test_one_of_several_processes_is_told_how_to_go_on(make, notes_folder, monkeypatch):
    personalizer = make()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MachineError, match=r"one of 2 processes.*without torchrun.*sparsify in a loop of your own"):
        personalizer.adapt(notes_folder)
    assert not personalizer.store.names()


def test_a_store_can_be_given_as_a_folder(make, tmp_path):
    assert make(store=tmp_path / "mine").store.folder == tmp_path / "mine" / "adapters"
    assert make(store=str(tmp_path)).store.folder == tmp_path / "adapters"


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
    fold_of = [[document.fold for document in read_history(path).documents] for path in saved.path.parent.glob("?")]
    assert fold_of[0] == fold_of[1]


def test_an_interruption_of_out_leaves_no_unsalted_hashes_in_the_store(make, notes_folder, tmp_path):
    personalizer = make(on_event=interrupt_when_better)
    with pytest.raises(Interrupted, match="saved as version 1 of the adapter 'default'"):
        personalizer.adapt(notes_folder, out=tmp_path / "out")
    assert not (personalizer.store.adapter("default").open(1).path / "documents.json").exists()
    assert latest_history(personalizer.store.adapter("default")).documents == ()


def after_training(last_phase, do):
    """A sink that calls `do` with each event after the training of this phase."""
    is_over = []

    def sink(event):
        if is_over:
            do(event)
        elif isinstance(event, Evaluated) and event.phase == last_phase and event.split != "validation" and event.best:
            is_over.append(True)

    return sink


def stop_at_the_end(event):
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
    [(stop_in_copies, RECIPE), (stop_at_the_end, RECIPE.replace(refit=False))],
    ids=["copies", "at the end, no refit"],
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
    assert (saved.record.general_loss_after is None) == (stop is not stop_at_the_end)
    other = make()
    other.load_adapter("default")
    assert torch.equal(logits(personalizer), logits(other))


@pytest.mark.slow
@pytest.mark.usefixtures("assessed")
def test_a_stop_while_samples_are_written_keeps_the_adapter(make, notes_folder, store_of_notes, monkeypatch):
    stop, calls = threading.Event(), []

    class Stopping(Decoder):
        def decode(self, *given, **options):
            calls.append(given)
            if len(calls) == 2:
                stop.set()
            return super().decode(*given, **options)

    monkeypatch.setattr(assessment, "Decoder", Stopping)
    personalizer = make()
    with pytest.raises(Interrupted, match=r"^Interrupted after the training: version 1 .* is saved and active\.$"):
        personalizer.adapt(notes_folder, stop_when=stop)
    assert len(calls) == 2  # the texts of the judged state
    saved = personalizer.store.adapter("default").open().path
    assert bytes_of(saved) == bytes_of(store_of_notes.adapter("default").open().path)
    other = make()
    other.load_adapter("default")
    assert torch.equal(logits(personalizer), logits(other))


@pytest.mark.parametrize("phase", ["fold 2", "all documents"])
def test_an_interruption_between_two_trainings_saves_no_untrained_adapter(make, phase):
    def sink(event):
        if isinstance(event, TrainingStarted) and event.phase == phase:
            raise KeyboardInterrupt

    personalizer = make(on_event=sink)
    with pytest.raises(Interrupted, match="No state better than the start was found, so no"):
        personalizer.adapt(make_sentences(9, words=60))
    assert personalizer.store.names() == []


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


def test_after_an_interruption_the_base_model_is_as_it_was(make, notes_folder):
    personalizer = make(on_event=interrupt_at(2))
    before = logits(personalizer, personalizer.in_use.load(silent).model)
    with pytest.raises(Interrupted):
        personalizer.adapt(notes_folder)
    assert torch.equal(before, logits(personalizer, personalizer.in_use.base.model))


def test_an_error_in_a_sink_is_raised_and_the_base_model_restored(make, notes_folder):
    personalizer = make(on_event=interrupt_at(2, error=ZeroDivisionError))
    before = logits(personalizer, personalizer.in_use.load(silent).model)
    with pytest.raises(ZeroDivisionError):
        personalizer.adapt(notes_folder)
    assert torch.equal(before, logits(personalizer, personalizer.in_use.base.model))
    assert personalizer.store.names() == []


def test_running_out_of_memory_is_one_sentence(make, notes_folder):
    personalizer = make(on_event=interrupt_at(2, error=torch.OutOfMemoryError))
    with pytest.raises(MachineError, match="Out of CPU memory while training; nothing was saved"):
        personalizer.adapt(notes_folder)
    assert personalizer.in_use.adaptation is None


def test_an_interruption_before_the_first_step_saves_nothing(make, notes_folder):
    def sink(event):
        if isinstance(event, TrainingStarted):
            raise KeyboardInterrupt

    personalizer = make(on_event=sink)
    with pytest.raises(Interrupted, match="No state better than the start was found"):
        personalizer.adapt(notes_folder)
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


@pytest.mark.slow
def test_a_failed_or_rejected_adaptation_leaves_the_adapter_in_use(make, notes_folder):
    personalizer = make(after=True)
    personalizer.load_adapter("default")
    before = logits(personalizer)
    with pytest.raises(TextsError):
        personalizer.adapt("hello")
    assert torch.equal(before, logits(personalizer))
    personalizer.recipe = NO_GAIN
    assert not personalizer.adapt(notes_folder, fresh=True).passed
    assert torch.equal(before, logits(personalizer))


def test_a_few_questions_with_answers_are_trained_on_or_refused_in_one_sentence(make):
    def records(count, words):
        pairs = zip(make_sentences(count, words=150), make_sentences(count, seed=1, words=words), strict=True)
        return [{"prompt": question, "completion": answer} for question, answer in pairs]

    personalizer = make(recipe=RECIPE.replace(chat_template=True, context_length=128))
    with pytest.raises(TextsError, match="at least 300 are needed"):
        personalizer.adapt(records(1, 20))
    assert personalizer.adapt(records(5, 150)).documents == 5


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5])
def test_an_invalid_seed_is_refused(make, seed):
    with pytest.raises(OptionError, match="The seed must be a whole number"):
        make(seed=seed)


@pytest.mark.slow
def test_out_saves_outside_the_store_and_overwrites_nothing(make, notes_folder, model_folder, tmp_path):
    out = tmp_path / "there" / "an adapter"
    personalizer = make(recipe=RECIPE.replace(epochs=1))
    result = personalizer.adapt(notes_folder, out=out)
    assert (result.adapter_path, result.name, result.version) == (out, None, None)
    assert shlex.split(result.command)[3:] == ["--adapter", str(out), "--model", str(model_folder)]
    assert personalizer.store.names() == []
    other = make()
    other.load_adapter(out)
    assert torch.equal(logits(personalizer), logits(other))
    with pytest.raises(OptionError, match="already exists"):
        make().adapt(notes_folder, out=out)


def test_an_adapter_of_another_base_model_is_refused(make, tmp_path, tokenizer):
    other = tmp_path / "other-llama"
    model = make_llama(num_hidden_layers=1)
    model.model.embed_tokens.weight.data.mul_(1.5)
    model.save_pretrained(other)
    tokenizer.save_pretrained(other)
    with pytest.raises(BaseModelMismatch, match="micro-llama"):
        make(after=True, model=other).load_adapter("default")


@pytest.mark.slow
def test_an_adapter_of_earlier_weights_of_the_same_model_is_refused(make, model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / model_folder.name)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.embed_tokens.weight.data.mul_(1.5)
    model.save_pretrained(folder)
    with pytest.raises(BaseModelMismatch, match="made for other weights of micro-llama; adapt again"):
        make(after=True, model=folder).load_adapter("default")


@pytest.mark.slow
def test_full_fine_tuning_saves_a_model_that_transformers_loads(make, notes_folder):
    personalizer = make(recipe=RECIPE.replace(method="full", learning_rate=1e-2))
    before = logits(personalizer, personalizer.in_use.load(silent).model).clone()
    result = personalizer.adapt(notes_folder)
    assert result.passed
    loaded = AutoModelForCausalLM.from_pretrained(result.adapter_path, dtype=torch.float32)
    torch.testing.assert_close(logits(None, loaded), logits(personalizer), rtol=0.02, atol=0.02)
    personalizer.in_use.adaptation.detach()
    assert torch.equal(before, logits(personalizer, personalizer.in_use.base.model))


@pytest.fixture
def secret_notes(notes_folder):
    """Notes that each begin with a secret word of their own; returns the folder."""
    for number, path in enumerate(notes_folder.iterdir()):
        path.write_text(f"swordfish{number} {path.read_text()}")
        path.rename(path.with_name(f"secret-plan-{number}.md"))
    return notes_folder


@pytest.mark.slow
@pytest.mark.usefixtures("assessed")
def test_a_users_text_is_only_in_the_result_and_names_of_documents_in_their_list(
    make, secret_notes, own_home, tmp_path, caplog, capfd
):
    caplog.set_level(logging.NOTSET)
    events = []
    result = make(on_event=events.append).adapt(secret_notes, activate_anyway=True)
    # Beginnings whose continuations are alike are shown once.
    assert 1 <= len(result.samples) <= 3 and all("swordfish" in sample.beginning for sample in result.samples)
    assert json.dumps(result.to_dict()).count("swordfish") >= len(result.samples)

    folders = (tmp_path / "store", own_home / "data", own_home / "cache")
    saved = {path: path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}
    assert {path.name for path in saved} >= {"documents.json", "sebp_edge.json", ".salt", "adapter_config.json"}
    assert any(path.name.startswith("probes-") for path in saved)
    emitted = json.dumps([event.to_dict() for event in events if not isinstance(event, AdapterSaved)])
    logged = caplog.text + "".join(capfd.readouterr()) + repr(result)
    for hidden in ("swordfish", "secret-plan", str(secret_notes)):
        found = {path.name for path, content in saved.items() if hidden.encode() in content}
        # Where the texts are is known beside the versions, and in no version.
        places = {"secret-plan": {"documents.json"}, str(secret_notes): {"where.json"}}
        assert found == places.get(hidden, set())
        assert hidden not in emitted
        assert hidden not in logged
