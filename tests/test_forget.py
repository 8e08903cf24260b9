"""`Personalizer.forget` and `sebp-edge forget`: the new version is, bit for bit, one that never had the document."""

import dataclasses
import json
import threading
from functools import partial
from importlib.metadata import version

import pytest
import torch
from builders import make_llama, make_sentences
from command import assert_one_sentence, records, run
from failing_memory import RECIPE
from stored_adapter import RECORD, FakeAdaptation, listing

from sebp_edge import AdapterRecord, AdapterStore, Personalizer
from sebp_edge.errors import AdapterError, BaseModelMismatch, Interrupted, MachineError, TextsError
from sebp_edge.events import silent

pytestmark = pytest.mark.usefixtures("unassessed")


@pytest.fixture
def learnt(make, after_learning):
    """The store of `make`, which has learnt the notes."""
    return after_learning(make().store)


def weights(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}


def train_without(make, folder, earlier, forgotten, tmp_path):
    """A fresh training, in a store that has only the splits of the other documents."""
    store = AdapterStore(tmp_path / "fresh")
    saved = store.adapter("default").save(FakeAdaptation(), AdapterRecord(**RECORD), activate=False)
    kept = [document for document in earlier["documents"] if document["hash"] != forgotten.hash]
    (saved.path / "documents.json").write_text(json.dumps(earlier | {"documents": kept}))
    (folder / forgotten.name).unlink()
    return make(store=store, seed=5).adapt(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "split"), [(24, "test"), (15, "fold 1")])
def test_the_weights_are_those_of_a_fresh_training_on_the_other_documents(make, notes_folder, tmp_path, count, split):
    for path in sorted(notes_folder.iterdir())[count:]:
        path.unlink()
    make = partial(make, recipe=RECIPE.replace(learning_rate=2e-2, batch_tokens=200))  # what is kept is trained on all
    personalizer = make(seed=5)
    first = personalizer.adapt(notes_folder)
    store, earlier = personalizer.store, json.loads((first.adapter_path / "documents.json").read_text())
    forgotten = next(document for document in store.adapter("default").documents(1) if document.split == split)
    # The recipe and the seed are those of the version, whatever this Personalizer's are.
    receipt = make(seed=0, recipe="notes").forget(forgotten.name, notes_folder, activate_anyway=True)
    assert (receipt.versions_removed, receipt.replaced_by, receipt.active) == ((1,), 2, 2)
    assert not first.adapter_path.exists()
    found, fresh = store.adapter("default").open(), train_without(make, notes_folder, earlier, forgotten, tmp_path)
    assert weights(found.path) == weights(fresh.adapter_path)
    assert receipt.weights == found.weights_hash() == fresh.weights_hash()
    assert len(weights(found.path)) == (2 if count == 24 else 4)
    expected = dataclasses.replace(AdapterRecord.read(fresh.adapter_path), created=found.record.created)
    assert found.record == expected


@pytest.mark.slow
def test_the_adapter_in_use_is_the_new_one_or_none(make, learnt, notes_folder):
    personalizer = make()
    personalizer.load_adapter("default")
    personalizer.forget("note-03.md", notes_folder, activate_anyway=True)
    assert personalizer.in_use.adapter_folder.name == "2"
    assert make().generate("the ferry", adapter="default", temperature=0, max_new_tokens=8) == personalizer.generate(
        "the ferry", temperature=0, max_new_tokens=8
    )
    events = []
    personalizer.on_event = events.append
    texts = make_sentences(7, seed=9, words=60)
    personalizer.adapt(texts, name="few", activate_anyway=True)
    # Too few documents remain to be judged.
    receipt = personalizer.forget(["1", "2"], texts, name="few")
    assert (receipt.active, receipt.replaced_by) == (None, 2)
    assert personalizer.in_use.adapter_folder is None
    assert any("base model is used" in getattr(event, "message", "") for event in events)


@pytest.mark.slow
def test_a_stop_forgets_nothing(make, learnt, notes_folder):
    personalizer, event = make(), threading.Event()

    def stop(seen):
        if seen.event == "step":
            event.set()

    personalizer.on_event = stop
    with pytest.raises(Interrupted):
        personalizer.forget("note-03.md", notes_folder, stop_when=event)
    assert personalizer.store.adapter("default").active() == 1
    assert "note-03.md" in {document.name for document in personalizer.store.adapter("default").documents(1)}


