"""Kernels are tried before they are used: what fails is named, and plain PyTorch computes in its place."""

import inspect

import pytest
import torch
from builders import make_sentences
from command import RECIPE

from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.cli import doctor_checks
from sebp_edge.events import Notice
from sebp_edge.ops import backend, self_check

pytest.importorskip("triton", reason="Triton is not installed on this platform")
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are sabotaged in Triton's interpreter"),
    pytest.mark.usefixtures("new_card"),
]
CPU = torch.device("cpu")
RUNS_KERNELS = backend.runs_kernels
KERNELS = {
    name: family
    for family in self_check.TRIED
    for name, kernel in inspect.getmembers(backend.kernels(family))
    if name.endswith("_kernel") and kernel.fn.__module__ == f"sebp_edge.ops.gpu.{family}"
}


@pytest.fixture
def new_card(kernels, monkeypatch):
    """Takes the CPU for a GPU of which nothing is known, where the interpreter runs our kernels; returns what it is."""
    card = {"gpu": "some GPU", "driver": "13000"}
    monkeypatch.setattr(backend, "runs_kernels", RUNS_KERNELS)
    monkeypatch.setattr(backend, "can_run_kernels", lambda tensor: tensor.dtype != torch.float64)
    monkeypatch.setattr(backend, "runs_short_attention", lambda queries, *_: backend.runs_kernels(queries))
    monkeypatch.setattr(backend, "has_triton", lambda: True)
    monkeypatch.setattr(backend, "failed_kernels", self_check.failed)
    monkeypatch.setattr(self_check, "conditions", lambda device: card)
    self_check.failed.cache_clear()
    yield card
    self_check.failed.cache_clear()


def run_by(monkeypatch, launch):
    """Makes `launch(kernel, run)` launch the kernels."""
    run = InterpretedFunction.run

    def launched(kernel, *args, **options):
        launch(kernel, lambda: run(kernel, *args, **options), args)

    monkeypatch.setattr(InterpretedFunction, "run", launched)


def sabotage(monkeypatch, name, spoil=None):
    """Makes a kernel return without writing anything, or spoils the tensor that it has written."""

    def launch(kernel, run, args):
        if kernel.__name__ != name:
            run()
        elif spoil is not None:
            run()
            spoil(args)

    run_by(monkeypatch, launch)


def failing():
    return ", ".join(self_check.try_all(CPU, torch.float16))


def test_every_kernel_is_tried_with_its_family(monkeypatch):
    launched = set()
    run_by(monkeypatch, lambda kernel, run, args: (run(), launched.add(kernel.__name__)))
    assert failing() == ""
    assert launched == KERNELS.keys()


class Calls(TorchDispatchMode):
    """Notes the names of operations."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__.removesuffix("_"))
        return function(*args, **(kwargs or {}))


def test_all_kernels_are_launched_without_products_to_compile_them(monkeypatch):
    """A thread's first product would take memory of a GPU for good."""
    launched = set()
    run_by(monkeypatch, lambda kernel, run, args: (run(), launched.add(kernel.__name__)))
    with Calls() as calls:
        for name in self_check.TRIED:
            self_check.compile_kernels(CPU, torch.float16, name)
    assert launched == KERNELS.keys()
    assert "copy" in calls.names and calls.names.isdisjoint({"mm", "bmm", "addmm", "baddbmm", "mv", "dot"})


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_that_writes_nothing_is_named(kernel, monkeypatch):
    monkeypatch.setattr(self_check, "TRIED", (KERNELS[kernel],))
    sabotage(monkeypatch, kernel)
    assert failing() == KERNELS[kernel]


def test_a_single_wrong_row_is_found(monkeypatch):
    sabotage(monkeypatch, "_rms_norm_kernel", lambda args: args[2][2].mul_(1.05))
    assert failing() == "rms_norm"


def test_what_was_found_is_kept_for_this_card_and_its_driver(new_card, monkeypatch):
    sabotage(monkeypatch, "_rms_norm_kernel")
    assert self_check.failed(CPU) == "rms_norm"
    # A later process.
    self_check.failed.cache_clear()
    monkeypatch.setattr(self_check, "TRIED", ())
    assert self_check.failed(CPU) == "rms_norm"
    # Another driver.
    self_check.failed.cache_clear()
    new_card["driver"] = "13010"
    assert self_check.failed(CPU) == ""


def test_an_error_of_a_kernel_is_a_failure_but_too_little_memory_is_not(monkeypatch):
    error = RuntimeError("out of resource: shared memory")

    def fail(*_):
        raise error

    run_by(monkeypatch, fail)
    assert failing() == ", ".join(self_check.TRIED)
    assert "rms_norm" in self_check.failed(CPU)
    # It may have been a full disk: nothing is kept.
    self_check.failed.cache_clear()
    error = torch.OutOfMemoryError()
    with pytest.raises(torch.OutOfMemoryError):
        self_check.failed(CPU)
    monkeypatch.setattr(self_check, "TRIED", ())
    assert self_check.failed(CPU) == ""


@pytest.mark.slow
def test_the_doctor_names_kernels_that_fail(new_card, monkeypatch):
    assert doctor_checks._kernels().problem is None
    self_check.failed.cache_clear()
    new_card["driver"] = "13010"
    sabotage(monkeypatch, "_prune_kernel")
    assert "Kernels fail their check on this GPU (prune)" in doctor_checks._kernels().problem


@pytest.mark.slow
def test_a_training_goes_on_without_kernels_with_a_notice(new_card, model_folder, tmp_path, monkeypatch):
    (tmp_path / "test.toml").write_text(RECIPE)

    def learn(name):
        events, recipe, store = [], Recipe.load(tmp_path / "test.toml"), AdapterStore(tmp_path / name)
        learning = Personalizer(model_folder, recipe=recipe, device="cpu", store=store, on_event=events.append)
        return learning.adapt(make_sentences(24)), [event.message for event in events if isinstance(event, Notice)]

    with backend.tried(by_kernels=False):
        expected, _ = learn("plain")
    self_check.failed.cache_clear()
    new_card["driver"], launched = "13010", []
    sabotage(monkeypatch, "_short_attention_kernel")
    assert backend.failed_kernels(CPU) == "short_attention"
    run_by(monkeypatch, lambda kernel, run, args: launched.append(kernel.__name__))
    found, notices = learn("sabotaged")
    assert any("(short_attention)" in notice for notice in notices)
    assert not launched
    assert found.heldout_loss_after == expected.heldout_loss_after < expected.heldout_loss_before
