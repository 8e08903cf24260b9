"""What tests share: a tiny model that is made here and never downloaded, and a data folder of their own."""

import os
from pathlib import Path

# Before torch and transformers are imported: no test reaches the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch

# Without a GPU, Triton's kernels run in its interpreter; it must know before it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
from builders import make_llama, make_sentences, make_tokenizer

import evidence

# The models are so small that a second thread only waits for the first.
torch.set_num_threads(1)


def pytest_configure():
    if os.environ.get("SEBP_EDGE_RECORD"):
        evidence.machine()  # before the tests, not after them: without a GPU there is nothing to record


def pytest_terminal_summary(terminalreporter):
    """SEBP_EDGE_RECORD=FILE keeps how the tests went on this GPU; a run that was not asked to writes nothing."""
    if file := os.environ.get("SEBP_EDGE_RECORD"):
        evidence.record_tests(terminalreporter.stats, Path(file))


@pytest.fixture(autouse=True)
def own_data_folder(tmp_path, monkeypatch):
    """Adapters of a test, and what it measures, go into its temporary folder."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "data" / "sebp-edge" / "adapters"


@pytest.fixture
def poisoned_memory():
    """Fills what `torch.empty` gives with NaN, so that an element that nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, tokenizer):
    """A folder with a tiny random Llama and its tokenizer, as a user would have one."""
    folder = tmp_path_factory.mktemp("models") / "micro-llama"
    make_llama().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def notes_folder(tmp_path):
    """A folder with two dozen short notes."""
    folder = tmp_path / "notes"
    folder.mkdir()
    for number, text in enumerate(make_sentences(24)):
        (folder / f"note-{number:02}.md").write_text(text, encoding="utf-8")
    return folder
