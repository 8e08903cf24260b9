"""Our Triton kernels of norms and gates against plain PyTorch: on a GPU where there is one, else in the interpreter."""

import pytest
import torch
from random_cases import DEVICE, DTYPES, assert_as_good, assert_no_worse_than_torch, draw

pytest.importorskip("triton", reason="Triton is not installed on this platform")

from sebp_edge.ops import reference
from sebp_edge.ops.gpu import gated, rms_norm

# Heads, rows that fill a program each, and numbers of columns that are no power of two.
NORM_SHAPES = [(0, 5), (1, 1), (7, 5), (3, 5, 128), (40, 33), (3, 3072), (2, 16384)]
# So large that dx of a single column is not a difference of nearly equal numbers.
EPS = 0.5


@pytest.mark.parametrize("shape", NORM_SHAPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_equal_plain_pytorchs(shape, offset, dtype, poisoned_memory):
    x, weight, dout = draw(*shape, dtype=dtype), draw(shape[-1], dtype=dtype, seed=1), draw(*shape, dtype=dtype, seed=2)
    out, rstd = rms_norm.rms_norm(x, weight, EPS, offset)
    truth, true_rstd = reference.rms_norm(x.double(), weight.double(), EPS, offset)
    assert (out.dtype, out.shape, rstd.dtype) == (dtype, shape, torch.float32)
    torch.testing.assert_close(rstd.double(), true_rstd, rtol=1e-6, atol=0)
    assert_as_good(out, truth, dtype)
    exact = [x.double(), weight.double(), true_rstd]
    expected = reference.rms_norm_backward(dout.double(), *exact, offset, needs_dweight=True)
    found = rms_norm.rms_norm_backward(dout, x, weight, rstd, offset, needs_dweight=True)
    again = rms_norm.rms_norm_backward(dout, x, weight, rstd, offset, needs_dweight=True)
    for one, other, truth in zip(found, again, expected, strict=True):
        assert one.dtype == dtype
        assert torch.equal(one, other)
        assert_as_good(one, truth, dtype)
    dx, dweight = rms_norm.rms_norm_backward(dout, x, weight, rstd, offset, needs_dweight=False)
    assert dweight is None
    assert_as_good(dx, expected[0], dtype)


def views(dtype=torch.float32, seed=0):
    """Tensors [5, 6, 16] with various strides."""
    wide = draw(1, 5, 200, dtype=dtype, seed=seed)
    yield wide[..., 3:99].view(1, 5, 6, 16)[0]  # the heads of one of several projections
    yield draw(6, 5, 16, dtype=dtype, seed=seed).transpose(0, 1)
    yield draw(10, 12, 16, dtype=dtype, seed=seed)[::2, ::2]
    yield draw(5, 16, 6, dtype=dtype, seed=seed).transpose(1, 2)
    yield draw(5, 6, 32, dtype=dtype, seed=seed)[..., ::2]
    yield draw(1, 1, 16, dtype=dtype, seed=seed).expand(5, 6, 16)
    yield draw(5, 1, 16, dtype=dtype, seed=seed).expand(5, 6, 16)


@pytest.mark.slow
def test_norms_take_any_strides(poisoned_memory):
    weight = draw(16, seed=3)
    for x in views():
        expected, rstd = rms_norm.rms_norm(x.contiguous(), weight, 1e-6, 0.0)
        found, found_rstd = rms_norm.rms_norm(x, weight, 1e-6, 0.0)
        assert found.is_contiguous()
        assert torch.equal(found, expected)
        assert torch.equal(found_rstd, rstd)
        for dout in views(seed=1):
            given = (weight, rstd, 0.0)
            expected = rms_norm.rms_norm_backward(dout.contiguous(), x.contiguous(), *given, needs_dweight=True)
            found = rms_norm.rms_norm_backward(dout, x, *given, needs_dweight=True)
            assert torch.equal(found[0], expected[0])
            assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (7, 5), (3, 1030), (2, 2048)])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_equal_plain_pytorchs(shape, activation, dtype, poisoned_memory):
    num_rows, num_columns = shape
    gate, up = (3 * draw(num_rows, 2 * num_columns, dtype=dtype)).chunk(2, dim=1)
    dout = draw(*shape, dtype=dtype, seed=1)
    exact = gate.double(), up.double(), activation
    found = gated.gated(gate, up, activation)
    assert_as_good(found, reference.gated(*exact), dtype)
    dgate_up = gated.gated_backward(dout, gate, up, activation)
    assert dgate_up.shape == (num_rows, 2 * num_columns)
    for one, truth in zip(
        dgate_up.chunk(2, 1), reference.gated_backward(dout.double(), *exact).chunk(2, 1), strict=True
    ):
        assert_as_good(one, truth, dtype)
    # Strides do not matter.
    gate, up, dout = gate.contiguous(), up.T.contiguous().T, dout.T.contiguous().T
    assert torch.equal(gated.gated(gate, up, activation), found)
    assert torch.equal(gated.gated_backward(dout, gate, up, activation), dgate_up)


