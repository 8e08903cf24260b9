"""A GGUF file is a base model like any other: adapted, saved, recognised, listed, in 16 and in 4 bits."""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from builders import load_base, make_llama
from command import assert_one_sentence, records, run
from gguf_files import Kind, write_gguf
from load_memory import peak_of_loading

from sebp_edge import Personalizer, Recipe
from sebp_edge.basics.files import read_checked_json, write_checked_json
from sebp_edge.errors import BaseModelMismatch
from sebp_edge.events import Notice

pytestmark = pytest.mark.usefixtures("unassessed")


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory, tokenizer):
    model = make_llama(hidden_size=64, intermediate_size=128, head_dim=16, num_hidden_layers=1)
    return write_gguf(
        tmp_path_factory.mktemp("gguf") / "small.gguf", model, tokenizer, Kind.Q8_0, general__license="apache-2.0"
    )


@pytest.fixture
def in_ollama(gguf_file, tmp_path, monkeypatch):
    """Puts the file where Ollama would, as the model "small:1m"."""
    # Not the file's, so that it shows where a digest comes from.
    folder, digest = tmp_path / "ollama", hashlib.sha256(b"made up").hexdigest()
    (folder / "blobs").mkdir(parents=True)
    os.link(gguf_file, folder / "blobs" / f"sha256-{digest}")
    manifest = folder / "manifests/registry.ollama.ai/library/small/1m"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(
        json.dumps({"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"}]})
    )
    monkeypatch.setenv("OLLAMA_MODELS", str(folder))
    return digest


@pytest.mark.slow
def test_an_adaptation_from_a_file_is_used_with_that_file(gguf_file, notes_folder, recipe, tmp_path):
    file = shutil.copy(gguf_file, tmp_path)
    done = run("adapt", notes_folder, "--model", file, "--recipe", recipe)
    assert done.exit_code == 0, done.stderr
    text = run("generate", "the ferry", "--name", "default", "--max-tokens", "5")
    assert text.exit_code == 0, text.stderr
    moved = Path(file).rename(tmp_path / "moved.gguf")
    assert_one_sentence(
        run("generate", "the ferry", "--name", "default"), "a file 'small.gguf', which is no longer at .*small.gguf'"
    )
    with moved.open("ab") as changed:
        changed.write(b"more")
    assert_one_sentence(run("generate", "the ferry", "--name", "default", "--model", moved), "was made for small.gguf")


@pytest.mark.slow
def test_an_adapter_of_ollamas_model_finds_its_base_model(in_ollama, notes_folder, recipe):
    done = run("adapt", notes_folder, "--model", "ollama:small:1m", "--recipe", recipe)
    assert done.exit_code == 0, done.stderr
    text = run("generate", "the ferry", "--name", "default", "--max-tokens", "5")
    assert text.exit_code == 0, text.stderr


@pytest.mark.slow
def test_an_adapter_is_refused_by_another_file(gguf_file, notes_folder, tokenizer, tmp_path, recipe):
    options = {"recipe": Recipe.load(recipe), "device": "cpu", "store": tmp_path / "store"}
    Personalizer(gguf_file, **options).adapt(notes_folder, activate_anyway=True)
    other = write_gguf(
        tmp_path / "other.gguf",
        make_llama(hidden_size=64, intermediate_size=128, head_dim=16, num_hidden_layers=1),
        tokenizer,
    )
    with pytest.raises(BaseModelMismatch):
        Personalizer(other, **options).generate("the", adapter="default")


def test_a_file_is_hashed_once_and_again_after_a_change(gguf_file, tmp_path, own_home):
    path = tmp_path / "copy.gguf"
    path.write_bytes(gguf_file.read_bytes())
    first = load_base(path).fingerprint
    assert first == hashlib.sha256(path.read_bytes()).hexdigest()[:32]
    # Another hash shows that the file is not read again.
    (kept,) = (own_home / "cache" / "sebp-edge").glob("gguf-*.json")
    write_checked_json(kept, read_checked_json(kept) | {"gguf": "0" * 64})
    assert load_base(path).fingerprint == "0" * 32
    path.write_bytes(path.read_bytes() + bytes(32))
    assert load_base(path).fingerprint == hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def test_a_damaged_hash_is_replaced(gguf_file, own_home):
    first = load_base(gguf_file).fingerprint
    (file,) = (own_home / "cache" / "sebp-edge").glob("gguf-*.json")
    for damage in ("", "[]", '{"x": 3}'):
        file.write_text(damage)
        assert load_base(gguf_file).fingerprint == first


