"""What stays of jobs of `sebp-edge serve` if workers or servers are killed, a disk is full, or an app does not read."""

import json
import secrets
import sqlite3
import sys
from pathlib import Path

import pytest
from served import SECONDS, Refused, Server, all_gone, processes_below, refused, start_server, wait_until

from sebp_edge import AdapterStore

resource = pytest.importorskip("resource", reason="needs a Unix")
pytestmark = pytest.mark.slow


@pytest.fixture
def settings(tmp_path):
    return {"store": str(tmp_path / "store"), "folders": ["/"], "low_priority": False}


def test_a_worker_that_is_idle_ends(settings, model_folder):
    with Server(warm=True) as server:
        server.initialize(**settings, warm_seconds=0.1)
        server.call("generate", prompt="the", model=str(model_folder), device="cpu", max_new_tokens=1)
        wait_until(lambda: server.worker() is None)


def test_an_app_that_does_not_read_stops_no_training(settings, request_of, short):
    """It gets all events once it reads."""
    process = start_server(warm=True)

    def ask(number, method, **params):
        line = json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()

    ask(0, "initialize", protocol=1, **settings)
    ask(1, "jobs.start", id="first", params=request_of(recipe=short))
    ask(2, "jobs.subscribe", id="first")
    for number in range(3, 400):  # fills the pipe with answers
        ask(number, "jobs.list")
    store = Path(settings["store"]) / "adapters"
    wait_until((store / "mine" / "1").exists)
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


def test_jobs_that_run_and_wait_outlive_their_server(settings, request_of, short):
    """Both are shown by `sebp-edge jobs` under the app's id, and go on."""
    with Server(warm=True) as server:
        server.initialize(**settings)
        second = request_of(activate_anyway=True, name=None, device=None, recipe=short)
        with server.held("first", "step", params=request_of()) as last:
            server.call("jobs.start", id="second", params=second)
            server.call("jobs.start", id="third", params={"texts": ["the boat"], "model": request_of()["model"]})
            server.call("jobs.start", id="fourth", params=request_of())
            server.call("jobs.cancel", expected_job_id="fourth")
            processes = processes_below(server.process.pid)
            server.process.kill()
            assert all_gone(processes)
    stored = {job.id: job for job in AdapterStore(settings["store"]).jobs.list()}
    assert set(stored) == {"first", "second", "third"}
    wait_until(lambda: not stored["first"].is_running)  # the worker's threads end one by one
    assert [stored[id].state for id in ("first", "second", "third")] == ["interrupted", "queued", "queued"]
    assert stored["second"].record.texts[0]["path"] == request_of()["paths"][0]
    files = (path for path in stored["third"].folder.rglob("*") if path.is_file())
    assert not any(b"the boat" in path.read_bytes() for path in files)
    with Server(warm=True) as server:
        server.initialize(**settings)
        jobs = server.call("jobs.list")["jobs"]
        shown = [(job["id"], job["state"], job["error"]["code"], job["resumable"]) for job in jobs]
        assert shown == [
            ("first", "interrupted", "killed", True),
            ("second", "interrupted", "killed", True),
            ("third", "interrupted", "killed", True),
            ("fourth", "interrupted", "cancelled", False),
        ]
        server.call("jobs.subscribe", id="first", since=0)
        replayed = []
        while not replayed or replayed[-1]["event"].get("state") != "interrupted":
            replayed.append(server.event("first"))
        assert len(replayed) >= last["number"]
        assert [event["number"] for event in replayed] == list(range(1, len(replayed) + 1))
        server.call("jobs.resume", id="second")
        server.call("jobs.subscribe", id="second", since=jobs[1]["last_event"])
        started = server.event("second", lambda event: event["event"] == "job_started")["event"]
        assert (started["id"], started["job"]) == ("second", "second")
        ended = server.state("second")
        assert (ended["state"], ended["result"]["active"]) == ("done", True), ended
        server.call("jobs.resume", id="third")
        server.call("jobs.subscribe", id="third", since=jobs[2]["last_event"])
        assert server.state("third")["error"]["code"] == "job"  # the texts were no files


def test_a_job_that_was_begun_elsewhere_keeps_its_id(server, settings, request_of):
    folder = Path(settings["store"]) / "adapters" / ".jobs" / "mine"
    folder.mkdir(parents=True)
    assert refused(server, "jobs.start", id="mine", params=request_of()).code == "id_taken"
    assert list(folder.iterdir()) == []


def test_jobs_that_are_refused_or_cancelled_leave_nothing(server, settings, request_of, tmp_path):
    for kind, params, code in (
        ("adapt", {"paths": [str(tmp_path)]}, "texts"),
        ("adapt", {"gpu_share": 50}, "invalid_option"),  # on the CPU
        ("forget", {"documents": ["nothing"]}, "adapter"),
    ):
        server.start_job(code, kind=kind, params=request_of(**params))
        ended = server.state(code)
        assert (ended["state"], ended["error"]["code"]) == ("refused", code)
    for changes, code in (
        ({"model": "tinny"}, "model"),
        ({"recipe": "notess"}, "recipe"),
        ({"seed": -1}, "invalid_option"),
    ):
        assert refused(server, "jobs.start", id="wrong", params=request_of(**changes)).code == code
    assert AdapterStore(settings["store"]).jobs.list() == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs prlimit")
