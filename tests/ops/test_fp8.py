"""Products with weights in FP8, against fp64 products of the values that the codes stand for."""

from functools import partial

import pytest
import torch
from pairwise import pairwise
from random_cases import DEVICE, draw, twice

from sebp_edge.ops import (
    Fp8Rows,
    Fp8Weight,
    GatedInputs,
    LoraGroup,
    LoraProjection,
    Recompute,
    backend,
    detect,
    gated,
    gated_lora_linear,
    lora_linear,
    reference,
    rms_norm,
)
from sebp_edge.ops.fp8 import common_scale
from sebp_edge.ops.gpu import gemm

RANK, SCALING = 5, 1.5
BF16 = {"dtype": torch.bfloat16}
# The largest relative error of rounding to 3 bits of mantissa, and half the distance of the smallest numbers.
EPS, TINY = 2.0**-4, 2.0**-10

needs_fp8 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs an NVIDIA GPU that multiplies FP8, and there is none here",
)
ON_BOTH = [pytest.param("reference"), pytest.param("kernels", marks=[pytest.mark.gpu, needs_fp8])]


@pytest.fixture(params=ON_BOTH)
def implementation(request):
    """The reference, on any device; and the kernels. Triton's interpreter rounds to FP8 wrongly."""
    if request.param == "kernels":
        return backend.kernels("fp8")
    request.getfixturevalue("plain_pytorch")
    return reference


def values_of(codes, scales):
    return codes.double() * scales.double()[:, None]


# --------------------------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_rows, num_columns", [(0, 16), (1, 16), (3, 48), (7, 3088), (2, 20000)])
def test_rows_are_rounded_to_fp8(num_rows, num_columns, dtype, implementation, poisoned_memory):
    wide = draw(num_rows, num_columns + 16, dtype=dtype)
    wide *= 10.0 ** torch.randint(-6, 6, (num_rows, 1)).to(DEVICE, dtype)
    x, unit = wide[:, 8:-8], 0.25
    codes, scales = implementation.quantise_rows(x, unit)
    largest = x.double().abs().amax(dim=1) if num_rows else x.new_empty(0).double()
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == x.shape and codes.is_contiguous()
    torch.testing.assert_close(scales.double(), unit * largest / 448, rtol=1e-6, atol=0)
    error = (values_of(codes, scales / unit) - x.double()).abs()
    # 1e-6 for numbers in the middle between two codes.
    assert (error <= (1 + 1e-6) * torch.maximum(EPS * x.double().abs(), TINY * largest[:, None] / 448)).all()


