"""The model that answers during a training: it shares all weights, and its answers stay within the memory budget."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from export_sources import add_reader
from served import wait_until

from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.generation import Generation
from sebp_edge.engine.models.loading import load_base_model
from sebp_edge.events import silent
from sebp_edge.serve.tasks import Tasks
from sebp_edge.serve.worker_tasks import Worker, has_room, twin


def test_a_copy_of_the_modules_shares_all_tensors_and_an_answer_fits_into_what_the_budget_leaves(model_folder):
    base = load_base_model(resolve(str(model_folder)), Recipe.load("notes"), torch.device("cpu"))
    served = twin(base)
    pairs = zip(base.model.state_dict().values(), served.model.state_dict().values(), strict=True)
    assert all(own.data_ptr() == other.data_ptr() for own, other in pairs)
    assert not {*base.model.modules()} & {*served.model.modules()}
    config = base.model.config
    heads = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    needed = 2 * config.num_hidden_layers * heads * 4 * (30 // 2 + 7)
    assert has_room(base, needed + 1000, 1000, 30, 7)
    assert not has_room(base, needed + 999, 1000, 30, 7)
    most = 2 * config.num_hidden_layers * heads * 4 * config.max_position_embeddings
    assert has_room(base, most, 0, 10**9, 10**9)


@pytest.fixture
def worker(tmp_path):
    """A worker in this process, with its tasks, a function that gives it one, and what it has told."""
    reading, writing = os.pipe()  # never closed: that would end this process
    told = []
    outbox = SimpleNamespace(wait_for_room=lambda: None, send=lambda one: one["tells"] == "loaded" or told.append(one))
    tasks = Tasks(reading, outbox)
    worker = Worker(tasks, outbox)
    worker._do({"do": "settings", "store": str(tmp_path), "memory_budget": None, "low_priority": False})

    def give(method, **params):
        task = {
            "do": "answer",
            "id": "a",
            "folders": ["/"],
            "method": method,
            "params": params | ({} if method == "search" else {"device": "cpu"}),
        }
        os.write(writing, json.dumps(task).encode() + b"\n")
        wait_until(lambda: "a" in tasks.stops)
        assert tasks.next_within_job() == task
        return task

    return worker, tasks, give, told


def test_a_quotation_takes_no_model_and_the_reader_of_one_reads(worker, model_folder, tmp_path, monkeypatch):
    worker, _, give, told = worker
    (tmp_path / "trip.md").write_text("The key of the cabin is in the meter box.")
    asked = {"question": "Where is the key?", "paths": [str(tmp_path / "trip.md")], "model": str(model_folder)}
    worker._answer(give("ask", **asked))
    assert told[-1]["result"]["quoted"] and worker._served is None
    add_reader(AdapterStore(tmp_path), model_folder)
    said = Generation("in the meter box", prompt_tokens=9, new_tokens=4, finish="stop", probability=0.9)
    monkeypatch.setattr("sebp_edge.run.generating.generate_text", lambda *_, **options: said)
    worker._answer(give("ask", **asked))
    *_, chunk, answer = told
    assert chunk["text"] == answer["result"]["text"] == "in the meter box" and not answer["result"]["quoted"]


def test_a_search_takes_no_model_and_finds_what_a_file_says_now(worker, tmp_path):
    worker, _, give, told = worker
    (tmp_path / "trip.md").write_text("The key of the cabin is in the meter box.")
    for place in ("in the meter box", "under the stone"):
        (tmp_path / "trip.md").write_text(f"The key of the cabin is {place}.")
        worker._answer(give("search", question="Where is the key of the cabin?", paths=[str(tmp_path / "trip.md")]))
        (hit,) = told[-1]["result"]["hits"]
        assert place in hit["passage"]["text"] and hit["passage"]["path"] == str(tmp_path / "trip.md")
    assert worker._served is None


def test_loading_the_model_for_an_answer_within_a_job_is_stopped_with_the_answer(worker, model_folder, tmp_path):
    """The job has not loaded it yet; it loads it itself afterwards."""
    worker, tasks, give, told = worker
    job = Personalizer(model_folder, device="cpu", store=tmp_path)
    worker._begin(job, str(model_folder))
    task = give("generate", prompt="the", model=str(model_folder))
    tasks.stops["a"].set()
    worker._answer(task)
    assert [(one["id"], one["error"]["data"]["code"]) for one in told] == [("a", "cancelled")]
    assert job.in_use.base is None and worker._served.in_use.base is None
    assert job.in_use.load(silent) is job.in_use.base
    assert worker._served.in_use.base.model is not job.in_use.base.model
