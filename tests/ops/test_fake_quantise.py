"""Fake quantisation: both implementations against the package that writes GGUF files, bit for bit."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize

from sebp_edge.ops import fake_quantise_
from sebp_edge.ops.fake_quantise import GRIDS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["reference", "kernel"])
def path(request):
    """Both implementations; on a GPU only its own, the kernel."""
    if request.param == "kernel" and DEVICE.type == "cpu":
        request.getfixturevalue("kernels")
    elif request.param == "reference" and DEVICE.type == "cuda":
        request.getfixturevalue("plain_pytorch")


def weights() -> torch.Tensor:
    """Weights with zeros, equal magnitudes of both signs, tiny and large numbers, and numbers that are on a grid."""
    x = 0.02 * torch.randn(41, 96, generator=torch.Generator().manual_seed(0))
    x[0] = 0
    x[1] = x[1].sign() * 0.5
    x[2] = (x[2] * 200).round() / 8
    x[3] *= 1e-7
    x[4] *= 1e4
    x[5, ::3] = -0.0
    for row, grid in enumerate(GRIDS, start=6):
        x[row] = written(x[row : row + 1], grid)
    return x


def written(x: torch.Tensor, grid: str) -> torch.Tensor:
    """What a GGUF file has."""
    kind = GGMLQuantizationType[grid.upper()]
    return torch.from_numpy(np.array(dequantize(quantize(x.numpy(), kind), kind)))


@pytest.mark.parametrize("grid", GRIDS)
def test_weights_are_rounded_as_a_file_rounds_them(path, grid):
    x = weights()
    out = torch.full_like(x, torch.nan, device=DEVICE)
    fake_quantise_(out, x.to(DEVICE), grid)
    assert torch.equal(out.cpu(), written(x, grid))


@pytest.mark.parametrize("grid", GRIDS)
def test_weights_are_rounded_in_place(path, grid):
    x = weights()
    found = x.to(DEVICE)
    fake_quantise_(found, found, grid)
    assert torch.equal(found.cpu(), written(x, grid))


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter rounds bf16 wrongly
def test_a_frozen_weight_gets_the_rounding_error(path, grid, dtype):
    x = weights()
    weight = (x + 1e-3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))).to(dtype)
    out = torch.empty_like(weight, device=DEVICE)
    fake_quantise_(out, x.to(DEVICE), grid, weight.to(DEVICE))
    assert torch.equal(out.cpu(), ((written(x, grid) - x) + weight.float()).to(dtype))


@pytest.mark.parametrize("grid", GRIDS)
def test_subnormal_weights_become_zero(path, grid):
    x = torch.full((1, 32), 1e-40, device=DEVICE)
    fake_quantise_(x, x, grid)
    assert not x.any()


def test_no_weights_are_rounded(path):
    empty = torch.empty(0, 32, device=DEVICE)
    fake_quantise_(empty, empty, "q4_0")


@pytest.mark.parametrize(
    ("x", "out"),
    [
        (torch.zeros(2, 48), torch.zeros(2, 48)),
        (torch.zeros(2, 32), torch.zeros(2, 64)),
        (torch.zeros(2, 32).double(), torch.zeros(2, 32)),
        (torch.zeros(32, 32).T[:, ::2], torch.zeros(32, 16)),
    ],
)
def test_other_tensors_are_refused(x, out):
    with pytest.raises(ValueError, match=r"ake quantisation|Blocks of 32"):
        fake_quantise_(out, x, "q4_0")
