"""A job in the store: who may go on with it, what it contains, and when it is deleted."""

import json
import os
import shutil

import pytest
from builders import make_sentences
from command import assert_one_sentence, records, run, start
from paused_jobs import RECIPE, THIRD_STEP, at_step, bits, personalizer, resume, verdict

from sebp_edge import AdapterStore, Personalizer
from sebp_edge.errors import AdapterError, JobError, Paused

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unassessed")]


def test_a_newer_version_ends_a_job(pause, notes):
    store, job, _ = pause()
    made = personalizer(**job.arguments(), store=store)
    made.adapt(notes[13], activate_anyway=True)
    assert any("is paused at" in getattr(event, "message", "") for event in made.events)
    assert store.jobs.list() == []


def test_two_processes_do_not_go_on_with_the_same_job(pause):
    store, job, _ = pause()
    with job.held(), pytest.raises(JobError, match="is running in another process"):
        resume(store, job.id)
    assert store.jobs.get(job.id).state in ("interrupted", "paused")


def all_bytes(folder):
    return b"".join(path.read_bytes() + str(path).encode() for path in folder.rglob("*") if path.is_file())


def test_a_checkpoint_has_no_text_and_no_name_of_a_document(pause):
    _, job, folder = pause()
    content = all_bytes(job.folder)
    for path in folder.iterdir():
        assert path.name.encode() not in content
        for word in path.read_text().split():
            assert len(word) < 5 or word.encode() not in content.replace(str(folder).encode(), b"")
    private = (job.folder / "job.json").read_bytes()
    assert str(folder).encode() in private
    assert str(folder).encode() not in content.replace(private, b"")
    if os.name != "nt":
        assert {path.stat().st_mode & 0o077 for path in (job.folder, *job.folder.iterdir())} == {0}


@pytest.mark.parametrize("how", ["forget", "remove", "remove the version"])
def test_what_is_forgotten_or_removed_takes_its_checkpoints_along(model, notes, tmp_path, how, whole):
    store = AdapterStore(shutil.copytree(whole[30][4], tmp_path / "store"))
    folder = shutil.copytree(notes[30], tmp_path / "notes")
    (folder / "canary.md").write_text(make_sentences(60)[59])
    with pytest.raises(Paused) as error:
        personalizer(model, store, at_step("train", 1)).adapt(folder, activate_anyway=True)
    known = json.loads((store.jobs.get().folder / "known_texts.json").read_text())["texts"]
    canaries = [name.encode() for name in ("canary", error.value.job)] + [(folder / "canary.md").read_bytes()]
    adapter = store.adapter("default")
    if how == "forget":
        key = next(document.hash for document in adapter.documents(1) if document.name == "note-03.md")
        canaries += [key.encode(), next(text for text, own in known.items() if own == key).encode()]
        personalizer(model, store).forget("note-03.md", activate_anyway=True)
        # The receipt says what was forgotten.
        receipt = next(adapter.folder.glob("forgotten-*.json"))
        canaries.remove(key.encode())
        assert key in receipt.read_text()
    elif how == "remove":
        adapter.remove()
    else:
        shutil.copytree(adapter.folder / "1", adapter.folder / "2")
        adapter.remove(1)
    content = all_bytes(store.folder)
    assert [canary for canary in canaries if canary in content] == []
    assert store.jobs.list() == []


def test_a_document_that_only_a_job_knows_is_not_said_to_be_unknown(pause):
    store, job, folder = pause()
    personalizer(**job.arguments(), store=store).adapt(folder, name="other", activate_anyway=True)
    job.update(adapter="other", newest=1)
    with pytest.raises(AdapterError, match=f"may know it; to delete that: sebp-edge jobs remove {job.id}"):
        personalizer(**job.arguments(), store=store).forget("nothing.md", name="other")


def test_a_renamed_adapter_keeps_its_jobs(model, notes, tmp_path, whole):
    store = AdapterStore(shutil.copytree(whole[13][4], tmp_path / "store"))
    with pytest.raises(Paused):
        personalizer(model, store, at_step("train", 1)).adapt(notes[30], activate_anyway=True)
    store.adapter("default").rename("mine")
    assert [job.record.adapter for job in store.jobs.list("mine")] == [store.jobs.get().record.adapter] == ["mine"]


@pytest.mark.usefixtures("saves_each_step")
def test_a_job_that_is_deleted_while_it_runs_ends_without_it(model, notes, tmp_path, whole):
    store = AdapterStore(tmp_path / "store")

    def sink(event):
        if THIRD_STEP(event, 0):
            store.jobs.list()[0].remove()
        events.append(event)

    events, made = [], Personalizer(model, store=store, recipe=RECIPE, device="cpu", on_event=lambda event: sink(event))
    result = made.adapt(notes[30], activate_anyway=True)
    assert (bits(store), verdict(result)) == whole[30][:2]
    assert sum("can no longer be resumed" in getattr(event, "message", "") for event in events) == 1
    assert store.jobs.list() == []


def test_pause_is_refused_where_there_is_no_job(model, notes, tmp_path):
    store = AdapterStore(tmp_path / "store")
    made = personalizer(model, store)
    asked = []
    made.on_event = lambda event: asked.append(made.pause())
    made.adapt(notes[30], out=tmp_path / "out")
    assert set(asked) == {False}
    assert not made.pause()
    assert store.jobs.list() == []


def test_the_command_line_lists_resumes_and_removes_jobs(model, notes):
    store = AdapterStore()
    for name in ("one", "two"):
        with pytest.raises(Paused):
            personalizer(model, store, THIRD_STEP).adapt(notes[30], name=name, activate_anyway=True)
    one, two = (store.jobs.list(name)[0].id for name in ("one", "two"))
    listed = records(run("jobs", "--json").stdout)
    assert [(job["id"], job["adapter"]) for job in listed] == [(one, "one"), (two, "two")]
    assert 0 < listed[0]["progress"] < 1
    assert run("jobs").stdout.splitlines()[0].split("\t")[:4] == [one, "one", "adapt", "paused"]
    assert_one_sentence(run("adapt", "--resume"), rf"; name one of {one} \('one', \d+ %\), ")
    assert_one_sentence(run("adapt", "--resume", "aaaaaa"), "There is no job 'aaaaaa'; ")
    refused = run("adapt", "--resume", "--epochs", "3")
    assert (refused.exit_code, "--epochs does not go with --resume" in refused.stderr) == (2, True)
    assert run("jobs", "remove", two).stdout == f"The job {two} is deleted.\n"
    assert_one_sentence(run("jobs", "remove", two), f"There is no job '{two}'")
    result = run("adapt", "--resume", "--json")
    assert result.exit_code == 0, result.output
    lines = records(result.stdout)
    (began,) = (line for line in lines if line["event"] == "job_started")
    assert (began["id"], lines[-1]["event"]) == (one, "result")
    assert store.adapter("one").active() == 1
    assert run("jobs").stdout == "No training runs, is paused or was interrupted.\n"
    assert_one_sentence(run("adapt", "--resume", notes[30]), "No training is paused or interrupted")


def test_listing_jobs_imports_no_torch(tmp_path):
    code = """
import sys
from sebp_edge import AdapterStore
AdapterStore(sys.argv[1]).jobs.list()
print({"torch", "numpy"} & {*sys.modules})
"""
    with start([code, tmp_path], cold=True) as one:
        assert one.communicate(timeout=60)[0] == "set()\n"
