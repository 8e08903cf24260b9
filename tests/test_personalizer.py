"""The main path, as an app calls it: texts in, a tested and saved adapter out."""

import functools
import json
import logging
import re
import shlex
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from builders import make_llama, make_sentences
from learnt import RECIPE, logits
from peft import PeftModel
from transformers import AutoModelForCausalLM

from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.errors import BusyError, Interrupted, MachineError, OptionError, TextsError
from sebp_edge.events import AdapterSaved, ModelLoaded, Notice, StepDone, TextsRead, TrainingStarted, silent
from sebp_edge.machine import devices
from sebp_edge.research import analyze

pytestmark = pytest.mark.usefixtures("unassessed")
NO_GAIN = RECIPE.replace(learning_rate=1e-12)


@pytest.fixture
def make(make):
    return functools.partial(make, recipe=RECIPE)


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
                personalizer.close,
            ):
                with pytest.raises(BusyError, match="is running another call; wait for it"):
                    other.submit(call).result()
                refused.append(call)
            assert personalizer.plan(notes_folder).chosen.peak > 0

    personalizer = make(on_event=call_meanwhile)
    with other:
        assert personalizer.adapt(notes_folder, name="first").passed
    assert len(refused) == 5
    assert personalizer.store.names() == ["first"]
    assert personalizer.generate("the ferry", max_new_tokens=2, seed=1)


def test_one_of_several_processes_is_told_how_to_go_on(make, notes_folder, monkeypatch):
    personalizer = make()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MachineError, match=r"one of 2 processes.*without torchrun.*sparsify in a loop of your own"):
        personalizer.adapt(notes_folder)
    assert not personalizer.store.names()


def test_a_store_can_be_given_as_a_folder(make, tmp_path):
    assert make(store=tmp_path / "mine").store.folder == tmp_path / "mine" / "adapters"
    assert make(store=str(tmp_path)).store.folder == tmp_path / "adapters"


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
def test_out_saves_outside_the_store(make, notes_folder, model_folder, tmp_path):
    out = tmp_path / "there" / "an adapter"
    personalizer = make(recipe=RECIPE.replace(epochs=1))
    result = personalizer.adapt(notes_folder, out=out)
    assert (result.adapter_path, result.name, result.version) == (out, None, None)
    assert shlex.split(result.command)[3:] == ["--adapter", str(out), "--model", str(model_folder)]
    assert personalizer.store.names() == []
    other = make()
    other.load_adapter(out)
    assert torch.equal(logits(personalizer), logits(other))


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


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_wide_model_is_in_bf16_on_a_cpu_that_multiplies_it_fast(
    notes_folder, recipe, tokenizer, tmp_path, monkeypatch, method
):
    """Plans and results say so, and the losses are those in fp32."""
    folder, found = tmp_path / "wide", {}
    make_llama(num_hidden_layers=1, hidden_size=512).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    options = {"recipe": Recipe.load(recipe).replace(method=method), "device": "cpu", "memory_budget": "4GB"}
    for is_fast in (True, False):
        monkeypatch.setattr(devices, "multiplies_bf16", lambda is_fast=is_fast: is_fast)
        one = Personalizer(folder, **options, store=tmp_path / f"store-{is_fast}")
        result = one.adapt(notes_folder)
        assert one.in_use.base.model.dtype == (torch.bfloat16 if is_fast else torch.float32)
        assert one.plan(notes_folder).chosen.dtype == ("bfloat16" if is_fast else "float32")
        found[is_fast] = result
    assert found[True].heldout_loss_before == pytest.approx(found[False].heldout_loss_before, rel=1e-2)
    assert found[True].heldout_loss_after == pytest.approx(found[False].heldout_loss_after, rel=5e-2)
    assert found[True].peak_memory_bytes > 0
