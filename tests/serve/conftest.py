"""What a server of the tests may use, and a short training for it."""

import pytest
from command import LONGER
from served import WarmServers


@pytest.fixture
def settings(tmp_path, model_folder):
    folders = [str(tmp_path), str(model_folder)]
    return {"store": str(tmp_path / "store"), "folders": folders, "low_priority": False}


@pytest.fixture
def too_little(tmp_path, training):
    """A training that is refused once its texts are read: all of a job but its seconds."""
    (tmp_path / "little").mkdir()
    (tmp_path / "little" / "a.md").write_text("The ferry.")
    return training | {"paths": [str(tmp_path / "little")]}


@pytest.fixture
def training(tmp_path, notes_folder, model_folder):
    (tmp_path / "test.toml").write_text(LONGER)
    recipe = str(tmp_path / "test.toml")
    return {"paths": [str(notes_folder)], "model": str(model_folder), "recipe": recipe, "device": "cpu"}


@pytest.fixture
def warm_servers():
    """Servers for clients that start their own, and train or answer."""
    with WarmServers() as servers:
        yield servers