@pytest.mark.parametrize(
    ("shape", "rank"),
    [((0, 5), 16), ((1, 1), 1), ((7, 5), 40), ((33, 40), 1), ((64, 64), 16), ((70, 33), 40), ((5, 9), 257)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_before_an_adapter_equal_plain_pytorchs(shape, rank, dtype, poisoned_memory):
    num_rows, num_columns = shape
    gate, up = (3 * draw(num_rows, 2 * num_columns, dtype=dtype)).chunk(2, dim=1)
    dout, lora_A = draw(*shape, dtype=dtype, seed=1), draw(rank, num_columns, dtype=dtype, seed=2)
    lora_up = draw(num_rows, 2 * rank, dtype=dtype, seed=3)[:, rank:]
    dgate_up, dlora_A = gated.gated_lora_backward(dout, lora_up, lora_A, gate, up, "silu")
    truth, truth_A = reference.gated_lora_backward(*(x.double() for x in (dout, lora_up, lora_A, gate, up)), "silu")
    assert_as_good(dgate_up, truth, dtype)
    assert_as_good(dlora_A, truth_A, dtype)
    again = gated.gated_lora_backward(dout.T.contiguous().T, lora_up, lora_A, gate.contiguous(), up, "silu")
    assert torch.equal(again[0], dgate_up)
    assert torch.equal(again[1], dlora_A)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates_far_from_zero_are_open_or_shut(activation):
    gate = torch.tensor([[-1e4, -200.0, -90.0, 0.0, 90.0, 200.0, 1e4]], device=DEVICE)
    up = torch.full_like(gate, 2.0)
    shut = [0.0, 0.0, 0.0, 0.0]
    assert gated.gated(gate, up, activation).round().tolist() == [[*shut, 180.0, 400.0, 2e4]]
    dgate, dup = gated.gated_backward(torch.ones_like(gate), gate, up, activation).chunk(2, dim=1)
    torch.testing.assert_close(dgate, torch.tensor([[0.0, 0.0, 0.0, 1.0, 2.0, 2.0, 2.0]], device=DEVICE))
    torch.testing.assert_close(dup, torch.tensor([[*shut, 90.0, 200.0, 1e4]], device=DEVICE))


def outputs_and_gradients(function, tensors, dout):
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    out = function(*tensors)
    return out, *torch.autograd.grad(out, tensors, dout)


def assert_no_worse_than_the_model(function, plain, tensors, dout):
    """Compares output and gradients of `function` with those of a model's own operations in the same dtype."""
    exact = outputs_and_gradients(plain, [tensor.double() for tensor in tensors], dout.double())
    found, own = (outputs_and_gradients(one, tensors, dout) for one in (function, plain))
    for one, other, truth in zip(found, own, exact, strict=True):
        assert_no_worse_than_torch(one, other, truth)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(836, 3072), (1, 3072), (4096, 16384), (836, 24, 128)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms_of_real_shapes_err_no_more_than_the_models(shape, offset):
    from sebp_edge.ops import rms_norm

    def plain(x, weight):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        # As Llama rounds it, and as Gemma does.
        return weight * normal.to(x.dtype) if offset == 0.0 else (normal * (1.0 + weight.to(wide.dtype))).to(x.dtype)

    x, weight, dout = (draw(*size, dtype=torch.bfloat16, seed=n) for n, size in enumerate((shape, shape[-1:], shape)))
    assert_no_worse_than_the_model(lambda x, weight: rms_norm(x, weight, 1e-5, offset), plain, [x, weight], dout)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(836, 8192), (1, 8192), (4096, 14336)])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates_of_real_shapes_err_no_more_than_the_models(shape, activation):
    from torch.nn.functional import gelu, silu

    from sebp_edge.ops import gated

    def plain(gate, up):
        return (silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")) * up

    sides = draw(shape[0], 2 * shape[1], dtype=torch.bfloat16).chunk(2, dim=1)
    dout = draw(*shape, dtype=torch.bfloat16, seed=1)
    assert_no_worse_than_the_model(lambda gate, up: gated(gate, up, activation), plain, sides, dout)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [96, 836, 4096])
def test_gates_before_an_adapter_err_no_more_than_one_after_the_other(num_rows):
    from sebp_edge.ops import GatedInputs, LoraGroup, LoraProjection, gated_lora_linear, lora_linear
    from sebp_edge.ops import gated as gate_of

    sizes = [(num_rows, 8192), (num_rows, 8192), (16, 8192), (3072, 16)]
    inputs = [draw(*size, dtype=torch.bfloat16, seed=n) for n, size in enumerate(sizes)]
    weight, dout = draw(3072, 8192, dtype=torch.bfloat16, seed=5) / 90, draw(num_rows, 3072, dtype=torch.bfloat16)

    def run(function, dtype):
        leaves = [value.to(dtype).requires_grad_() for value in inputs]
        gate, up, *adapter = leaves
        group = LoraGroup.stack([LoraProjection(weight.to(dtype), None, *adapter, 0.5)])
        return torch.autograd.grad(function(gate, up, group), leaves, dout.to(dtype))

    def one_after_the_other(gate, up, group):
        return lora_linear(gate_of(gate, up, "silu"), group)[0]

    def as_one(gate, up, group):
        return gated_lora_linear(gate_of(gate, up, "silu"), GatedInputs(gate, up, "silu"), group)

    exact = run(one_after_the_other, torch.float64)
    for found, other, truth in zip(
        run(as_one, torch.bfloat16), run(one_after_the_other, torch.bfloat16), exact, strict=True
    ):
        error, allowed = (float((value.double() - truth).norm() / truth.norm()) for value in (found, other))
        assert error <= 1.1 * allowed + 1e-4
