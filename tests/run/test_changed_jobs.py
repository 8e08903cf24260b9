"""What is damaged or has changed since a training was interrupted: its job's files, its texts, the model."""

import itertools
import json
import random
import re
import shutil
from contextlib import contextmanager

import pytest
from builders import make_llama, make_sentences
from command import run
from paused_jobs import THIRD_STEP, at_step, bits, checkpoint_of, personalizer, resume, verdict

from sebp_edge import AdapterStore
from sebp_edge.errors import JobError, OptionError, Paused, TextsChanged
from sebp_edge.events import Notice, StepDone

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unassessed")]


def known(folder):
    """The documents that a job or a version knows, as its file has them."""
    documents = json.loads((folder / "documents.json").read_text())["documents"]
    return [document for document in documents if document["split"] is not None]


def damage(path, how):
    content = path.read_bytes()
    match how:
        case "cut":
            path.write_bytes(content[: random.randrange(len(content) - 1)])
        case "zeros":  # what some disks leave after a power cut
            path.write_bytes(bytes(len(content)))
        case "flipped":
            place = random.randrange(len(content))
            path.write_bytes(
                content[:place] + bytes([content[place] ^ 1 << random.randrange(8)]) + content[place + 1 :]
            )
        case "one digit":  # of a hash, so that the file stays valid
            digit = random.choice([place.start() for place in re.finditer(rb"[0-9a-f](?=[0-9a-f]{0,14}\")", content)])
            path.write_bytes(content[:digit] + (b"1" if content[digit] == ord("0") else b"0") + content[digit + 1 :])
        case "missing":
            path.unlink()


@contextmanager
def damaged(path, how):
    """A file is damaged within the context."""
    content = path.read_bytes()
    damage(path, how)
    yield
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_refused_in_one_sentence_or_starts_over(pause, whole):
    store, job, _ = pause(at_step("train", 5))
    files = {each["file"] for each in checkpoint_of(job)["files"].values()}
    assert len(files) > 1
    for file, how in itertools.product([*files, "checkpoint.json"], ["cut", "zeros", "flipped", "missing"]):
        if (file, how) == ("checkpoint.json", "missing"):  # as if none had been written: see the next test
            continue
        with (
            damaged(job.folder / file, how),
            pytest.raises(JobError, match=r"is damaged, or was written by another sebp-edge; start over with"),
        ):
            resume(store)
        assert store.jobs.get().state == "paused"
    damage(job.folder / random.choice([*files, "checkpoint.json"]), "flipped")
    _, result = resume(store, changed="again")
    assert (bits(store), verdict(result)) == whole[30][:2]


def test_a_training_without_a_checkpoint_says_that_it_starts_from_its_beginning(pause, whole):
    store, job, _ = pause()
    (job.folder / "checkpoint.json").unlink()
    made, result = resume(store)
    assert Notice("No steps of this training are saved, so that it starts from its beginning.") in of_no_job(
        made.events
    )
    assert (bits(store), verdict(result)) == whole[30][:2]


def of_no_job(events):
    return [event.of_job(None) for event in events]


def test_a_damaged_job_is_told_in_one_sentence_and_can_be_removed(pause, monkeypatch):
    store, job, _ = pause()
    monkeypatch.setenv(
        "XDG_DATA_HOME", str(shutil.move(store.folder.parent, job.folder.parents[3] / "sebp-edge").parent)
    )
    store = AdapterStore()
    folder = store.jobs.list()[0].folder
    remove = f"`sebp-edge jobs remove {job.id}` deletes it."
    for how in ("cut", "zeros", "flipped", "missing"):
        with damaged(folder / "job.json", how):
            (sentence,) = store.jobs.damaged()
            assert sentence == f"The job '{job.id}' is damaged, or was written by another sebp-edge; {remove}"
            with pytest.raises(JobError, match=re.escape(sentence)):
                store.jobs.get(job.id)
            listed = run("jobs")
            assert (listed.exit_code, listed.stderr) == (0, f"note: {sentence}\n")
    damage(folder / "job.json", "cut")
    assert run("jobs", "remove", job.id).exit_code == 0
    assert not folder.exists()


def test_damaged_lists_of_a_job_are_refused_in_one_sentence_or_start_over(pause, whole):
    store, job, _ = pause()
    lists = ("known_texts.json", "documents.json")
    for name, how in itertools.product(lists, ["cut", "zeros", "flipped", "one digit", "missing"]):
        with damaged(job.folder / name, how), pytest.raises((JobError, TextsChanged)) as error:
            resume(store)
        assert re.search("is damaged|are not there as they were|is not there as", str(error.value))
    damage(job.folder / random.choice(lists), "one digit")
    _, result = resume(store, changed="again")
    assert (bits(store), verdict(result)) == whole[30][:2]


