"""Fixtures of the tests of exports."""

import shutil

import pytest
from export_sources import make_adapter, make_source, say_theta


@pytest.fixture
def no_memory(machine):
    """Leaves an export no memory to run the model in, which then takes half of the time."""
    machine.has_memory(1000)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a model and an adapter of it, which tests copy."""
    folder = tmp_path_factory.mktemp("made")
    make_adapter(folder / "adapter", make_source(folder / "model", "llama"))
    return folder


@pytest.fixture
def llama(made, tmp_path):
    return tuple(shutil.copytree(made / name, tmp_path / name) for name in ("model", "adapter"))


@pytest.fixture
def llama_for_mlx(llama):
    """The model with the names in its config.json that mlx-lm reads, and its adapter."""
    say_theta(llama[0])
    return llama
