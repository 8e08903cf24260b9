"""Resolution of model names: short names, folders, Hub ids, and names that are refused."""

import re
from pathlib import Path

import pytest

from sebp_edge.engine.models.catalog import CATALOG, DEFAULT_MODEL, bundled_config, resolve
from sebp_edge.engine.models.loading import model_from_config
from sebp_edge.errors import ModelError
from sebp_edge.values.model_reference import BUNDLED_FOLDER


def test_the_default_is_the_bundled_model():
    reference = resolve(DEFAULT_MODEL)
    assert (reference.kind, reference.location) == ("bundled", str(BUNDLED_FOLDER))
    assert reference.public_name == "sebp-edge/tiny"


HUB_IDS = {name: entry.repository for name, entry in CATALOG.items() if name != DEFAULT_MODEL}


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


@pytest.mark.parametrize("name", HUB_IDS)
def test_the_config_of_every_known_model_is_bundled_and_needs_no_network(name):
    model = model_from_config(resolve(name))
    assert round(model.num_parameters() / 1e9, 3) == CATALOG[name].parameters


def test_other_models_have_no_bundled_config(model_folder):
    assert all(bundled_config(resolve(name)) is None for name in ("tiny", "someone/some-model", model_folder))
