"""Jobs of `sebp-edge serve` with a real worker: events, answers between steps, cancel, kill, replay, what is kept."""

import json
import random
import secrets
import sqlite3
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from command import RECIPE
from served import COMMAND, SECONDS, Refused, Server, all_gone, processes_below

from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.serve.jobs import ENDED

pytestmark = pytest.mark.slow


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "test.toml"
    path.write_text(RECIPE)
    return str(path)


@pytest.fixture
def settings(tmp_path, model_folder):
    return {"store": str(tmp_path / "store"), "folders": [str(tmp_path), str(model_folder)]}


@pytest.fixture
def request_of(notes_folder, model_folder, recipe):
    """A function that returns the parameters of a training."""

    def make(**changes):
        common = {"paths": [str(notes_folder)], "model": str(model_folder), "recipe": recipe, "name": "mine"}
        return common | {"device": "cpu"} | changes

    return make


@pytest.fixture
def server(settings):
    with Server() as server:
        server.initialize(**settings)
        yield server


def adapter_bytes(store, version):
    return (AdapterStore(store).adapter("mine").version_folder(version) / "adapter_model.safetensors").read_bytes()


def test_a_job_tells_numbered_events_and_ends_with_its_result(server, request_of):
    started = server.call("jobs.start", id="first", params=request_of())["job"]
    assert started["state"] in ("queued", "starting")
    assert server.call("jobs.start", id="first", params=request_of())["job"]["id"] == "first"
    with pytest.raises(Refused, match="Another job has this id"):
        server.call("jobs.start", id="first", params=request_of(seed=1))
    server.call("jobs.subscribe", id="first")
    events, last = [], None
    while last is None or last["event"].get("state") not in ENDED:
        last = server.event("first")
        events.append(last)
    assert last["event"]["state"] == "done", last
    assert [event["number"] for event in events] == list(range(1, len(events) + 1))
    states = [event["event"]["state"] for event in events if event["event"]["event"] == "state"]
    assert states == ["queued", "starting", "running", "done"]
    shares = [event["progress"] for event in events]
    assert shares == sorted(shares)
    assert all(event["event"]["job"] == "first" and event["event"]["v"] == 1 for event in events)
    assert {"step", "evaluated", "saved"} <= {event["event"]["event"] for event in events}
    result = last["event"]["result"]
    assert (result["name"], result["version"]) == ("mine", 1)
    assert server.call("jobs.get", id="first")["job"]["result"] == result
    listed = server.call("adapters.list")["adapters"]
    assert listed == [{"name": "mine", "versions": [1], "active": 1 if result["active"] else None}]
    # A later one is warm, and an app that comes back sees the rest.
    seen = random.randrange(len(events))
    server.call("jobs.subscribe", id="first", since=seen)
    assert [server.event("first")["number"] for _ in events[seen:]] == list(range(seen + 1, len(events) + 1))


def test_a_training_answers_between_steps_and_stays_the_same_bit_for_bit(
    server, request_of, settings, notes_folder, model_folder, recipe
):
    """The answers are those of the active version, as they are without a training, too."""
    server.call("jobs.start", id="first", params=request_of(activate_anyway=True))
    server.call("jobs.subscribe", id="first")
    server.state("first")
    asked = {"model": str(model_folder), "device": "cpu", "adapter": "mine", "prompt": "the", "sampling_seed": 3}
    alone = server.call("generate", max_new_tokens=6, **asked)
    base = server.call("generate", max_new_tokens=6, **asked | {"adapter": None})
    plan = server.call("plan", **request_of())
    server.call("jobs.start", id="second", params=request_of(fresh=True, activate_anyway=True))
    server.call("jobs.subscribe", id="second")
    for _ in range(3):
        server.event("second", lambda event: event["event"] == "step")
        assert server.call("generate", max_new_tokens=6, **asked) == alone
        assert server.call("generate", max_new_tokens=6, **asked | {"adapter": None}) == base
        chosen = {key: asked[key] for key in ("model", "device", "adapter")}
        answer = server.call("ask", question="What of xylophones?", paths=[str(notes_folder)], **chosen)
        assert answer["found"] is False
        assert server.call("plan", **request_of())["recipe"] == plan["recipe"]
        assert server.call("jobs.get", id="second")["job"]["state"] == "running"
    assert server.state("second")["state"] == "done"
    own = Path(settings["store"]).with_name("own")
    alone = Personalizer(model_folder, recipe=Recipe.load(recipe), device="cpu", store=own)
    alone.adapt(notes_folder, name="mine", activate_anyway=True)
    assert adapter_bytes(settings["store"], 1) == adapter_bytes(own, 1)
    alone.adapt(notes_folder, name="mine", activate_anyway=True, fresh=True)
    assert adapter_bytes(settings["store"], 2) == adapter_bytes(own, 2)


