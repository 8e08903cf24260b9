"""Jobs of `sebp-edge serve` with a real worker: events, answers between steps, cancel, pause, replay."""

import json
import random
from pathlib import Path

import psutil
import pytest
import torch
from builders import write_notes
from command import RECIPE
from jsonschema import Draft202012Validator
from served import ENDED, Refused, Server, all_gone, environment, refused, wait_until

from sebp_edge import AdapterStore, Personalizer, Recipe

pytest.importorskip("resource", reason="needs a Unix")
pytestmark = pytest.mark.slow
SCHEMA = Path(__file__).parents[2] / "sebp_edge" / "basics" / "schema.json"


@pytest.fixture(scope="module")
def shared(folder, model_folder):
    """A server for several tests, whose worker stays warm."""
    with Server(warm=True, env=environment(XDG_CACHE_HOME=str(folder / "cache"))) as server:
        server.initialize(store=str(folder / "store"), folders=["/"])
        yield server


@pytest.fixture
def settings(tmp_path):
    return {"store": str(tmp_path / "store"), "folders": ["/"], "low_priority": False}


def adapter_file(store, name, version):
    return (AdapterStore(store).adapter(name).version_folder(version) / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(folder, model_folder):
    """The weights of the training of `request_of`, made here."""
    recipe, store = Recipe.load(folder / "test.toml"), folder / "own"
    own = Personalizer(model_folder, recipe=recipe, device="cpu", store=store)
    own.adapt(folder / "notes", name="mine", activate_anyway=True)
    return adapter_file(store, "mine", 1)


def test_a_job_tells_numbered_events_and_ends_with_its_result(shared, request_of, short):
    request = {"id": "first", "params": request_of(name="first", recipe=short)}
    started = shared.call("jobs.start", **request)["job"]
    assert started["state"] in ("queued", "starting")
    assert shared.call("jobs.start", **request)["job"]["id"] == "first"
    with pytest.raises(Refused, match="Another job has this id"):
        shared.call("jobs.start", **request | {"params": request_of(name="first", recipe=short, seed=1)})
    shared.call("jobs.subscribe", id="first")
    events, last = [], None
    while last is None or last["event"].get("state") not in ENDED:
        last = shared.event("first")
        events.append(last)
    assert last["event"]["state"] == "done", last
    assert [event["number"] for event in events] == list(range(1, len(events) + 1))
    states = [event["event"]["state"] for event in events if event["event"]["event"] == "state"]
    assert states == ["queued", "starting", "running", "done"]
    shares = [event["progress"] for event in events]
    assert shares == sorted(shares)
    assert all(event["event"]["job"] == "first" and event["event"]["v"] == 1 for event in events)
    assert {"step", "evaluated", "saved", "progress"} <= {event["event"]["event"] for event in events}
    assert (shares[0], shares[-1]) == (0, 1)
    definitions = json.loads(SCHEMA.read_text(encoding="utf-8"))["$defs"]
    for event in events:
        for name, values in (("JobEvent", event), (event["event"]["event"], event["event"])):
            Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": definitions}).validate(values)
    result = last["event"]["result"]
    assert (result["name"], result["version"]) == ("first", 1)
    assert shared.call("jobs.get", id="first")["job"]["result"] == result
    listed = {"name": "first", "versions": [1], "active": 1 if result["active"] else None}
    listed["base_model"] = "micro-llama"
    assert listed in shared.call("adapters.list")["adapters"]
    # An app that comes back sees the rest.
    seen = random.randrange(len(events))
    shared.call("jobs.subscribe", id="first", since=seen)
    assert [shared.event("first")["number"] for _ in events[seen:]] == list(range(seen + 1, len(events) + 1))


def test_health_tells_what_is_loaded_during_a_training_and_after_it(server, training):
    with server.held("first", "step", params=training):
        health = server.call("health")
        assert health["device"] == "cpu" and health["free_memory"] > 10**6
        loaded = health["loaded"]
        assert (loaded["model"], loaded["device"], loaded["dtype"]) == ("micro-llama", "cpu", "float32")
        server.call("jobs.cancel", expected_job_id="first")
    server.state("first")
    prompt = {"model": training["model"], "device": "cpu", "prompt": "the", "max_new_tokens": 1}
    server.call("generate", **prompt)
    again = server.call("health")["loaded"]
    assert again == loaded | {"size": again["size"]} and 0 < again["size"] <= loaded["size"]  # without an adapter
    worker = psutil.Process(server.worker())
    assert server.call("unload") == {}
    assert all_gone([worker]) and server.worker() is None
    assert server.call("health")["loaded"] is None


def test_what_was_forgotten_is_verified_by_a_job_that_is_not_kept(server, settings, request_of, short, folder):
    def ended(id, kind, **params):
        server.start_job(id, kind=kind, params=params)
        return server.state(id)

    request = request_of(recipe=short, activate_anyway=True)
    assert ended("learn", "adapt", **request)["state"] == "done"
    chosen = {key: request[key] for key in ("model", "recipe", "name")}
    nothing = ended("early", "verify", **chosen)
    assert (nothing["state"], nothing["error"]["code"]) == ("refused", "adapter")  # there is no receipt
    forgotten = ended(
        "forget", "forget", **chosen, device="cpu", documents=[f"{folder}/notes/note-00.md"], activate_anyway=True
    )
    assert forgotten["state"] == "done", forgotten["error"]
    verified = ended("verify", "verify", **chosen)
    assert verified["state"] == "done", verified
    assert verified["result"]["verified"] and verified["result"]["weights"] == forgotten["result"]["weights"]
    job = server.call("jobs.get", id="verify")["job"]
    assert (job["kind"], job["name"], job["stored"], job["resumable"]) == ("verify", "mine", None, False)
    assert AdapterStore(settings["store"]).adapter("mine").versions() == [2]
    assert ended("nobody", "verify", **chosen | {"name": "nobody"})["error"]["code"] == "adapter"


def test_a_job_that_is_over_is_removed_and_one_that_runs_is_not(server, settings, training, too_little):
    server.start_job("little", params=too_little)
    ended = server.state("little")
    assert (ended["state"], ended["error"]["code"]) == ("refused", "texts") and server.worker() is not None
    with server.held("long", "step", params=training):
        assert server.call("jobs.unsubscribe", id="long") == server.call("jobs.unsubscribe", id="none") == {}
        assert refused(server, "jobs.remove", id="long").code == "wrong_state"
        assert server.call("jobs.remove", id="little") == {}
        assert refused(server, "jobs.remove", id="little").code == "unknown_job"
        assert [job["id"] for job in server.call("jobs.list")["jobs"]] == ["long"]
        server.call("jobs.pause", expected_job_id="long")
    wait_until(lambda: server.call("jobs.get", id="long")["job"]["state"] == "paused")
    assert server.call("jobs.remove", id="long") == {} and server.call("jobs.list") == {"jobs": []}
    assert not list(Path(settings["store"], "adapters", ".jobs").iterdir())


def test_a_training_answers_between_steps_and_stays_the_same_bit_for_bit(
    shared, request_of, folder, model_folder, whole
):
    """The answers are those of the active version, as they are without a training, too."""
    request = request_of(name="same", activate_anyway=True)
    shared.start_job("same-1", params=request)
    assert shared.state("same-1")["state"] == "done"
    chosen = {"model": str(model_folder), "device": "cpu", "adapter": "same"}
    methods = {
        "generate": chosen | {"prompt": "the", "sampling_seed": 3, "max_new_tokens": 6},
        "complete": chosen | {"before": "the ", "min_probability": 0.001},
        "ask": chosen | {"question": "What of the note?", "paths": [str(folder / "notes")]},
    }
    methods["generate, base"] = methods["generate"] | {"adapter": None}
    alone = {name: shared.call(name.split(",")[0], **params) for name, params in methods.items()}
    assert alone["generate"] != alone["generate, base"]
    with shared.held("same-2", "step", params=request | {"fresh": True}):
        assert {name: shared.call(name.split(",")[0], **params) for name, params in methods.items()} == alone
        assert shared.call("jobs.get", id="same-2")["job"]["state"] == "running"
    assert shared.state("same-2")["state"] == "done"
    assert [adapter_file(folder / "store", "same", version) for version in (1, 2)] == [whole, whole]


def test_what_a_training_cannot_share_is_busy(shared, request_of, model_folder, tmp_path):
    recipe = tmp_path / "full.toml"
    recipe.write_text('method = "full"\nlearning_rate = 1e-4\nepochs = 1\nbatch_tokens = 1024\n')
    with shared.held("full", "step", params=request_of(recipe=str(recipe), name="full")):
        for model in (str(model_folder), "tiny"):
            error = refused(shared, "generate", prompt="the", model=model, device="cpu")
            assert (error.code, error.error["data"]["retry"]) == ("busy", True)
        shared.call("jobs.cancel", expected_job_id="full")
    assert shared.state("full")["state"] == "interrupted"
    assert shared.call("generate", prompt="the", model=str(model_folder), device="cpu", max_new_tokens=2)


def test_jobs_wait_for_each_other_and_are_cancelled_wherever_they_are(shared, request_of):
    for number in range(2):
        shared.start_job(f"job-{number}", params=request_of(name=f"name-{number}"))
    shared.call("jobs.cancel", expected_job_id="job-1")  # it waits
    assert shared.state("job-1")["error"]["code"] == "cancelled"
    shared.call("jobs.cancel", expected_job_id="job-0")  # it begins
    with shared.held("job-2", random.choice(["texts_read", "step", "evaluated"]), params=request_of()):
        assert shared.state("job-0")["state"] == "interrupted"
        model = {key: request_of()[key] for key in ("model", "device")}
        answer = shared.send("generate", prompt="the", temperature=0, **model)
        shared.wait(lambda message: message.get("params", {}).get("request") == answer)
        shared.call("jobs.cancel", expected_job_id="job-2")
        assert shared.state("job-2")["state"] == "interrupted"
    try:
        assert "text" in shared.answer(answer)  # it ended before the job was cancelled
    except Refused as error:
        assert error.code == "busy"
    assert refused(shared, "jobs.pause", expected_job_id="job-1").code == "wrong_state"


def test_requests_are_cancelled_while_they_wait_and_while_they_are_answered(shared):
    number, waits = (
        shared.send("generate", prompt="the", device="cpu", max_new_tokens=1000, temperature=0) for _ in range(2)
    )
    text = shared.wait(lambda message: message.get("params", {}).get("request") == number)["params"]
    shared.call("cancel", request=waits)
    shared.call("cancel", request=number)
    with pytest.raises(Refused, match="The request was cancelled"):
        shared.answer(waits)
    with pytest.raises(Refused) as caught:
        shared.answer(number)
    assert caught.value.code == "cancelled"
    assert caught.value.error["data"]["text"].startswith(text["text"])
    assert shared.call("generate", prompt="the", device="cpu", sampling_seed=1, max_new_tokens=3)["text"]


def test_an_adapter_is_exported(shared, request_of, short, tmp_path):
    shared.call("jobs.start", id="made", params=request_of(name="made", recipe=short, activate_anyway=True))
    params = {key: value for key, value in request_of().items() if key in ("model", "device")}
    params |= {"name": "made", "to": str(tmp_path / "out"), "format": "peft"}
    shared.start_job("exported", kind="export", params=params)
    ended = shared.state("exported")
    assert ended["state"] == "done", ended
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_a_job_is_paused_its_memory_is_free_and_it_goes_on_bit_for_bit(shared, request_of, folder, model_folder):
    recipe = Recipe.load(folder / "test.toml")
    own = Personalizer(model_folder, recipe=recipe, device="cpu", store=folder / "own")
    own.adapt(folder / "notes", name="paused", activate_anyway=True)
    request = request_of(name="paused", activate_anyway=True)
    with shared.held("paused", "step", random.randrange(1, 6), params=request):
        worker = psutil.Process(shared.worker())
        shared.call("jobs.pause", expected_job_id="paused")
    ended = shared.state("paused")
    assert (ended["state"], ended["resumable"]) == ("paused", True), ended
    assert all_gone([worker])
    assert shared.worker() is None
    assert shared.call("jobs.resume", id="paused")["job"]["state"] == "queued"
    ended = shared.state("paused", ENDED)
    assert ended["state"] == "done", ended
    assert adapter_file(folder / "store", "paused", 1) == adapter_file(folder / "own", "paused", 1)


def test_a_model_that_is_new_here_is_read_once_by_the_worker_which_no_plan_wakes(settings, request_of):
    texts = {key: value for key, value in request_of().items() if key != "name"}
    with Server(warm=True) as server:
        server.initialize(**settings)
        with pytest.raises(Refused, match="a plan wakes no worker") as caught:
            server.call("plan", **texts)
        assert caught.value.code == "not_known" and "inspect" in caught.value.error["data"]["hint"]
        assert server.worker() is None
        first = server.call("inspect", **texts)["plan"]
        assert server.worker() is not None
        server.call("unload")
        again = server.call("plan", **texts)
        assert server.worker() is None
        assert {key: again[key] for key in ("recipe", "max_rows", "dtype")} == {
            key: first[key] for key in ("recipe", "max_rows", "dtype")
        }
        assert again["seconds"] > 0  # the machine's speed is known, too


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_answers_the_same_while_it_trains(server, request_of, tmp_path):
    """The training's steps are captured graphs; the answers are computed between two of them."""
    recipe = tmp_path / "short-steps.toml"
    recipe.write_text(RECIPE.replace("batch_tokens = 200", "batch_tokens = 70").replace("epochs = 1", "epochs = 5"))
    request = request_of(model="tiny", device="cuda", activate_anyway=True, recipe=str(recipe))
    server.start_job("first", params=request)
    assert server.state("first")["state"] == "done"
    asked = {"device": "cuda", "adapter": "mine", "prompt": "the boat", "temperature": 0, "max_new_tokens": 6}
    alone = server.call("generate", **asked)
    server.start_job("second", params=request | {"fresh": True})
    for _ in range(3):
        server.event("second", lambda event: event["event"] == "step")
        assert server.call("generate", **asked) == alone
    assert server.state("second")["state"] == "done"


def test_a_job_whose_texts_have_changed_is_refused_and_goes_on_as_asked(server, request_of, folder, tmp_path):
    notes = write_notes(tmp_path / "changing")
    with server.held("changed", "step", params=request_of(paths=[str(notes)], activate_anyway=True)):
        server.call("jobs.pause", expected_job_id="changed")
    assert server.state("changed", {"paused"})["resumable"]
    next(notes.iterdir()).write_text("Other words stand here now.")
    server.call("jobs.resume", id="changed")
    refused = server.state("changed", ENDED)
    assert (refused["state"], refused["error"]["code"], refused["resumable"]) == ("refused", "texts_changed", True)
    server.call("jobs.resume", id="changed", changed="without")
    assert server.state("changed", ENDED)["state"] == "done"
    assert not server.call("jobs.get", id="changed")["job"]["resumable"]