def test_ollamas_files_are_not_hashed(in_ollama):
    base = load_base("ollama:small:1m")
    assert base.fingerprint == in_ollama[:32]


def test_a_base_in_4_bits_differs_from_the_file_and_says_so(gguf_file):
    events = []
    personalizer = Personalizer(gguf_file, recipe=Recipe.load("notes").replace(load_in_4bit=True), device="cpu")
    base = personalizer.in_use.load(events.append)
    assert base.in_4bit
    assert base.fingerprint == load_base(gguf_file).fingerprint
    (notice,) = [event.message for event in events if isinstance(event, Notice)]
    assert "rounded to NF4" in notice
    exact = load_base(gguf_file)
    weight, original = (model.model.model.layers[0].mlp.up_proj.weight for model in (base, exact))
    from bitsandbytes.functional import dequantize_4bit

    difference = (dequantize_4bit(weight.data, weight.quant_state) - original).norm() / original.norm()
    assert 0.01 < difference < 0.15


def test_models_lists_files_in_given_folders_with_licence_and_size(gguf_file, in_ollama, tmp_path):
    (gguf_file.parent / "bad.gguf").write_bytes(b"GGUF")
    try:
        done = run("models", gguf_file.parent, "--json")
    finally:
        (gguf_file.parent / "bad.gguf").unlink()
    found = {record["name"]: record for record in records(done.stdout)}
    small = found[str(gguf_file)]
    assert small["licence"] == "apache-2.0" and small["size"] == gguf_file.stat().st_size and small["fits"]
    assert small["parameters"] == pytest.approx(0.0, abs=0.001)
    assert found["ollama:small:1m"]["fits"]
    assert "not a usable GGUF file" in found[str(gguf_file.parent / "bad.gguf")]["problem"]
    assert_one_sentence(run("models", tmp_path / "missing"), "There is no folder")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc elsewhere")
@pytest.mark.parametrize(
    ("precision", "num_layers", "sizes", "bound"),
    [
        ("full", 12, {"hidden_size": 768, "intermediate_size": 2048}, 1.3),
        # Here the largest weight in fp32, several times, and the modules are a large share.
        ("4 bits", 32, {"hidden_size": 512, "intermediate_size": 1024}, 1.6),
    ],
)
def test_loading_takes_little_more_memory_than_the_weights(tokenizer, tmp_path, precision, num_layers, sizes, bound):
    model = make_llama(num_attention_heads=8, num_hidden_layers=1, **sizes)
    # The same layer many times, since drawing random weights takes long.
    model.model.layers.extend(list(model.model.layers) * (num_layers - 1))
    model.config.num_hidden_layers = num_layers
    path = write_gguf(tmp_path / "large.gguf", model, tokenizer, Kind.Q8_0)
    assert 0.9 < peak_of_loading(path, precision) < bound


def test_models_describes_folders_that_hold_no_usable_model(model_folder, tmp_path):
    shutil.copy(model_folder / "config.json", tmp_path)
    for name, target in (("a.safetensors", "a.safetensors"), ("b.safetensors", "missing")):
        (tmp_path / name).symlink_to(target)
    odd = tmp_path / "odd"
    (odd / "config.json").mkdir(parents=True)
    (odd / "model.safetensors").touch()
    done = run("models", tmp_path, "--json")
    assert done.exit_code == 0
    found = {record["name"]: record for record in records(done.stdout)}
    assert found[str(tmp_path)]["size"] == 0
    assert "contains no model" in found[str(odd)]["problem"]