def test_what_a_training_cannot_share_is_busy(server, request_of, model_folder):
    server.call("jobs.start", id="full", params=request_of(recipe="full"))
    server.call("jobs.subscribe", id="full")
    server.event("full", lambda event: event["event"] == "step")
    with pytest.raises(Refused) as caught:
        server.call("generate", prompt="the", model=str(model_folder), device="cpu")
    assert (caught.value.code, caught.value.error["data"]["retry"]) == ("busy", True)
    with pytest.raises(Refused) as caught:
        server.call("generate", prompt="the", model="tiny", device="cpu")
    assert caught.value.code == "busy"
    server.call("jobs.cancel", expected_job_id="full")
    assert server.state("full")["state"] == "interrupted"


def test_jobs_wait_for_each_other_and_are_cancelled_wherever_they_are(server, request_of):
    for number in range(3):
        server.call("jobs.start", id=f"job-{number}", params=request_of(name=f"name-{number}"))
        server.call("jobs.subscribe", id=f"job-{number}")
    server.call("jobs.cancel", expected_job_id="job-1")  # it waits
    assert server.state("job-1")["error"]["code"] == "cancelled"
    server.call("jobs.cancel", expected_job_id="job-0")  # the worker starts
    assert server.state("job-0")["error"]["code"] == "cancelled"
    server.event("job-2", lambda event: event["event"] == random.choice(["texts_read", "step", "preparing"]))
    server.call("jobs.cancel", expected_job_id="job-2")
    assert server.state("job-2")["state"] == "interrupted"
    with pytest.raises(Refused) as caught:
        server.call("jobs.pause", expected_job_id="job-1")
    assert caught.value.code == "wrong_state"


def test_bad_texts_are_refused_and_the_worker_stays(server, request_of, tmp_path):
    (tmp_path / "empty").mkdir()
    server.call("jobs.start", id="none", params=request_of(paths=[str(tmp_path / "empty")]))
    server.call("jobs.subscribe", id="none")
    ended = server.state("none")
    assert (ended["state"], ended["error"]["code"]) == ("refused", "texts")
    assert server.worker() is not None
    assert server.call("unload") == {}
    assert server.worker() is None


def test_requests_are_cancelled_while_they_are_answered(server):
    number = server.send("generate", prompt="the", device="cpu", max_new_tokens=1000, temperature=0)
    text = server.wait(lambda message: message.get("method") == "text")["params"]
    assert text["request"] == number
    server.call("cancel", request=number)
    with pytest.raises(Refused) as caught:
        server.answer(number)
    assert caught.value.code == "cancelled"
    assert caught.value.error["data"]["text"].startswith(text["text"])
    assert len(server.call("generate", prompt="the", device="cpu", max_new_tokens=3)["text"]) > 0


def test_a_worker_that_is_killed_interrupts_its_job_only(server, request_of):
    server.call("jobs.start", id="first", params=request_of())
    server.call("jobs.subscribe", id="first")
    server.event("first", lambda event: event["event"] == "texts_read")
    psutil.Process(server.worker()).kill()
    ended = server.state("first")
    assert (ended["state"], ended["error"]["code"], ended["error"]["retry"]) == ("interrupted", "worker_ended", True)
    server.call("jobs.start", id="second", params=request_of())
    server.call("jobs.subscribe", id="second")
    assert server.state("second")["state"] == "done"


def test_a_worker_that_is_idle_ends(settings):
    with Server() as server:
        server.initialize(**settings, warm_seconds=0.1)
        server.call("generate", prompt="the", device="cpu", max_new_tokens=1)
        until = time.monotonic() + SECONDS
        while server.worker() is not None:
            assert time.monotonic() < until


