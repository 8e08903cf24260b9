"""Which implementation computes an op: kernels where they run, else plain PyTorch, with the same parameters."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sebp_edge.ops import backend, chunked_rule, gated, reference

KERNELS = sorted(path.stem for path in (Path(backend.__file__).parent / "gpu").glob("[!_]*.py"))
# Files without a reference: PyTorch, or bitsandbytes, has these ops in another form.
ONLY_KERNELS = [
    *("copies", "cublaslt", "delta_tiles", "four_bit_products", "four_bit_tiles", "four_bits", "joined_lora"),
    *("products", "short_attention"),
]


def functions(module):
    found = inspect.getmembers(module, inspect.isfunction)
    return {name: one for name, one in found if one.__module__ == module.__name__ and not name.startswith("_")}


def test_kernels_and_reference_take_the_same_arguments():
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    for name in KERNELS:
        shared = functions(backend.kernels(name)).keys() & (functions(reference) | functions(chunked_rule)).keys()
        assert bool(shared) == (name not in ONLY_KERNELS), name
        for function in shared:
            ours, plain = getattr(backend.kernels(name), function), getattr(reference, function)
            assert inspect.signature(ours) == inspect.signature(plain), function


def test_pytorch_computes_without_a_gpu():
    assert backend.implementation(torch.zeros(1), "gated") is reference


def test_kernels_compute_where_they_run(kernels):
    assert backend.implementation(torch.zeros(1), "gated").__name__ == "sebp_edge.ops.gpu.gated"


@pytest.mark.slow
def test_ops_neither_need_nor_import_triton():
    code = (
        "import sys, torch; from sebp_edge.ops import gated, tuning; print('triton' in sys.modules)\n"
        "sys.modules['triton'] = None\n"
        "with tuning('nowhere'):\n"
        "    print(gated(torch.ones(1, 2), torch.ones(1, 2), 'silu').shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "False\ntorch.Size([1, 2])\n", done.stderr


def test_a_kernel_that_is_chosen_computes_the_op(kernels, monkeypatch):
    monkeypatch.delattr(reference, "gated")
    gate, up = torch.randn(2, 3, 8).unbind()
    torch.testing.assert_close(gated(gate, up, "silu"), torch.nn.functional.silu(gate) * up)
