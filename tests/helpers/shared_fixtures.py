"""Shared fixtures: a tiny random model, a data folder for each test, and settings for the processes that run tests."""

import copy
import ctypes
import functools
import gc
import itertools
import logging
import os
import shutil
import subprocess
import sys
import zlib
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

# Objects from imports and from pytest's collection live until the exit. Keeping them out of garbage collection saves
# half a second at every later collection.
gc.disable()

import torch

# Without a GPU, kernels run in Triton's interpreter, which must be chosen before Triton is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import psutil
import pytest

if os.environ.get("TRITON_INTERPRET") and find_spec("triton"):
    import interpreter

    interpreter.work_once()

import command
from builders import make_llama, make_tokenizer, save_model, write_notes
from failing_memory import RECIPE
from fake_machine import FakeMachine
from logged import Logged
from quick import SHORT_ASSESSMENT, skip_assessment

from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.loading import load_base_model
from sebp_edge.engine.training.losses import RowLosses
from sebp_edge.engine.training.update_in_backward import UpdateInBackward
from sebp_edge.lessons.template_child import Renderer
from sebp_edge.machine import devices, process
from sebp_edge.run import giving_way

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# `torch.manual_seed` takes milliseconds to note that accelerators which are not there shall be seeded, too.
seed_all = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed

# Without any handler, a library's first message would give the root logger one that writes to that test's stderr.
logging.root.addHandler(logging.NullHandler())

HOMES = itertools.count()
pytest_plugins = ["learnt", "computing_fixtures"]


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def new_home(tmp_path_factory, monkeypatch):
    """A folder for adapters and caches, which is made once something is put there."""
    home = tmp_path_factory.getbasetemp() / "homes" / str(next(HOMES))
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    return home


@pytest.fixture(scope="session", autouse=True)
def common_home(tmp_path_factory):
    """The home of what several tests share, so that nothing is in the user's."""
    with pytest.MonkeyPatch.context() as patch:
        yield new_home(tmp_path_factory, patch)


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory, monkeypatch):
    """A test's home."""
    return new_home(tmp_path_factory, monkeypatch)


@pytest.fixture
def own_data_folder(own_home):
    """The test's own folder of adapters."""
    return own_home / "data" / "sebp-edge" / "adapters"