@pytest.mark.parametrize("num_rows", [1, 7, 300])
@pytest.mark.parametrize("num_columns", [32, 272])
def test_norms_and_gates_round_their_outputs_too(num_rows, num_columns, implementation, poisoned_memory):
    x, other = draw(num_rows, num_columns, **BF16), draw(num_rows, num_columns, seed=1, **BF16)
    weight = draw(num_columns, seed=2, **BF16)
    for function in (partial(rms_norm, x, weight, 1e-6), partial(gated, x, other, "silu")):
        in_fp8 = Fp8Rows.beside(x)
        out = function(in_fp8=in_fp8)
        assert torch.equal(out, function())
        codes, scales = implementation.quantise_rows(out)
        assert torch.equal(in_fp8.codes.view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(in_fp8.scales, scales)


def test_rows_of_zeros_are_zero_and_rows_with_nan_or_infinity_are_not_lost(implementation):
    x = draw(6, 32, **BF16)
    x[0], x[1, 3], x[2, 5], x[3, 7], x[4] = 0, torch.nan, torch.inf, -torch.inf, 1e-38
    (weight,), _ = random_weights(32, (48,))
    out, down, lora_B = x.new_full((6, 48), torch.nan), x.new_zeros(6, RANK), x.new_ones(48, RANK)
    weight.outputs_(out, x, (down, lora_B, None, (48,), SCALING))
    assert not out[0].any() and out[1:4].isnan().all() and out[4:].isfinite().all() and out[5].all()


def test_an_outlier_leaves_other_rows_as_they_are(implementation):
    x = draw(3, 64, **BF16)
    x[1, 9] = 3e38
    found, truth = values_of(*implementation.quantise_rows(x)), x.double()
    assert (found[1, 9] - truth[1, 9]).abs() <= EPS * truth[1, 9]
    assert (found[::2] - truth[::2]).norm() <= 0.04 * truth[::2].norm()


# ------------------------------------------------------------------------------------------------------------ weights


def random_weights(num_inputs, outs, dtype=torch.bfloat16):
    """Weights in FP8 with one scale, and as they were before."""
    dense = [draw(each, num_inputs, dtype=dtype, seed=each) * 0.02 for each in outs]
    scale = common_scale(dense)
    return [Fp8Weight.quantise(each, scale) for each in dense], dense


@pytest.mark.parametrize("outlier", [1.0, 1000.0])
def test_a_weight_in_fp8_is_as_near_as_its_bits_allow_beside_an_outlier_too(outlier):
    dense = draw(64, 48, **BF16) * 0.02
    dense[3, 5] *= outlier
    scale = common_scale([dense])
    assert 224 < dense.abs().max() / scale <= 448
    error = (Fp8Weight.quantise(dense, scale).matrix() - dense).abs()
    assert (error <= EPS * dense.abs() + TINY * scale).all()
    assert error.square().sum().sqrt() <= 0.04 * dense.norm()


def test_a_weight_of_zeros_or_with_nan_is_kept():
    assert common_scale([torch.zeros(2, 2)]) == 1.0
    for value in (torch.nan, torch.inf):
        dense = torch.tensor([[value, 1.0]])
        assert Fp8Weight.quantise(dense, common_scale([dense])).matrix().isnan().any()


def test_weights_of_different_scales_are_not_stacked():
    weights = [Fp8Weight.quantise(torch.ones(16, 16), scale) for scale in (1.0, 0.5)]
    with pytest.raises(ValueError, match="of different scales cannot be stacked"):
        Fp8Weight.stack(weights)


CASES = pairwise(
    num_rows=[0, 1, 3, 80, 128, 129, 300],
    **{
        "num_inputs, outs": [
            (16, (16,)),
            (144, (48, 16, 32)),
            (400, (208, 144)),
            (3072, (1024, 512)),
            (64, (16, 32, 16, 48)),
        ]
    },
    rank=[RANK, 16, 70],
)


@CASES
def test_both_products_multiply_by_the_same_weight(num_rows, num_inputs, outs, rank, implementation, poisoned_memory):
    weights, dense = random_weights(num_inputs, outs)
    stacked = Fp8Weight.stack(weights)
    matrix = torch.cat([each.codes.double() * each.scale for each in weights])
    assert (matrix - torch.cat(dense).double()).norm() <= 0.04 * matrix.norm()
    assert torch.equal(stacked.matrix(), matrix.bfloat16())
    x, dout = draw(num_rows, num_inputs + 16, seed=1, **BF16)[:, 8:-8], draw(num_rows, sum(outs), seed=2, **BF16)
    down, lora_B = draw(num_rows, rank * len(outs), seed=3, **BF16), draw(sum(outs), rank, seed=4, **BF16)
    lora_A, bias = draw(rank * len(outs), num_inputs, seed=5, **BF16), draw(sum(outs), seed=6, **BF16)
    true_x, true_dout = (values_of(*reference.quantise_rows(each)) for each in (x, dout))
    parts = zip(down.double().split(rank, dim=1), lora_B.double().split(outs), strict=True)
    true_outputs = true_x @ matrix.T + torch.cat([SCALING * d @ b.T for d, b in parts], dim=1) + bias.double()
    true_product = true_dout @ matrix

    def multiply():
        outputs = x.new_full((num_rows, sum(outs)), torch.nan)
        stacked.outputs_(outputs, x, (down, lora_B, bias, outs, SCALING))
        alone = torch.full_like(outputs, torch.nan)
        stacked.outputs_(alone, x, None, implementation.quantise_rows(x))
        product, row_scales = stacked.inputs_unscaled(dout)
        product = product.double() * row_scales.double()[:, None]
        return [outputs, alone, stacked.inputs(dout, down, lora_A), product]

    truths = [true_outputs, true_x @ matrix.T, true_product + down.double() @ lora_A.double(), true_product]
    for first, again, truth in zip(*twice(multiply), truths, strict=True):
        # Kernels round products before they are scaled; sums of FP8 keep 14 bits.
        assert (first.double() - truth).norm() <= 2 * torch.finfo(torch.bfloat16).eps * truth.norm()
        assert torch.equal(first, again)


@pairwise(num_rows=[1, 33, 130], outs=[(16,), (144, 16), (48, 130, 16)], rank=[RANK, 16, 70], has_bias=[False, True])
def test_products_are_scaled_and_finished_in_place(
    num_rows, outs, rank, has_bias, kernels, monkeypatch, poisoned_memory
):
    # Triton's interpreter rounds to FP8 wrongly, and cuBLASLt needs a GPU.
    monkeypatch.setattr(gemm, "multiply_", lambda out, a, b: out.copy_(a.float() @ b.float()))
    (weight,), _ = random_weights(64, (sum(outs),), torch.float32)
    in_fp8 = reference.quantise_rows(draw(num_rows, 64, seed=1))
    down, lora_B = draw(num_rows, rank * len(outs) + 3, seed=2)[:, 3:], draw(sum(outs), rank, seed=3)
    small = down, lora_B, draw(sum(outs), seed=4) if has_bias else None, outs, SCALING
    for each in (small, (down[:, :rank], draw(rank, sum(outs)).T, None, (sum(outs),), 1.0), None):
        found, expected = (torch.full((num_rows, sum(outs)), torch.nan) for _ in range(2))
        backend.kernels("fp8").multiply_fp8_(found, in_fp8, weight.codes, weight.scale, each)
        reference.multiply_fp8_(expected, in_fp8, weight.codes, weight.scale, each)
        assert (found - expected).norm() <= 1e-6 * expected.norm()


# ---------------------------------------------------------------------------------------------------------- in layers


def random_layers(num_inputs, outs):
    """Projections of one input in FP8, and the same with their matrices."""
    weights, _ = random_weights(num_inputs, outs)
    projections = [
        LoraProjection(
            weight,
            draw(each, seed=each, **BF16) if number % 2 else None,
            draw(RANK, num_inputs, seed=number).mul_(0.1).requires_grad_(),
            draw(each, RANK, seed=number).mul_(0.1).requires_grad_(),
            SCALING,
        )
        for number, (weight, each) in enumerate(zip(weights, outs, strict=True))
    ]
    return projections, [
        each._replace(weight=weight.matrix()) for each, weight in zip(projections, weights, strict=True)
    ]


def run(function, leaves, douts):
    outputs = function()
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [out.detach() for out in outputs], torch.autograd.grad(outputs, leaves, douts)


def assert_close(found, expected, error):
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other.double()).norm() <= error * other.double().norm()


