"""A model is downloaded by a job, with its progress, which can be cancelled; from a Hub on this machine."""

import pytest
from served import Refused, Server, environment, refused
from small_hub import open_hub

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hub(model_folder):
    with open_hub(model_folder) as hub:
        hub.files["model.safetensors"] = bytes(30_000_000)  # more than huggingface_hub reads at once
        yield hub


@pytest.fixture(scope="module")
def server(tmp_path_factory, hub):
    """A server that is cold, since huggingface_hub reads its environment when it is imported."""
    folder = tmp_path_factory.mktemp("hub")
    own = {"HF_ENDPOINT": hub.address, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    with Server(env=environment(**own)) as server:
        server.initialize(store=str(folder / "store"))
        yield server


def has_begun(event):
    return event["event"] == "preparing" and 4 * event["done"] > event["total"]


def test_a_download_tells_its_progress_answers_meanwhile_and_is_cancelled_and_gone_on_with(server, hub):
    hub.is_slow.set()
    server.start_job("first", kind="download", params={"model": "org/model"})
    event = server.event("first", has_begun)
    assert (event["event"]["stage"], event["phase"]) == ("downloading", "downloading")
    assert event["event"]["done"] <= event["event"]["total"] == sum(map(len, hub.files.values()))
    prompt = {"model": "tiny", "device": "cpu", "prompt": "the", "sampling_seed": 1}
    assert server.call("generate", **prompt, max_new_tokens=2)["new_tokens"] == 2
    with pytest.raises(Refused, match="to cancel a download"):
        long = server.send("generate", **prompt, max_new_tokens=10**5)
        server.call("jobs.cancel", expected_job_id="first")
        server.answer(long)
    ended = server.state("first")
    assert (ended["state"], ended["error"]["code"], ended["resumable"]) == ("interrupted", "cancelled", False)
    assert server.call("status")["worker"] is None  # nothing is downloaded any more
    hub.is_slow.clear()
    server.start_job("second", kind="download", params={"model": "org/model"})
    done = server.state("second")
    assert done["state"] == "done" and done["result"]["model"] == "org/model"
    assert server.call("jobs.get", id="second")["job"]["progress"] == 1
    assert "org/model" in server.call("models")["local"]


def test_what_cannot_be_downloaded_is_refused_with_what_to_do(server, hub):
    for model, code in (("org/nothing", "model_access"), ("org/down", "model_offline"), ("no such model", "model")):
        server.start_job(f"job-{code}", kind="download", params={"model": model})
        ended = server.state(f"job-{code}")
        assert (ended["state"], ended["error"]["code"]) == ("refused", code), (model, ended)
    for model, code in (("/etc", "folder_not_allowed"), (5, "invalid_params")):
        assert refused(server, "jobs.start", id="a", kind="download", params={"model": model}).code == code
    server.start_job("tiny", kind="download", params={"model": "tiny"})
    assert server.state("tiny")["state"] == "done" and hub.requests