def test_a_full_disk_is_told_and_the_running_job_goes_on(settings, request_of, short):
    """As if every write failed; the worker has a limit of its own."""

    def limit(server, size):
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    with Server(warm=True) as server:
        server.initialize(**settings)
        server.start_job("first", params=request_of(recipe=short))
        server.event("first", lambda event: event["event"] == "texts_read")
        limit(server, 0)
        for id in ("second", "third"):
            error = refused(server, "jobs.start", id=id, params=request_of())
            assert (error.code, error.error["data"]["retry"]) == ("storage", True)
        limit(server, 4096)  # enough for a file, but not for the journal
        with pytest.raises(Refused, match="The journal cannot be written") as caught:
            server.call("jobs.start", id="second", params=request_of())
        assert caught.value.code == "storage"
        assert [job["id"] for job in server.call("jobs.list")["jobs"]] == ["first"]
        assert server.state("first")["state"] == "done"
        assert server.call("status")["problem"]["code"] == "storage"
        with pytest.raises(Refused, match="The adapter is removed, but the journal still names it") as caught:
            server.call("adapters.remove", name="mine")
        limit(server, resource.RLIM_INFINITY)
        server.call("jobs.start", id="second", params=request_of())
        assert server.call("status")["problem"] is None
        server.call("jobs.subscribe", id="second")
        numbers = [server.event("second")["number"] for _ in range(3)]
        assert numbers == [1, 2, 3]
    with Server(warm=True) as server:
        server.initialize(**settings)
        assert [job["id"] for job in server.call("jobs.list")["jobs"]] == ["second"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs prlimit")
def test_what_happens_while_the_disk_is_full_is_in_the_journal_afterwards(settings, request_of, short):
    with Server(warm=True) as server:
        server.initialize(**settings)
        server.start_job("first", params=request_of(recipe=short))
        server.event("first", lambda event: event["event"] == "step")
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        server.event("first", lambda event: event.get("state") == "done")
        last = server.call("jobs.get", id="first")["job"]["last_event"]
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        wait_until(lambda: server.call("status")["problem"] is None)
    with Server(warm=True) as server:
        server.initialize(**settings)
        job = server.call("jobs.get", id="first")["job"]
        assert (job["state"], job["last_event"]) == ("done", last)
        server.call("jobs.subscribe", id="first", since=last + 50)  # more than there is: all are sent
        assert [server.event("first")["number"] for _ in range(last)] == list(range(1, last + 1))


def test_the_journal_has_no_text_and_no_name_of_a_file_or_a_removed_adapter(
    server, settings, request_of, short, tmp_path
):
    """Canaries: in texts, in names of files and folders, in a question, in a prompt, in an answer."""
    canaries = {what: f"{what}{secrets.token_hex(6)}" for what in ("text", "file", "folder", "question", "prompt")}
    folder = tmp_path / canaries["folder"]
    folder.mkdir()
    for number in range(20):
        (folder / f"{canaries['file']}-{number}.md").write_text(f"{canaries['text']} the boat {number} is green. " * 4)
    (folder / f"{canaries['file']}.bin").write_bytes(bytes(200))
    request = request_of(paths=[str(folder)], texts=[canaries["text"] * 9], name="secretly", recipe=short)
    server.start_job("first", params=request)
    server.state("first")
    model = {key: request[key] for key in ("model", "device")}
    server.call("ask", question=f"Where is {canaries['question']}?", paths=[str(folder)], **model)
    answer = server.call("generate", prompt=canaries["prompt"], max_new_tokens=12, **model)["text"]

    def kept_bytes():
        files = (Path(settings["store"]) / "adapters").glob("serve.sqlite*")
        return b"".join(file.read_bytes() for file in files)

    kept = kept_bytes()
    assert b"texts_read" in kept and b"secretly" in kept
    assert not [what for what, canary in canaries.items() if canary.encode() in kept]
    assert len(answer) < 4 or answer.encode() not in kept
    server.call("adapters.rename", name="secretly", new_name="other")
    server.call("adapters.rename", name="other", new_name="secretly")
    server.call("adapters.remove", name="secretly")
    assert server.call("jobs.list") == {"jobs": []}
    server.call("shutdown")
    server.process.wait(SECONDS)
    database = sqlite3.connect(Path(settings["store"]) / "adapters" / "serve.sqlite")
    assert database.execute("SELECT count(*) FROM events").fetchone() == (0,)
    database.close()
    assert b"secretly" not in kept_bytes()