def test_an_app_that_does_not_read_stops_no_training(settings, request_of):
    """It gets all events once it reads."""
    process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(number, method, **params):
        line = json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()

    ask(0, "initialize", protocol=1, **settings)
    ask(1, "jobs.start", id="first", params=request_of())
    ask(2, "jobs.subscribe", id="first")
    for number in range(3, 400):  # fills the pipe with answers
        ask(number, "jobs.list")
    store = Path(settings["store"]) / "adapters"
    until = time.monotonic() + SECONDS
    while not (store / "mine" / "1").exists():
        time.sleep(0.1)
        assert time.monotonic() < until
    numbers = []
    for line in process.stdout:
        message = json.loads(line)
        if message.get("method") == "job.event":
            numbers.append(message["params"]["number"])
            if message["params"]["event"].get("state") == "done":
                break
    assert numbers == list(range(1, len(numbers) + 1))
    process.stdin.close()
    assert process.wait(SECONDS) == 0
    process.stdout.close()


def test_a_job_is_shown_as_interrupted_after_its_server_was_killed(settings, request_of):
    with Server() as server:
        server.initialize(**settings)
        server.call("jobs.start", id="first", params=request_of())
        server.call("jobs.start", id="second", params=request_of())
        server.call("jobs.subscribe", id="first")
        last = server.event("first", lambda event: event["event"] == "step")["number"]
        processes = processes_below(server.process.pid)
        server.process.kill()
        assert all_gone(processes)
    with Server() as server:
        server.initialize(**settings)
        jobs = server.call("jobs.list")["jobs"]
        assert [(job["id"], job["state"], job["error"]["code"]) for job in jobs] == [
            ("first", "interrupted", "killed"),
            ("second", "interrupted", "killed"),
        ]
        server.call("jobs.subscribe", id="first", since=0)
        replayed = []
        while not replayed or replayed[-1]["event"].get("state") != "interrupted":
            replayed.append(server.event("first"))
        assert len(replayed) >= last
        assert [event["number"] for event in replayed] == list(range(1, len(replayed) + 1))


def test_the_journal_has_no_text_question_or_name_of_a_file(server, settings, request_of, tmp_path):
    """Canaries: in texts, in names of files and folders, in a question, in a prompt, in an answer."""
    canaries = {what: f"{what}{secrets.token_hex(6)}" for what in ("text", "file", "folder", "question", "prompt")}
    folder = tmp_path / canaries["folder"]
    folder.mkdir()
    for number in range(20):
        (folder / f"{canaries['file']}-{number}.md").write_text(f"{canaries['text']} the boat {number} is green. " * 4)
    (folder / f"{canaries['file']}.bin").write_bytes(bytes(200))
    server.call("jobs.start", id="first", params=request_of(paths=[str(folder)], texts=[canaries["text"] * 9]))
    server.call("jobs.subscribe", id="first")
    server.state("first")
    server.call("ask", question=f"Where is {canaries['question']}?", paths=[str(folder)], device="cpu")
    answer = server.call("generate", prompt=canaries["prompt"], device="cpu", max_new_tokens=12)["text"]
    server.call("shutdown")
    server.process.wait(SECONDS)
    files = list((Path(settings["store"]) / "adapters").glob("serve.sqlite*"))
    kept = b"".join(file.read_bytes() for file in files)
    assert b"texts_read" in kept
    assert not [what for what, canary in canaries.items() if canary.encode() in kept]
    assert len(answer) < 4 or answer.encode() not in kept


def test_removing_an_adapter_deletes_its_jobs_from_the_journal(server, settings, request_of):
    server.call("jobs.start", id="first", params=request_of(name="secretly"))
    server.call("jobs.subscribe", id="first")
    server.state("first")
    server.call("adapters.rename", name="secretly", new_name="other")
    server.call("adapters.rename", name="other", new_name="secretly")
    server.call("adapters.remove", name="secretly")
    assert server.call("jobs.list") == {"jobs": []}
    server.call("shutdown")
    server.process.wait(SECONDS)
    database = sqlite3.connect(Path(settings["store"]) / "adapters" / "serve.sqlite")
    assert database.execute("SELECT count(*) FROM events").fetchone() == (0,)
    database.close()
    kept = b"".join(path.read_bytes() for path in (Path(settings["store"]) / "adapters").glob("serve.sqlite*"))
    assert b"secretly" not in kept
