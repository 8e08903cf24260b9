"""The models of Ollama and LM Studio are found by name, and refused with one sentence if they cannot be used."""

import json

import pytest
from command import records, run

from sebp_edge import Personalizer
from sebp_edge.errors import ModelError

DIGEST = "0123456789abcdef" * 4
MODEL = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{DIGEST}", "size": 3}


def resolve(name):
    """The reference of a model by its name."""
    return Personalizer(name, device="cpu").reference


def listed() -> list[str]:
    """The names of the models of other programs that `sebp-edge models` lists."""
    found = records(run("models", "--json").stdout)
    return [record["name"] for record in found if record["name"].startswith(("ollama:", "lmstudio:"))]


def layer(kind):
    return {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{'f' * 64}", "size": 1}


@pytest.fixture
def ollama(tmp_path, monkeypatch):
    """A function that adds a model to Ollama's folder."""
    folder = tmp_path / "ollama"
    monkeypatch.setenv("OLLAMA_MODELS", str(folder))
    monkeypatch.setenv("HOME", str(tmp_path))
    (folder / "blobs").mkdir(parents=True)
    (folder / "blobs" / f"sha256-{DIGEST}").write_bytes(b"abc")

    def add(path, manifest):
        path = folder / "manifests" / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(manifest if isinstance(manifest, str) else json.dumps(manifest))
        return folder / "blobs" / f"sha256-{DIGEST}"

    return add


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("registry.ollama.ai/library/llama3.2/latest", ["llama3.2", "llama3.2:latest"]),
        ("registry.ollama.ai/library/llama3.2/3b", ["llama3.2:3b", "library/llama3.2:3b"]),
        ("registry.ollama.ai/someone/my_model/Q8_0", ["someone/my_model:Q8_0"]),
        ("hf.co/org/Model-GGUF/Q4_K_M", ["hf.co/org/Model-GGUF:Q4_K_M"]),
    ],
)
def test_ollamas_models_are_found_by_their_names(path, names, ollama):
    blob = ollama(path, {"layers": [MODEL, layer("template"), layer("license")]})
    for name in names:
        reference = resolve(f"ollama:{name}")
        assert (reference.kind, reference.location) == ("installed", str(blob))
        assert reference.public_name == f"ollama:{name}"
    (name,) = listed()
    assert resolve(name).location == str(blob)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ({"layers": [MODEL, layer("adapter")]}, "has an adapter"),
        ({"layers": [MODEL, layer("projector")]}, "has vision layers"),
        ({"layers": [layer("template")]}, "not stored as one GGUF file"),
        ({"layers": [layer("tensor")] * 3}, "not stored as one GGUF file"),
        ({"layers": [MODEL, MODEL]}, "not stored as one GGUF file"),
        ({"layers": [layer("model")]}, "file of 'ollama:x' is missing"),
        ({"layers": [{**MODEL, "digest": "../../etc/passwd"}]}, "not stored as one GGUF file"),
        ({"layers": 3}, "manifest of 'ollama:x' is damaged"),
        ({"layers": [{"mediaType": 3, "digest": "x"}]}, "manifest of 'ollama:x' is damaged"),
        ({}, "manifest of 'ollama:x' is damaged"),
        ("{", "manifest of 'ollama:x' is damaged"),
        ("[" * 9999, "manifest of 'ollama:x' is damaged"),
    ],
)
def test_models_of_ollama_that_cannot_be_used_are_refused_and_not_listed(manifest, message, ollama):
    ollama("registry.ollama.ai/library/x/latest", manifest)
    with pytest.raises(ModelError, match=message):
        resolve("ollama:x")
    assert listed() == []


def test_missing_models_of_ollama_are_refused_with_those_that_are_there(ollama):
    with pytest.raises(ModelError, match=r"no model 'ollama:y' on this machine; it has none"):
        resolve("ollama:y")
    ollama("registry.ollama.ai/library/x/7b", {"layers": [MODEL]})
    with pytest.raises(ModelError, match=r"no model 'ollama:x' on this machine; choose from ollama:x:7b\."):
        resolve("ollama:x")


@pytest.mark.parametrize("name", ["", "..", "../x", "a/../b", "x:..", "x:y:z", "/etc/passwd", "a\\b", "x\n", "\0"])
def test_names_that_leave_ollamas_folder_are_refused(name, ollama):
    with pytest.raises(ModelError, match="is no name of an Ollama model"):
        resolve(f"ollama:{name}")


@pytest.fixture
def lm_studio(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    folder = tmp_path / ".lmstudio" / "models"
    for name in ("org/A-GGUF/a-Q4_K_M", "org/B-GGUF/b-Q8_0", "org/B-GGUF/b-Q4_0", "org/B-GGUF/mmproj-b"):
        path = folder / f"{name}.gguf"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder


def test_lm_studios_models_are_found_by_their_names(lm_studio):
    for name in ("a-Q4_K_M", "A-GGUF", "a-gguf/a-q4_k_m", "org/A-GGUF", "org/A-GGUF/a-Q4_K_M.gguf"):
        assert resolve(f"lmstudio:{name}").location == str(lm_studio / "org/A-GGUF/a-Q4_K_M.gguf")
    assert listed() == ["lmstudio:org/A-GGUF/a-Q4_K_M", "lmstudio:org/B-GGUF/b-Q4_0", "lmstudio:org/B-GGUF/b-Q8_0"]


def test_unknown_and_ambiguous_models_of_lm_studio_are_refused(lm_studio):
    with pytest.raises(ModelError, match=r"several models 'lmstudio:B-GGUF' .* choose from lmstudio:org/B-GGUF/b-Q4_0"):
        resolve("lmstudio:B-GGUF")
    with pytest.raises(ModelError, match=r"no model 'lmstudio:c' on this machine; choose from lmstudio:org/A-GGUF"):
        resolve("lmstudio:c")


def test_lm_studios_folder_can_be_elsewhere(lm_studio, tmp_path):
    lm_studio.parent.rename(tmp_path / "elsewhere")
    (tmp_path / ".lmstudio-home-pointer").write_text(str(tmp_path / "elsewhere") + "\n")
    assert resolve("lmstudio:A-GGUF").location == str(tmp_path / "elsewhere/models/org/A-GGUF/a-Q4_K_M.gguf")
