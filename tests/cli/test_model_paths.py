"""An adapter's model folder is found again, and its path is nowhere but in the store's own file."""

import json
import shutil
import stat
import tarfile

import pytest
from command import assert_one_sentence, run

from sebp_edge import AdapterStore

pytestmark = pytest.mark.usefixtures("unassessed")


@pytest.fixture
def model(model_folder, tmp_path):
    """A model folder of its own, which may be moved."""
    return shutil.copytree(model_folder, tmp_path / "of mine" / "micro-llama")


@pytest.fixture
def adapted(model, notes_folder, recipe):
    done = run("adapt", notes_folder, "--model", model, "--recipe", recipe)
    assert done.exit_code == 0, done.output
    return AdapterStore()


@pytest.fixture
def used(model, after_learning):
    """A store whose adapter was made elsewhere, and used with the model folder."""
    store = after_learning(AdapterStore())
    assert generate("--name", "default", "--model", model).exit_code == 0
    return store


def files_with(folder, text):
    return [path.name for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def generate(*arguments):
    return run("generate", "the ferry", "--max-tokens", 2, *arguments)


@pytest.mark.slow
def test_an_adapters_model_folder_is_found_again_until_it_is_moved_or_changed(adapted, model, tmp_path):
    assert generate().exit_code == 0
    done = run("export", "default", "--to", tmp_path / "new" / "out", "--format", "peft")
    assert done.exit_code == 0, done.output
    assert files_with(adapted.folder, str(model.parent)) == [".models"]
    assert stat.S_IMODE((adapted.folder / ".models").stat().st_mode) == 0o600

    moved = model.rename(tmp_path / "moved")
    for command in (["generate", "a"], ["export", "default", "--to", tmp_path / "other"]):
        assert_one_sentence(run(*command), f"'micro-llama', which is no longer at '{model}'; give the adapter's name")
    assert generate("--name", "default", "--model", moved).exit_code == 0
    assert generate().exit_code == 0  # where it was found last

    (moved / "config.json").unlink()
    assert_one_sentence(generate(), "which is no longer at '.*moved'; give the adapter's name")
    (adapted.folder / ".models").write_text("[damaged")
    assert_one_sentence(generate(), "a folder 'micro-llama'; give that folder with --model")


def test_a_changed_model_folder_is_one_sentence(used, model):
    from safetensors.torch import load_file, save_file

    weights = {name: weight + 1 for name, weight in load_file(model / "model.safetensors").items()}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert_one_sentence(generate(), "The adapter was made for other weights of micro-llama; adapt again")


def test_an_archive_has_no_path_and_removing_forgets_it(used, model, model_folder, tmp_path):
    used.adapter("default").export_archive(tmp_path / "given-away.tar", with_names=True)
    with tarfile.open(tmp_path / "given-away.tar") as archive:
        assert not any("models" in name for name in archive.getnames())
    archive = (tmp_path / "given-away.tar").read_bytes()
    assert not [path for path in (model, model_folder) if str(path).encode() in archive]

    again = used.import_archive(tmp_path / "given-away.tar", "again")
    assert generate("--name", "again", "--version", again.version).exit_code == 0
    used.adapter("default").remove()
    assert used.model_path(again.record) == model  # for the other adapter of this model
    used.adapter("again").remove()
    assert json.loads((used.folder / ".models").read_text()) == {}
    assert files_with(used.folder, str(model.parent)) == []


@pytest.mark.slow
def test_an_adapter_saved_to_a_new_folder_is_used_without_naming_its_model(model, notes_folder, recipe, tmp_path):
    command = ["adapt", notes_folder, "--model", model, "--recipe", recipe, "--out", tmp_path / "out"]
    done = run(*command)
    assert done.exit_code == 0, done.output
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert {"adapter_model.safetensors", "adapter_config.json", "README.md"} <= {path.name for path in before}
    assert AdapterStore().names() == []
    assert_one_sentence(run(*command), "already exists; choose a new folder", exit_code=2)
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before
    assert files_with(tmp_path / "out", str(model.parent)) == []
    assert generate("--adapter", f"{tmp_path}/out").exit_code == 0
