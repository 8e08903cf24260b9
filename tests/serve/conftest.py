"""What a server of the tests may use, and a short training for it."""

import pytest
from builders import write_notes
from command import RECIPE
from served import Server, WarmServers


@pytest.fixture
def settings(tmp_path, model_folder):
    folders = [str(tmp_path), str(model_folder)]
    return {"store": str(tmp_path / "store"), "folders": folders, "low_priority": False}


@pytest.fixture
def server(settings):
    """A server of its own."""
    with Server(warm=True) as server:
        server.initialize(**settings)
        yield server


@pytest.fixture
def too_little(tmp_path, training):
    """A training that is refused once its texts are read: all of a job but its seconds."""
    (tmp_path / "little").mkdir()
    (tmp_path / "little" / "a.md").write_text("The ferry.")
    return training | {"paths": [str(tmp_path / "little")]}


@pytest.fixture
def training(tmp_path, notes_folder, model_folder):
    (tmp_path / "test.toml").write_text(RECIPE)
    recipe = str(tmp_path / "test.toml")
    return {"paths": [str(notes_folder)], "model": str(model_folder), "recipe": recipe, "device": "cpu"}


@pytest.fixture
def warm_servers():
    """Servers for clients that start their own, and train or answer."""
    with WarmServers() as servers:
        yield servers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with notes and a recipe."""
    folder = tmp_path_factory.mktemp("served")
    write_notes(folder / "notes")
    (folder / "test.toml").write_text(RECIPE)
    (folder / "short.toml").write_text(RECIPE + "refit = false\n")
    return folder


@pytest.fixture
def request_of(folder, model_folder):
    """A function that returns the parameters of a training."""

    def make(**changes):
        common = {"paths": [str(folder / "notes")], "model": str(model_folder), "recipe": str(folder / "test.toml")}
        return common | {"device": "cpu", "name": "mine"} | changes

    return make


@pytest.fixture
def short(folder):
    """The recipe of a training that is over soon."""
    return str(folder / "short.toml")
