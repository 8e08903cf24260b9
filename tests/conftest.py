"""What tests share: a tiny model that is made here and never downloaded, and a data folder of their own."""

import gc
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

# Before torch and transformers are imported, and for the processes that tests start: no test reaches the network, and
# each process computes in one thread, since the models are so small that a second one only waits for the first.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# What imports and pytest's collection make stays for good: it is not looked through for garbage, neither meanwhile nor
# at every later collection, which would take half a second.
gc.disable()

import torch

# Without a GPU, Triton's kernels run in its interpreter; it must know before it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest

# What an `assert` of these compares is shown, as in a test's own file.
pytest.register_assert_rewrite("against_dense", "command", "damage", "memory_plans", "random_cases")

import command
from builders import make_llama, make_sentences, make_tokenizer
from running_out import RECIPE, PlainGraphs

import evidence
from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.models.catalog import resolve
from sebp_edge.models.loading import load_base_model
from sebp_edge.ops import backend, choices
from sebp_edge.ops.tiles import Tiles

torch.set_num_threads(1)


def pytest_xdist_auto_num_workers(config):
    """One process per core, at most eight; tests that are named run in this one, as a debugger needs it."""
    if all("::" in argument for argument in config.args):
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(cores, 8)


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def pytest_configure():
    if os.environ.get("SEBP_EDGE_RECORD"):
        evidence.machine()  # before the tests, not after them: without a GPU there is nothing to record


def pytest_terminal_summary(terminalreporter):
    """SEBP_EDGE_RECORD=FILE keeps how the tests went on this GPU; a run that was not asked to writes nothing."""
    file = os.environ.get("SEBP_EDGE_RECORD")
    # One process of several knows of its own tests only.
    if file and not os.environ.get("PYTEST_XDIST_WORKER"):
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


@pytest.fixture
def kernels(monkeypatch):
    """Our kernels run on the CPU, in Triton's interpreter."""
    if torch.cuda.is_available():
        pytest.skip("tensors on the CPU need Triton's interpreter")
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    tiles = Tiles(16, 16, 16, 2, 4, 2)
    monkeypatch.setattr(backend, "runs_kernels", lambda tensor: True)
    monkeypatch.setattr(choices, "choose_for_any_number", lambda *_: choices.Ways(tiles, tiles))


@pytest.fixture
def no_waiting(monkeypatch):
    """A context in which reading an element on the host, as a GPU's synchronisation would, fails."""

    def refuse(tensor, *_):
        raise AssertionError("the host waits for an element")

    @contextmanager
    def refusing():
        with monkeypatch.context() as patch:
            for name in ("item", "tolist", "__int__", "__float__", "__bool__", "__index__", "nonzero"):
                patch.setattr(torch.Tensor, name, refuse)
            yield

    return refusing


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
def base(model_folder):
    """That model, loaded on the CPU."""
    return load_base_model(resolve(model_folder), Recipe.load("notes"), torch.device("cpu"))


@pytest.fixture
def plain_graphs(monkeypatch):
    """Captured graphs where there is no GPU: a replay is the function itself."""
    for module in ("sebp_edge.training.learner", "sebp_edge.insight.bench.ways"):
        monkeypatch.setattr(f"{module}.Graphs", PlainGraphs)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)


@pytest.fixture
def notes_folder(tmp_path):
    """A folder with two dozen short notes."""
    folder = tmp_path / "notes"
    folder.mkdir()
    for number, text in enumerate(make_sentences(24)):
        (folder / f"note-{number:02}.md").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def make(model_folder, tmp_path):
    """Makes a Personalizer of the tiny random Llama, on the CPU, with a store of its own and these options."""

    def personalizer(**options):
        options = {"recipe": RECIPE, "device": "cpu", "store": AdapterStore(tmp_path / "store")} | options
        return Personalizer(model_folder, **options)

    return personalizer


@pytest.fixture
def recipe(tmp_path):
    """A recipe's file, for the command line."""
    path = tmp_path / "quick.toml"
    path.write_text(command.RECIPE)
    return path


@pytest.fixture
def adapt(notes_folder, model_folder, recipe):
    """The arguments of an adaptation that takes a second and is kept."""
    return ["adapt", str(notes_folder), "--model", str(model_folder), "--recipe", str(recipe)]


@pytest.fixture
def folder(tmp_path):
    """An empty folder, and a file in it that is always readable."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "kept.md").write_text("This one is kept.", encoding="utf-8")
    return folder


@pytest.fixture
def mounted(tmp_path):
    """Mounts a disk of the given size, such as "64k"."""
    folder = tmp_path / "disk"

    def mount(size: str) -> Path:
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if sys.platform != "linux" or os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("needs the right to mount a small disk")
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", str(folder)], check=True)