def test_what_a_kill_leaves_half_written_is_never_taken_and_a_lock_is_not_needed(pause, whole):
    store, job, _ = pause()
    (job.folder / ".checkpoint.json-x").write_text('{"format": 1, "files": {}}')
    (job.folder / "99.safetensors").write_bytes(b"half")
    (job.folder / "lock").unlink()
    _, result = resume(store)
    assert (bits(store), verdict(result)) == whole[30][:2]
    assert not any(job.folder.parent.iterdir())


def test_changed_documents_are_refused_and_named_on_the_screen_only(pause):
    store, _, folder = pause()
    (folder / "note-05.md").write_text("Something else stands here now, in other words.")
    (folder / "note-07.md").unlink()
    with pytest.raises(TextsChanged) as error:
        resume(store)
    assert (error.value.changed, error.value.missing) == (("note-05.md",), 2)
    assert "Of the 30 documents that the training knows, 2 are not there as they were." in str(error.value)
    assert "New or changed is 'note-05.md'" in str(error.value)
    assert store.jobs.get().state == "paused"


def test_changed_documents_can_be_left_out_and_stay_known(pause):
    store, job, folder = pause()
    hashes = {document["hash"] for document in known(job.folder)}
    (folder / "note-05.md").write_text("Something else stands here now, in other words.")
    made, result = resume(store, changed="without")
    assert any("goes on without 1 document" in getattr(event, "message", "") for event in made.events)
    assert any("1 document that came since is left" in getattr(event, "message", "") for event in made.events)
    assert next(event.step for event in made.events if isinstance(event, StepDone)) == 4
    assert result.documents == 29
    assert {document["hash"] for document in known(result.adapter_path)} == hashes
    # So that it can be forgotten.
    (gone,) = (document["hash"] for document in known(result.adapter_path) if document["absent"])
    receipt = personalizer(**job.arguments(), store=store).forget(gone, activate_anyway=True)
    assert receipt.documents == (gone,)


def test_what_goes_on_without_documents_can_be_paused_again(pause):
    store, job, folder = pause()
    (folder / "note-05.md").unlink()
    made = personalizer(**job.arguments(), at=at_step("train", 4), store=store)
    with pytest.raises(Paused):
        made.resume(changed="without")
    _, result = resume(store)
    assert result.documents == 29
    assert result.heldout_loss_before is not None


def test_an_epoch_without_most_of_its_documents_may_have_fewer_steps_than_are_done(pause, whole):
    store, _, folder = pause()
    trained = [one.name for one in AdapterStore(whole[30][4]).adapter("default").documents(1) if one.split == "train"]
    for name in trained[4:]:
        (folder / name).unlink()
    _, result = resume(store, changed="without")
    assert result.documents == 30 - len(trained[4:])


def test_a_split_without_documents_starts_over_or_is_refused(pause, whole):
    store, _, folder = pause()
    of_whole = AdapterStore(whole[30][4]).adapter("default").documents(1)
    validated = [folder / document.name for document in of_whole if document.split == "validation"]
    for path in validated:
        path.unlink()
    with pytest.raises(JobError, match="none is left in the split 'validation'"):
        resume(store, changed="without")
    _, result = resume(store, changed="again")
    assert result.documents == 30 - len(validated)


def test_new_documents_are_left_for_the_next_time(pause, whole):
    store, _, folder = pause()
    (folder / "a-new-one.md").write_text("This note was not there when the training began.")
    _, result = resume(store)
    assert (bits(store), verdict(result)) == whole[30][:2]


def test_another_model_or_device_or_version_is_refused(pause, notes, tmp_path, monkeypatch, tokenizer):
    store, job, _ = pause()
    other = tmp_path / "other-model"
    make_llama(seed=7, num_hidden_layers=1).save_pretrained(other)
    tokenizer.save_pretrained(other)
    with pytest.raises(OptionError, match=r"was begun with the model '.*', and this Personalizer has '.*other-model'"):
        personalizer(other, store).resume()
    for path in other.iterdir():
        shutil.copy(path, job.record.settings["model"])
    try:
        with pytest.raises(JobError, match="The base model has other weights"):
            resume(store)
    finally:
        make_llama(initializer_range=0.1, num_hidden_layers=1).save_pretrained(job.record.settings["model"])
    monkeypatch.setattr("sebp_edge.run.adaptation_job.__version__", "9.9.9")
    with pytest.raises(JobError, match=r"was begun by sebp-edge 0\.1\.0, and this is 9\.9\.9; start over"):
        resume(store)


def test_the_recipe_and_the_seed_are_the_jobs(pause, whole, model):
    store, _, _ = pause()
    result = personalizer(model, store, recipe="notes", seed=7).resume()
    assert (bits(store), verdict(result)) == whole[30][:2]


def test_texts_that_are_no_files_are_given_again(model, tmp_path, whole, notes):
    store, texts = AdapterStore(tmp_path / "store"), make_sentences(40)[:30]
    with pytest.raises(Paused):
        personalizer(model, store, THIRD_STEP).adapt(texts, activate_anyway=True)
    with pytest.raises(JobError, match="texts that are no files"):
        resume(store)
    _, result = resume(store, texts=texts)
    assert verdict(result) == whole[30][1]