@pytest.mark.parametrize("given", ["all", "rows", "slice", "detect"])
@pytest.mark.parametrize("num_rows", [1, 80, 300])
@pytest.mark.parametrize("joined", [False, True])
def test_layers(num_rows, given, joined, implementation, poisoned_memory):
    outs = (48, 32, 16)
    projections, matrices = random_layers(96, outs)
    x = draw(num_rows, 96, **BF16).requires_grad_()
    active = torch.arange(num_rows // 3, num_rows // 3 + max(1, num_rows // 4), device=DEVICE)
    slices = slice(active[0].item(), active[-1].item() + 1)
    rows = {"all": None, "rows": active, "slice": slices, "detect": detect}[given]
    douts = [draw(num_rows, each, seed=each, **BF16) for each in outs]
    inactive = [row for row in range(num_rows) if given != "all" and row not in active]
    for dout in douts:
        dout[inactive] = 0
    leaves = [x, *(leaf for each in projections for leaf in (each.lora_A, each.lora_B))]
    groups = LoraGroup.stack(projections, joined=joined), LoraGroup.stack(matrices)
    assert (groups[0].joined is not None) == (joined and implementation is not reference)
    groups[0].refresh()
    results = [run(partial(lora_linear, x, group, rows), leaves, douts) for group in groups]
    for found, expected in zip(*results, strict=True):
        assert_close(found, expected, 0.06)
    # Adapters' gradients are those of the same X and dY; s B is rounded if it lies beside the weight.
    assert_close(results[0][1][1:], results[1][1][1:], 2 * torch.finfo(torch.bfloat16).eps if joined else 1e-6)
    assert not results[0][1][0][inactive].any()


@pytest.mark.parametrize("num_rows", [7, 200])
def test_layers_take_rows_that_are_known_in_fp8(num_rows, implementation, poisoned_memory):
    (projection,), _ = random_layers(96, (48,))
    source, dout = draw(num_rows, 96, **BF16), draw(num_rows, 48, seed=1, **BF16)
    weight, group = draw(96, seed=2, **BF16), LoraGroup.stack([projection])
    function = partial(rms_norm, weight=weight, eps=1e-6)
    in_fp8 = Fp8Rows.beside(source)
    x = function(source, in_fp8=in_fp8).requires_grad_()
    leaves, recompute = [x, projection.lora_A, projection.lora_B], Recompute(function, (source,))
    expected, found = (
        run(partial(lora_linear, x, group, None, each), leaves, [dout])
        for each in (recompute, recompute._replace(in_fp8=in_fp8))
    )
    for one, other in zip(expected, found, strict=True):
        assert all(map(torch.equal, one, other))
    in_fp8.codes.view(torch.uint8).zero_()
    (out,) = lora_linear(x, group, None, recompute._replace(in_fp8=in_fp8))
    assert_close([out], [SCALING * (x @ group.stacked_A.T) @ group.stacked_B.T], 0.02)


@pytest.mark.parametrize("num_rows", [7, 200])
@pytest.mark.parametrize("joined", [False, True])
def test_a_gated_layer(num_rows, joined, implementation, poisoned_memory):
    projections, matrices = random_layers(96, (48,))
    gate, up = (draw(num_rows, 96, seed=number, **BF16).requires_grad_() for number in range(2))
    dout = draw(num_rows, 48, seed=2, **BF16)
    leaves = [gate, up, projections[0].lora_A, projections[0].lora_B]

    def function(group, in_fp8):
        hidden = gated(gate, up, "silu", in_fp8)
        return gated_lora_linear(hidden, GatedInputs(gate, up, "silu", in_fp8), group)

    groups = LoraGroup.stack(projections, joined=joined), LoraGroup.stack(matrices)
    groups[0].refresh()
    results = [
        run(partial(function, group, in_fp8), leaves, [dout])
        for group in groups[:1]
        for in_fp8 in (None, Fp8Rows.beside(gate))
    ]
    for one, other in zip(*results, strict=True):
        assert all(map(torch.equal, one, other))
    for found, expected in zip(results[0], run(partial(function, groups[1], None), leaves, [dout]), strict=True):
        assert_close(found, expected, 0.06)
