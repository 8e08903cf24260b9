"""Resolution of model names: short names, folders, Hub ids, and names that are refused."""

import re
from pathlib import Path

import pytest

from sebp_edge.engine.models.catalog import CATALOG, DEFAULT_MODEL, bundled_config, resolve, resolve_config
from sebp_edge.engine.models.loading import model_from_config
from sebp_edge.errors import ModelError
from sebp_edge.values.model_reference import BUNDLED_FOLDER

HUB_IDS = {
    "falcon-h1-0.5b": "tiiuae/Falcon-H1-0.5B-Base",
    "falcon-h1-0.5b-instruct": "tiiuae/Falcon-H1-0.5B-Instruct",
    "gemma-4-e2b": "google/gemma-4-E2B",
    "gemma-4-e2b-instruct": "google/gemma-4-E2B-it",
    "gemma-4-e4b": "google/gemma-4-E4B",
    "gemma-4-e4b-instruct": "google/gemma-4-E4B-it",
    "granite-4.0-350m": "ibm-granite/granite-4.0-350m",
    "granite-4.0-h-350m": "ibm-granite/granite-4.0-h-350m",
    "granite-4.0-h-micro": "ibm-granite/granite-4.0-h-micro",
    "granite-4.0-micro": "ibm-granite/granite-4.0-micro",
    "lfm2-1.2b": "LiquidAI/LFM2-1.2B",
    "lfm2-350m": "LiquidAI/LFM2-350M",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
    "llama-3.2-1b-instruct": "meta-llama/Llama-3.2-1B-Instruct",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B",
    "llama-3.2-3b-instruct": "meta-llama/Llama-3.2-3B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3.5-0.8b": "Qwen/Qwen3.5-0.8B",
    "qwen3.5-2b": "Qwen/Qwen3.5-2B",
    "qwen3.5-4b": "Qwen/Qwen3.5-4B",
    "qwen3.5-9b": "Qwen/Qwen3.5-9B",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B",
    "smollm2-1.7b-instruct": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M",
    "smollm2-135m-instruct": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M",
    "smollm2-360m-instruct": "HuggingFaceTB/SmolLM2-360M-Instruct",
}


def test_the_default_is_the_bundled_model():
    reference = resolve(DEFAULT_MODEL)
    assert (reference.kind, reference.location) == ("bundled", str(BUNDLED_FOLDER))
    assert reference.public_name == "sebp-edge/tiny"


def test_the_catalog_has_the_bundled_model_and_known_hub_ids():
    assert {name: entry.repository for name, entry in CATALOG.items()} == {"tiny": None} | HUB_IDS


@pytest.mark.parametrize("name", HUB_IDS)
def test_a_short_name_resolves_to_its_hub_id_in_any_case(name):
    for spelling in (name, name.upper()):
        reference = resolve(spelling)
        assert (reference.name, reference.kind, reference.location) == (name, "hub", HUB_IDS[name])
        assert reference.public_name == HUB_IDS[name]


@pytest.mark.parametrize("name", [name for name in HUB_IDS if name.startswith("llama")])
def test_a_gated_model_has_an_open_alternative_of_about_its_size(name):
    alternative = CATALOG[resolve(name).open_alternative]
    assert alternative.open_alternative is None
    assert 0.5 < alternative.parameters / CATALOG[name].parameters < 2


@pytest.mark.parametrize(
    ("typed", "meant"), [("lama-3.2-3b", "llama-3.2-3b"), ("SmolLM-135M", "smollm2-135m"), ("qwen-4b", "qwen3-4b")]
)
def test_an_unknown_name_suggests_the_nearest_one(typed, meant):
    with pytest.raises(ModelError, match=re.escape(f"did you mean {meant!r}?")):
        resolve(typed)


def test_a_name_like_no_other_lists_them_all():
    with pytest.raises(ModelError, match=r"Unknown model 'zzz'; choose from tiny, .*llama-3\.2-3b-instruct"):
        resolve("zzz")


def test_a_folder_with_a_model_is_found_in_any_spelling(model_folder, monkeypatch):
    monkeypatch.chdir(model_folder.parent)
    monkeypatch.setenv("HOME", str(model_folder.parent))
    for spelling in (model_folder, str(model_folder), f"./{model_folder.name}", f"~/{model_folder.name}"):
        reference = resolve(spelling)
        assert (reference.name, reference.kind) == ("micro-llama", "local")
        assert reference.location == str(model_folder)
        assert reference.public_name == "micro-llama"


def test_a_path_is_a_folder_even_if_it_has_a_known_models_name(model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").symlink_to(model_folder)
    assert resolve("tiny").kind == "bundled"
    assert resolve(Path("tiny")).kind == "local"


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"contains no model; expected a config\.json"):
        resolve(tmp_path)


@pytest.mark.parametrize(
    "missing",
    [
        *("./nowhere", "/nowhere/model", "~/nowhere", "~nobody-of-that-name/model", "a/b/c", "c:\\models\\x"),
        *("models/", ".."),
    ],
)
def test_a_missing_folder_is_refused(missing, tmp_path, monkeypatch):
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    with pytest.raises(ModelError, match=r"There is no folder|contains no model"):
        resolve(missing)


@pytest.mark.parametrize("strange", ["", "x" * 5000, "x/" + "y" * 5000, "two words", "\0"])
def test_an_impossible_name_is_refused(strange, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError):
        resolve(strange)


def test_a_name_of_the_form_of_a_hub_id_is_a_hub_id():
    reference = resolve("someone/Some-Model_1.5")
    assert (reference.kind, reference.name, reference.location) == ("hub", *["someone/Some-Model_1.5"] * 2)
    assert reference.open_alternative is None


@pytest.mark.parametrize("name", [name for name in CATALOG if name != "tiny"])
def test_the_config_of_every_known_model_is_bundled_and_needs_no_network(name):
    model = model_from_config(resolve(name))
    assert round(model.num_parameters() / 1e9, 3) == CATALOG[name].parameters


def test_other_models_have_no_bundled_config(model_folder):
    assert all(bundled_config(resolve(name)) is None for name in ("tiny", "someone/some-model", model_folder))


def test_a_config_file_stands_for_a_model(tmp_path, model_folder):
    (tmp_path / "my-shape.json").write_text("{}")
    assert resolve_config(tmp_path / "my-shape.json").name == "my-shape"
    assert resolve_config(model_folder / "config.json").name == model_folder.name
    assert resolve_config(str(model_folder)) == resolve(model_folder)
    assert resolve_config("tiny") == resolve("tiny")


def test_an_invalid_path_is_a_model_error():
    for name in ("~nobody-of-that-name/config.json", "x" * 5000 + ".json"):
        with pytest.raises(ModelError):
            resolve_config(name)