def test_another_base_model_is_refused_before_anything_is_removed(learnt, notes_folder, tokenizer, tmp_path):
    folder = tmp_path / "other-llama"
    model = make_llama()
    model.model.embed_tokens.weight.data.mul_(1.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with pytest.raises(BaseModelMismatch, match="was made for micro-llama, not for these weights of other-llama"):
        Personalizer(folder, store=learnt, device="cpu").forget("note-03.md", notes_folder)
    assert learnt.adapter("default").versions() == [1]


@pytest.mark.slow
def test_the_command_says_first_what_it_removes_and_needs_a_yes(after_learning, notes_folder, model_folder):
    after_learning(AdapterStore())
    command = ["forget", notes_folder / "note-03.md", "--texts", notes_folder, "--model", model_folder]
    refused = run(*command)
    assert refused.exit_code == 2
    assert "note-03.md\t" in refused.stdout
    assert "Removed: version 1 of 'default'." in refused.stdout
    assert "trained on the other 23 documents of version 1" in refused.stdout
    assert "If the new version is not better than the base model, it will not be active." in refused.stdout
    assert "Nothing was changed; pass --yes" in refused.stderr
    assert_one_sentence(
        run("forget", "nothing", *command[2:], "--yes"), "knows a document 'nothing'; `sebp-edge adapters"
    )
    assert AdapterStore().adapter("default").versions() == [1]
    *_, receipt = records(run(*command, "--yes", "--json").stdout)
    assert (receipt["event"], receipt["versions_removed"], receipt["active"]) == ("result", [1], 2)
    assert "note-03" not in json.dumps(receipt | {"path": ""})
    done = run("forget", "note-04.md", *command[2:], "--yes")
    assert done.exit_code == 0, done.output
    assert "Forgotten: version 2 of 'default' removed." in done.stdout
    assert "Version 3 is active now." in done.stdout
    assert "Not reached: exported models, archives" in done.stdout
    assert "Receipt: " in done.stdout


@pytest.mark.slow
def test_the_other_texts_are_found_where_they_were_learnt(adapt, notes_folder, model_folder, tmp_path, monkeypatch):
    """Also from another working directory, after a rollback, and after the folder was moved and adapted to again."""
    monkeypatch.chdir(tmp_path)
    assert run("adapt", "notes", *adapt[2:], "--include", "*.md").exit_code == 0
    (notes_folder / "new.md").write_text(make_sentences(1, seed=3)[0])
    assert run(*adapt, "--activate-anyway").exit_code == 0
    assert run("adapters", "rollback", "default").exit_code == 0
    monkeypatch.chdir("/")
    command = ["forget", "note-03.md", "--model", model_folder]
    asked = run(*command)
    assert "Nothing was changed; pass --yes" in asked.stderr
    lost = "1 other document, learnt after the active version, goes with these; `sebp-edge adapt` learns it again."
    assert lost in asked.stdout
    assert "trained on the other 23 documents of version 1." in asked.stdout
    done = run(*command, "--yes", "--activate-anyway")
    assert done.exit_code == 0, done.output
    assert lost in done.stdout
    store = AdapterStore()
    assert store.adapter("default").versions() == [3]
    (((where,),),) = [one.texts for one in store.adapter("default").wheres().values()]
    assert (str(where.path), where.include) == (str(notes_folder), ("*.md",))
    (notes_folder / "note-03.md").unlink()
    again = run(*adapt)
    assert "1 new and 0 changed documents" in again.stdout and again.exit_code in (0, 3)

    moved = notes_folder.rename(tmp_path / "moved")
    store.adapter("default").activate(3)
    refused = run("forget", "note-04.md", *command[2:], "--yes")
    assert_one_sentence(
        refused,
        r"of the 22 other documents of version 3, 22 are not found \(note-00\.md, note-01\.md, note-02\.md and 19 more"
        rf"\)\. They were expected in '{notes_folder}', which is not there any more; give their new place with --texts",
    )
    assert_one_sentence(
        run("forget", "note-04.md", "--include", "*.md"), "choose files of --texts; give --texts, too", 2
    )
    (moved / "new.md").unlink()
    assert run("adapt", moved, *adapt[2:]).stdout.startswith("Nothing is new in 23 documents: version 3")
    done = run("forget", "note-04.md", *command[2:], "--yes", "--activate-anyway", "--json")
    assert done.exit_code == 0, done.output
    *_, receipt = records(done.stdout)
    assert receipt["replaced_by"] == receipt["active"] > 3
    (((where,),),) = [one.texts for one in store.adapter("default").wheres().values()]
    assert str(where.path) == str(moved)


@pytest.mark.slow
def test_texts_without_files_have_to_be_given_again(make):
    personalizer, texts = make(), make_sentences(24)
    personalizer.adapt(texts, activate_anyway=True)
    with pytest.raises(TextsError, match=r"not known where the texts of version 1 are: .* Give them with --texts"):
        personalizer.forget("1")
    receipt = personalizer.forget("1", texts, activate_anyway=True)
    assert (receipt.versions_removed, receipt.active, receipt.lost) == ((1,), 2, 0)


# ------------------------------------------------------------------------------------------------------ verification


@pytest.mark.slow
def test_a_receipt_is_verified_by_a_training_that_gives_the_same_weights(make, learnt, notes_folder):
    personalizer = make(seed=3)
    with pytest.raises(AdapterError, match=r"'default' has no receipt of `sebp-edge forget`"):
        personalizer.verify_forgotten()
    receipt = personalizer.forget("note-03.md", notes_folder, activate_anyway=True)
    adapter = personalizer.store.adapter("default")
    before = listing(personalizer.store.folder)
    found = personalizer.verify_forgotten()
    assert (found.verified, found.version, found.receipt) == (True, 2, receipt.path)
    assert found.weights == found.trained_again == receipt.weights == adapter.open(2).weights_hash()
    # With as many threads as then.
    record = adapter.version_folder(2) / "sebp_edge.json"
    text, seen = record.read_text(), set()
    record.write_text(json.dumps(json.loads(text) | {"threads": 3}))
    personalizer.on_event = lambda event: event.event != "step" or seen.add(torch.get_num_threads())
    personalizer.verify_forgotten()
    assert seen == {3} and json.loads(text)["threads"] == torch.get_num_threads()
    record.write_text(text)
    personalizer.on_event = silent
    assert "version 2 is, bit for bit, what a training on its 23 documents gives" in found.explanation
    assert listing(personalizer.store.folder) == before
    assert personalizer.in_use.adapter_folder == adapter.version_folder(2)
    # Not the same texts.
    note = sorted(notes_folder.iterdir())[0]
    text = note.read_text()
    note.write_text("something else " * 20)
    with pytest.raises(TextsError, match="Nothing was verified: of the 23 other documents"):
        personalizer.verify_forgotten()
    note.write_text(text)
    # Another training gives other weights. Another build of the same version is named, since it may round otherwise.
    installed = version("torch")
    other = f"{installed.partition('+')[0]}+other"
    path = adapter.version_folder(2) / "sebp_edge.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"seed": 4, "packages": record["packages"] | {"torch": other}}))
    found = personalizer.verify_forgotten()
    assert (found.verified, found.trained_again == receipt.weights) == (False, False)
    assert f"other weights, but it was made with torch {other}, now {installed}." in found.explanation


@pytest.fixture
def forgotten(make, learnt, notes_folder):
    """A Personalizer whose adapter has a receipt, and that must not train."""
    personalizer = make()
    personalizer.forget("note-03.md", notes_folder, activate_anyway=True)
    personalizer.on_event = lambda event: event.event != "training_started" or pytest.fail("trains")
    return personalizer


@pytest.mark.slow
def test_what_a_training_need_not_show_is_said_without_one(forgotten, notes_folder):
    adapter = forgotten.store.adapter("default")
    path = adapter.folder / "forgotten-1.json"
    receipt, weights = path.read_text(), adapter.version_folder(2) / "adapter_model.safetensors"

    def says(*parts, verified):
        found = forgotten.verify_forgotten()
        assert (found.verified, found.trained_again) == (verified, None)
        assert all(part in found.explanation for part in parts), found.explanation

    saved = weights.read_bytes()
    weights.write_bytes(saved[:-1] + bytes([saved[-1] ^ 1]))
    says("weights of version 2 of 'default' are not those of the receipt", verified=False)
    weights.write_bytes(saved)
    path.write_text(json.dumps(json.loads(receipt) | {"weights": None}))
    with pytest.raises(AdapterError, match="has no hash of weights: version 2 was trained on a GPU"):
        forgotten.verify_forgotten()
    path.write_text(json.dumps(json.loads(receipt) | {"replaced_by": None, "weights": None}))
    says("No version of 'default' knows what was forgotten, and none was trained", verified=True)
    path.write_text(receipt[:-20])
    with pytest.raises(AdapterError, match=r"The receipt '.*forgotten-1\.json' cannot be read"):
        forgotten.verify_forgotten()
    path.write_text(json.dumps(json.loads(receipt) | {"replaced_by": 7}))
    with pytest.raises(AdapterError, match=r"Version 7 .* was removed; so there is nothing to compare"):
        forgotten.verify_forgotten()
    path.write_text(receipt)
    forgotten.in_use.device = torch.device("cuda")
    with pytest.raises(MachineError, match="verify with device='cpu'"):
        forgotten.verify_forgotten()
    forgotten.in_use.device = torch.device("cpu")
    forgotten.on_event = silent
    forgotten.adapt(notes_folder, activate_anyway=True)
    says("Version 3 of 'default' knows what was forgotten; it was learnt again", verified=False)


@pytest.mark.slow
def test_the_command_verifies_the_last_receipt(after_learning, notes_folder, model_folder):
    after_learning(AdapterStore())
    command = ["--model", model_folder, "--texts", notes_folder]
    assert run("forget", "note-03.md", *command, "--yes", "--activate-anyway").exit_code == 0
    for wrong in (["forget"], ["forget", "note-04.md", "--verify"]):
        assert_one_sentence(run(*wrong, *command), "give --verify alone to verify what was forgotten last", 2)
    found = run("forget", "--verify", *command)
    assert found.exit_code == 0, found.output
    assert "Verified: No version of 'default' knows what was forgotten, and version 2 is, bit for bit," in found.stdout
    weights = AdapterStore().adapter("default").version_folder(2) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes() + b" ")
    found = run("forget", "--verify", *command, "--json")
    *_, result = records(found.stdout)
    assert (found.exit_code, result["result_of"], result["verified"]) == (1, "verify", False)
