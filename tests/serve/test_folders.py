"""The folders that an app may use hold when a job runs, goes on and writes, not only when it is asked for."""

import shutil
from functools import partial
from pathlib import Path

import pytest
from command import RECIPE
from served import Server, refused
from stored_adapter import RECORD, FakeAdaptation

from sebp_edge import AdapterRecord, AdapterStore, Folder
from sebp_edge.events import TensorWritten, TextsRead
from sebp_edge.serve.messages import Refusal, ResumeJobParams
from sebp_edge.serve.methods import refuse_outside
from sebp_edge.serve.worker_tasks import Worker, _paths_of
from sebp_edge.store.stored_jobs import JobRecord
from sebp_edge.store.where import Where


@pytest.fixture
def allowed(tmp_path, notes_folder):
    """A folder that an app may use, with notes in it, and one beside it that it may not."""
    for name in ("allowed", "outside"):
        shutil.copytree(notes_folder, tmp_path / name / "sub")
    (tmp_path / "allowed" / "test.toml").write_text(RECIPE)
    return tmp_path / "allowed"


def swap(folder):
    """Puts a link to the folder outside into the place of one that is allowed."""
    shutil.rmtree(folder)
    folder.symlink_to(folder.parents[1] / "outside" / "sub")


@pytest.mark.slow
def test_a_folder_that_became_a_link_to_outside_is_refused_when_a_job_begins_goes_on_or_writes(
    allowed, tmp_path, model_folder
):
    common = {"model": str(model_folder), "device": "cpu", "recipe": str(allowed / "test.toml")}
    with Server(warm=True) as server:
        folders = [str(allowed), str(model_folder)]
        server.initialize(store=str(tmp_path / "store"), folders=folders)
        for name in ("first", "paused"):
            shutil.copytree(allowed / "sub", allowed / name)

        def job(id, kind="adapt", **params):
            return {"id": id, "kind": kind, "params": common | {"name": id} | params}

        with server.held(event="step", **job("paused", paths=[str(allowed / "paused")])):
            server.call("jobs.pause", expected_job_id="paused")
            server.state("paused", {"paused"})
        with server.held(event="texts_read", **job("first", paths=[str(allowed / "first")])):
            server.start_job(**job("second", paths=[str(allowed / "sub")]))
            server.start_job(**job("export", kind="export", to=str(allowed / "sub" / "out")))
            server.start_job(**job("forget", kind="forget", documents=[str(allowed / "sub" / "note-00.md")]))
            server.start_job(**job("verify", kind="verify", paths=[str(allowed / "sub")]))
            server.call("jobs.resume", id="paused")
            for name in ("sub", "paused"):
                swap(allowed / name)
            server.call("jobs.cancel", expected_job_id="first")
        question = {"question": "What?", "model": str(model_folder), "device": "cpu", "paths": [str(allowed / "sub")]}
        for id in ("second", "export", "forget", "verify", "paused"):
            ended = server.state(id, {"refused", "failed", "done", "interrupted"})
            assert (ended["state"], ended["error"]["code"]) == ("refused", "folder_not_allowed"), (id, ended)
        with pytest.raises(Exception, match="outside of the folders"):
            server.call("ask", **question)
        assert not (tmp_path / "outside" / "sub" / "out").exists()
        assert {"second", "forget"}.isdisjoint(AdapterStore(tmp_path / "store").names())


@pytest.mark.slow
def test_folders_are_added_and_taken_away_and_a_running_job_goes_on_with_those_it_was_given(
    allowed, tmp_path, model_folder
):
    sub, outside = str(allowed / "sub"), str(tmp_path / "outside" / "sub")
    training = {"model": str(model_folder), "device": "cpu", "recipe": str(allowed / "test.toml"), "name": "mine"}
    (tmp_path / "outside" / "sub" / "shed.md").write_text("The key of the shed hangs behind the green door.")
    question = {"question": "Where does the key of the shed hang?"}
    with Server(warm=True) as server:
        server.initialize(store=str(tmp_path / "store"), folders=[str(allowed), str(model_folder)])
        for changes, code in (
            ({"add": ["notes"]}, "invalid_params"),
            ({"add": ["/a\0b"]}, "invalid_params"),
            ({"add": [5]}, "invalid_params"),
            ({"add": "/"}, "invalid_params"),
            ({"remove": [outside]}, "invalid_params"),
            ({"remove": [sub], "add": ["/"]}, "invalid_params"),  # it lies within one, and none is added either
            ({"folders": ["/"]}, "invalid_params"),
        ):
            assert refused(server, "folders", **changes).code == code
        assert server.call("folders")["folders"] == [str(allowed), str(model_folder)]
        assert refused(server, "search", **question, paths=[outside]).code == "folder_not_allowed"
        (allowed / "link").symlink_to(outside)
        added = server.call("folders", add=[str(allowed / "link"), outside])["folders"]
        assert added == [str(allowed), str(model_folder), outside]
        assert server.call("search", **question, paths=[outside])["hits"]
        with server.held("first", "step", params=training | {"paths": [sub]}):
            server.start_job("second", params=training | {"paths": [sub]})
            assert server.call("folders", remove=[str(allowed)])["folders"] == [str(model_folder), outside]
            assert refused(server, "search", **question, paths=[sub]).code == "folder_not_allowed"
            assert refused(server, "inspect", paths=[sub]).code == "folder_not_allowed"
            assert server.call("search", **question, paths=[outside])["hits"]  # by the worker that trains
        assert server.state("first")["state"] == "done"
        later = server.state("second")
        assert (later["state"], later["error"]["code"]) == ("refused", "folder_not_allowed")


@pytest.mark.parametrize("event", [TextsRead(1, 1, 1, 0.0, ()), TensorWritten(1, 2)])
def test_it_is_checked_again_once_texts_are_read_and_while_an_export_is_written(allowed, event):
    told = []
    worker = Worker(None, None)
    worker._tell = lambda *what, **values: told.append(values)
    worker._while_waiting = lambda: None
    worker._refuse_outside = partial(refuse_outside, [str(allowed / "sub" / "x")], [allowed])
    worker._on_event("first", event)
    swap(allowed / "sub")
    with pytest.raises(Refusal, match="outside of the folders"):
        worker._on_event("first", event)
    assert len(told) == 1


def test_what_is_read_to_forget_counts_too(allowed, tmp_path):
    """A document is forgotten by a training on the others, which are read from where they were learnt."""
    store = AdapterStore(tmp_path / "store")
    where = Where(((Folder(str(allowed / "sub")),),))
    adapter = store.adapter("mine")
    adapter.save(FakeAdaptation(b"x"), AdapterRecord(**RECORD), activate=True, where=where)
    options = {"documents": ["note-00.md"]}
    record = JobRecord(kind="forget", adapter="mine", settings={"model": "tiny"}, options=options)
    store.jobs.begin(record, "first")
    paths = _paths_of(store.jobs.get("first"), ResumeJobParams(id="first"), store)
    refuse_outside(paths, [allowed])
    swap(allowed / "sub")
    with pytest.raises(Refusal, match="outside of the folders"):
        refuse_outside(paths, [allowed])
    assert str(Path(paths[-1])) == str(allowed / "sub")