@pytest.fixture(autouse=True)
def own_random_numbers(request):
    """Gives a test the same random numbers whatever ran before it."""
    seed_all(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def caplog():
    """What is logged during the test, as in pytest's own fixture."""
    with Logged() as logged:
        yield logged


@pytest.fixture(autouse=True, scope="session")
def shared_renderers():
    """Shares the processes that render chat templates, which start for each tokenizer otherwise.

    On a busy machine, the usual seconds would end before a template runs out of memory.
    """
    renderer = functools.lru_cache(maxsize=8)(lambda source, process: Renderer(source, seconds=60))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sebp_edge.lessons.conversations.Renderer", lambda source: renderer(source, os.getpid()))
        yield


@pytest.fixture(autouse=True, scope="session")
def short_assessment():
    """Shortens what is assessed of adaptations in this process; `warm` does so in those that it forks."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SHORT_ASSESSMENT.items():
            patch.setattr(name, value)
        yield


@pytest.fixture
def assessed():
    """Assesses adaptations, in a file whose other tests are `unassessed`."""


@pytest.fixture
def unassessed(request, monkeypatch):
    """Leaves out most of what is assessed of an adaptation, for tests that do not look at it."""
    if "assessed" not in request.fixturenames:
        skip_assessment(monkeypatch)


@pytest.fixture
def machine(monkeypatch):
    """A machine that a test simulates in part."""
    return FakeMachine(monkeypatch)


@pytest.fixture
def process_memory(monkeypatch):
    """The bytes of this process, `used`, that only the test changes; the real ones change from call to call."""
    memory = SimpleNamespace(used=0)
    monkeypatch.setattr(process, "resident", lambda: memory.used)
    monkeypatch.setattr(process, "peak_resident", lambda: memory.used)
    return memory


@pytest.fixture
def mains(monkeypatch):
    """The mains power of this machine, which tests can cut; it is looked at all the time; host memory is all free."""
    state, memory = SimpleNamespace(power_plugged=True), devices.total_host_memory()
    monkeypatch.setattr(devices, "free_host_memory", lambda: memory)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: state, raising=False)
    monkeypatch.setattr(giving_way, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(giving_way, "POLL_SECONDS", 0.001)
    return state


@pytest.fixture
def load_driver(monkeypatch):
    """A function that sets what loads the library of a GPU's driver."""
    return functools.partial(monkeypatch.setattr, ctypes, "CDLL")


@pytest.fixture
def take_at_most(monkeypatch):
    """A function that sets how many seconds a reader of `sebp_edge.reading.formats` may take."""
    return lambda name, seconds: monkeypatch.setattr(f"sebp_edge.reading.formats.{name}.MAX_SECONDS", seconds)


@pytest.fixture
def make_items(monkeypatch):
    """A function that sets how many items each probe has."""
    return functools.partial(monkeypatch.setattr, "sebp_edge.ask.general_texts.MAX_ITEMS")


@pytest.fixture
def tell_after(monkeypatch):
    """A function that sets how many seconds pass between two events that tell a job's progress."""
    return functools.partial(monkeypatch.setattr, "sebp_edge.run.job.SECONDS")


@pytest.fixture
def temporary_folder(tmp_path, monkeypatch):
    """The system's folder for temporary files, empty."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture
def set_windows(monkeypatch):
    """A function that sets how many characters are tokenised at once, and how many of them two windows share."""

    def windows(size, overlap):
        monkeypatch.setattr("sebp_edge.lessons.tokens.WINDOW", size)
        monkeypatch.setattr("sebp_edge.lessons.tokens.OVERLAP", overlap)

    return windows


@pytest.fixture
def run_with(monkeypatch):
    """A function that sets the memory options of trainings without a budget."""
    return functools.partial(monkeypatch.setattr, "sebp_edge.run.encoding.FASTEST")


@pytest.fixture
def small_evaluations(monkeypatch):
    """Evaluates few rows at once on the CPU, so that there are several micro-batches."""
    monkeypatch.setattr("sebp_edge.engine.sparse.rows.schedule.MAX_EVALUATED_ROWS_CPU", 64)


@pytest.fixture
def limit_gradients(monkeypatch):
    """A function that sets how many bytes of gradients exist at once."""
    return functools.partial(monkeypatch.setattr, "sebp_edge.engine.training.update.MAX_GRADIENTS_AT_ONCE")


@pytest.fixture
def updated_in_backward(monkeypatch):
    """Makes learners update fp32 weights within the backward pass too."""
    monkeypatch.setattr(
        "sebp_edge.engine.training.learner._update_for",
        lambda parameters, recipe, options: UpdateInBackward(parameters, recipe),
    )


@pytest.fixture
def micro_batches(monkeypatch):
    """The examples of each micro-batch whose losses are computed during the test."""
    found = []

    def watch(compute):
        def watched(losses, examples, *rest):
            found.append(list(examples))
            return compute(losses, examples, *rest)

        return watched

    for name in ("__call__", "read"):
        monkeypatch.setattr(RowLosses, name, watch(getattr(RowLosses, name)))
    return found


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A folder with a tiny random Llama of one layer and its tokenizer, as a user would have."""
    return save_model(make_llama(num_hidden_layers=1), tmp_path_factory.mktemp("models") / "micro-llama")


@pytest.fixture(scope="session")
def two_layer_folder(tmp_path_factory):
    """A folder like `model_folder`, for tests in which the last layer is not the only one."""
    return save_model(make_llama(), tmp_path_factory.mktemp("models") / "micro-llama")


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A folder with a model whose random weights are so large that a few steps lower its loss by a tenth."""
    return save_model(
        make_llama(initializer_range=0.1, num_hidden_layers=1), tmp_path_factory.mktemp("models") / "large-weights"
    )


@pytest.fixture(scope="session")
def loaded_base(two_layer_folder):
    return load_base_model(resolve(two_layer_folder), Recipe.load("notes"), torch.device("cpu"))


@pytest.fixture
def base(loaded_base):
    """The model of `two_layer_folder`, loaded on the CPU."""
    return copy.deepcopy(loaded_base)


@pytest.fixture
def notes_folder(tmp_path):
    """A folder with two dozen short notes."""
    return write_notes(tmp_path / "notes")


@pytest.fixture(scope="session")
def store_of_notes(tmp_path_factory, model_folder, short_assessment):
    """A store that has learnt the notes of `notes_folder` with the recipe of `command.RECIPE`; tests copy it."""
    folder = tmp_path_factory.mktemp("learnt")
    (folder / "test.toml").write_text(command.RECIPE)
    store = AdapterStore(folder / "store")
    learning = Personalizer(model_folder, recipe=Recipe.load(folder / "test.toml"), device="cpu", store=store)
    assert learning.adapt(write_notes(folder / "notes")).active
    return store


@pytest.fixture
def after_learning(store_of_notes):
    """A function that makes a store one that has learnt the notes of `notes_folder`, and returns it."""

    def learnt(store):
        shutil.copytree(store_of_notes.folder.parent, store.folder.parent)
        return store

    return learnt


@pytest.fixture
def make(model_folder, tmp_path, request):
    """A function that makes a Personalizer of the tiny random Llama, on the CPU, with a store of its own.

    With `after=True`, its store has learnt the notes of `notes_folder`.
    """

    def personalizer(model=model_folder, *, after=False, **options):
        options = {"recipe": RECIPE, "device": "cpu", "store": AdapterStore(tmp_path / "store")} | options
        if after:
            request.getfixturevalue("after_learning")(options["store"])
        return Personalizer(model, **options)

    return personalizer


@pytest.fixture
def recipe(tmp_path):
    """A recipe file for the command line."""
    path = tmp_path / "quick.toml"
    path.write_text(command.RECIPE)
    return path


@pytest.fixture
def adapt(notes_folder, model_folder, recipe):
    """Command-line arguments of an adaptation that takes a second and is kept."""
    return ["adapt", str(notes_folder), "--model", str(model_folder), "--recipe", str(recipe)]


@pytest.fixture
def folder(tmp_path):
    """A folder with one readable file."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "kept.md").write_text("This one is kept.", encoding="utf-8")
    return folder


@pytest.fixture
def limit_files():
    """A context manager within which no file of this process can be written beyond a number of bytes."""
    resource = pytest.importorskip("resource", reason="Windows has no such limit")

    @contextmanager
    def limited(size):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited


@pytest.fixture
def mount_disk(tmp_path):
    """A function that mounts a disk of the given size, such as "64k", and returns its folder."""
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
