"""Fixtures that choose what computes: kernels or their reference, graphs or plain calls, on a machine of its own."""

from contextlib import contextmanager

import pytest
import torch
from failing_memory import PlainGraphs
from fake_machine import MEASURED_ON

from sebp_edge.engine.sparse.rows import buckets
from sebp_edge.ops import backend, choices
from sebp_edge.ops.tiles import Tiles

CAPTURED = "sebp_edge.engine.training.captured_gradients"


@pytest.fixture
def short_attention(monkeypatch):
    """Runs our attention for short sequences whatever the device is: on the CPU in fp32 and fp16 only."""
    monkeypatch.setattr(backend, "runs_short_attention", lambda *_: True)


@pytest.fixture
def plain_steps(monkeypatch):
    """Replaces captured steps of decoding where there is no GPU; returns those made, whose replay calls the step."""
    made = []

    class Plain:
        def __init__(self, tokens, step, pool):
            self.num_rows, self.step = tokens.shape[1], step
            made.append(self)
            self(tokens)  # as the first run does

        def __call__(self, tokens):
            return self.step(*tokens[:, :, None])

    monkeypatch.setattr("sebp_edge.engine.models.captured_step._StepGraph", Plain)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    return made


@pytest.fixture
def verified_rows(monkeypatch):
    """Checks the rows that are given to sparse operations, as SEBP_EDGE_VERIFY does."""
    monkeypatch.setattr("sebp_edge.ops.rows.VERIFY", True)


@pytest.fixture
def chunk_rows(monkeypatch):
    """A function that sets how many rows MLPs compute at once."""

    def compute(number):
        for module in ("engine.sparse.patches.counts", "engine.sparse.hoist"):
            monkeypatch.setattr(f"sebp_edge.{module}.CHUNK_ROWS", number)

    return compute


@pytest.fixture
def fused_modules(monkeypatch):
    """Replaces norms and MLPs where there is no GPU, too."""
    monkeypatch.setattr("sebp_edge.engine.sparse.patches.norms_and_mlps.runs_kernels", lambda tensor: True)


@pytest.fixture
def poisoned_memory():
    """Fills new tensors of `torch.empty` with NaN, so that unwritten elements show."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def kernels(monkeypatch):
    """Runs our kernels on the CPU, in Triton's interpreter."""
    if torch.cuda.is_available():
        pytest.skip("tensors on the CPU need Triton's interpreter")
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    tiles = Tiles(16, 16, 16, 2, 4, 2)
    monkeypatch.setattr(backend, "runs_kernels", lambda tensor: True)
    monkeypatch.setattr(choices, "choose_for_unknown_count", lambda *_: choices.Algorithms(tiles, tiles))


@pytest.fixture
def on_machine(monkeypatch):
    """Takes this machine for another one, as the choices of our operations know it."""
    monkeypatch.setattr(choices, "machine", lambda index: MEASURED_ON)


@pytest.fixture
def our_kernels(request):
    """Runs our kernels: on a GPU where there is one, else in Triton's interpreter."""
    if not torch.cuda.is_available():
        request.getfixturevalue("kernels")


@pytest.fixture
def plain_pytorch(monkeypatch):
    """Runs the reference of our kernels, on a GPU too."""
    monkeypatch.setattr(backend, "runs_kernels", lambda tensor: False)


@pytest.fixture
def no_host_sync(monkeypatch):
    """A context manager within which reading an element on the host fails, since on a GPU it would synchronize."""

    def refuse(tensor, *_):
        raise AssertionError("the host reads an element")

    @contextmanager
    def refusing():
        with monkeypatch.context() as patch:
            for name in ("item", "tolist", "__int__", "__float__", "__bool__", "__index__", "nonzero"):
                patch.setattr(torch.Tensor, name, refuse)
            yield

    return refusing


@pytest.fixture
def free_captures(monkeypatch):
    """Captures cost nothing, so that the sizes of a small training get several buckets."""
    monkeypatch.setattr(buckets, "CAPTURE_COST", 0)


@pytest.fixture
def plain_graphs(monkeypatch):
    """Replaces captured graphs where there is no GPU; a replay calls the function itself."""
    for module in ("sebp_edge.engine.training.learner", CAPTURED):
        monkeypatch.setattr(f"{module}.GraphPool", PlainGraphs)
    monkeypatch.setattr(f"{CAPTURED}._refuse_without_gpu", lambda device: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
