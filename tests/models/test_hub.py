"""The Hub and its cache, over real HTTP with a small Hub on this machine, in separate processes.

huggingface_hub reads its environment when it is imported, so each environment needs a process.
"""

import json
import os
import socket
import subprocess
import sys

import pytest

LOOK_UP = """
import json, sys, time
from sebp_edge.errors import SebpEdgeError
from sebp_edge.engine.models import hub, hub_cache
from sebp_edge.engine.models.catalog import resolve
for name in sys.argv[1:]:
    try:
        found, begin = {}, time.perf_counter()
        found = {"cached": str(hub_cache.cached_folder(resolve(name).location))}
        found["config"] = str(hub.config_folder(resolve(name)))
        found["model"] = str(hub.model_folder(resolve(name)))
    except SebpEdgeError as error:
        found |= {"error": type(error).__name__, "message": str(error)}
    print(json.dumps(found | {"seconds": time.perf_counter() - begin}))
assert "torch" not in sys.modules
"""


@pytest.fixture
def closed_port():
    """A port at which nobody listens, and which nobody else can take."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def run(script, *names, home, **environment):
    own = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    own |= {"HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "TRANSFORMERS_VERBOSITY": "error"} | environment
    done = subprocess.run([sys.executable, "-c", script, *names], env=own, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def look_up(*names, home, **environment):
    return [json.loads(line) for line in run(LOOK_UP, *names, home=home, **environment)]


def sharded(files):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    shards = dict.fromkeys(index["weight_map"].values(), b"")
    others = {name: data for name, data in files.items() if name != "model.safetensors"}
    return others | shards | {"model.safetensors.index.json": json.dumps(index).encode()}


@pytest.mark.slow
def test_an_incomplete_cache_is_not_used(small_hub, put_into_cache, tmp_path):
    whole, missing_shard = sharded(small_hub.files), sharded(small_hub.files)
    del missing_shard["model-00002-of-00002.safetensors"]
    cached = {
        "org/whole": small_hub.files,
        "org/shards": whole,
        "org/missing-shard": missing_shard,
        "org/config-only": {"config.json": small_hub.files["config.json"]},
        "org/no-tokenizer": {name: data for name, data in small_hub.files.items() if "token" not in name},
        "org/damaged-index": whole | {"model.safetensors.index.json": b"{"},
    }
    snapshots = {name: put_into_cache(tmp_path, name, files) for name, files in cached.items()}
    (snapshots["org/whole"] / "model.safetensors").with_suffix(".incomplete").touch()
    found = dict(zip(cached, look_up(*cached, home=tmp_path, HF_HUB_OFFLINE="1"), strict=True))
    for name in ("org/whole", "org/shards"):
        assert set(found[name].values()) >= {str(snapshots[name])}
        assert "error" not in found[name]
    for name in cached.keys() - {"org/whole", "org/shards"}:
        assert found[name]["cached"] == "None"
        assert found[name]["error"] == "ModelOfflineError"
        assert "HF_HUB_OFFLINE is set" in found[name]["message"]


@pytest.mark.slow
def test_an_uncached_model_is_downloaded_once_with_the_token(small_hub, tmp_path):
    small_hub.files |= {"pytorch_model.bin": b"a pickle", "README.md": b"", "consolidated.safetensors": b""}
    options = {"home": tmp_path, "HF_ENDPOINT": small_hub.address, "HF_TOKEN": "hf_secret"}
    (first,) = look_up("org/model", **options)
    assert first["cached"] == "None"
    requested = [path for path in small_hub.requests if "/resolve/" in path]
    assert not [path for path in requested if path.endswith((".bin", ".md")) or "consolidated" in path]
    assert small_hub.tokens == {"Bearer hf_secret"}
    small_hub.requests.clear()
    (again,) = look_up("org/model", **options)
    assert again["cached"] == again["model"] == first["model"]
    assert small_hub.requests == []


@pytest.mark.slow
def test_each_failure_of_the_hub_is_one_sentence_with_a_remedy(small_hub, tmp_path):
    expected = {
        "org/gated": ("ModelAccessError", "accept its licence at huggingface.co/org/gated"),
        "org/waiting": ("ModelAccessError", "set HF_TOKEN"),
        "org/nothing": ("ModelAccessError", "The Hub has no model 'org/nothing'"),
        "org/forbidden": ("ModelAccessError", "HTTP 403"),
        "org/bad-token": ("ModelAccessError", "correct HF_TOKEN"),
        "org/down": ("ModelOfflineError", "HTTP 502"),
        "org/dropped": ("ModelOfflineError", "check the network"),
        "org/no-config": ("ModelError", "no config.json"),
    }
    found = look_up(*expected, home=tmp_path, HF_ENDPOINT=small_hub.address, HF_TOKEN="hf_secret")
    for (name, (kind, words)), result in zip(expected.items(), found, strict=True):
        assert result["error"] == kind, result
        assert words in result["message"]
        assert name in result["message"]
        assert "\n" not in result["message"]


@pytest.mark.slow
def test_a_gated_catalog_model_suggests_its_open_alternative(tmp_path, small_hub):
    small_hub.RequestHandlerClass = type(
        "Gated", (small_hub.RequestHandlerClass,), {"do_HEAD": lambda self: self._gate()}
    )
    small_hub.RequestHandlerClass._gate = lambda self: self._refuse(401, "GatedRepo", "restricted")
    (found,) = look_up("llama-3.2-3b", home=tmp_path, HF_ENDPOINT=small_hub.address)
    assert found["message"] == (
        "meta-llama/Llama-3.2-3B is gated: accept its licence at huggingface.co/meta-llama/Llama-3.2-3B, then run "
        "'hf auth login' or set HF_TOKEN, or use the open model 'qwen3-4b'."
    )


@pytest.mark.slow
def test_weights_in_formats_other_than_safetensors_are_refused(small_hub, tmp_path):
    small_hub.files["pytorch_model.bin"] = small_hub.files.pop("model.safetensors")
    (found,) = look_up("org/model", home=tmp_path, HF_ENDPOINT=small_hub.address)
    assert (found["error"], "safetensors" in found["message"]) == ("ModelError", True)


@pytest.mark.slow
def test_a_missing_network_is_reported_in_one_sentence(closed_port, tmp_path):
    # The first one imports what the second one takes no time for.
    _, found = look_up("org/first", "org/model", home=tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{closed_port}")
    assert found["error"] == "ModelOfflineError"
    assert found["seconds"] < 5
    assert "the Hub cannot be reached (ConnectError); check the network" in found["message"]


@pytest.mark.slow
def test_a_mistake_is_not_taken_for_a_missing_network(small_hub, tmp_path):
    script = (
        "from sebp_edge.engine.models import catalog, hub; hub._contact(catalog.resolve('org/model'), lambda: None)"
    )
    with pytest.raises(AssertionError, match=r"TypeError: .*positional argument"):
        run(script, home=tmp_path, HF_ENDPOINT=small_hub.address)
