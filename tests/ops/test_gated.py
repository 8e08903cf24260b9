"""The op on plain PyTorch: the formula, its gradients, and what it keeps. Its kernels are in test_small_kernels."""

import pytest
import torch
import torch.nn.functional as F

from sebp_edge.ops import ACTIVATIONS, gated

ACTIVATE = {"silu": F.silu, "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh")}


def halves(*size, dtype=torch.float64, seed=0):
    """Gate and up as one projection makes them: halves of one matrix."""
    sides = torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    return [half.detach().requires_grad_() for half in sides.chunk(2, dim=-1)]


@pytest.mark.parametrize("shape", [(1, 2), (7, 10), (2, 3, 18), (0, 4)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_it_is_the_activated_gate_times_the_other(shape, activation):
    gate, up = halves(*shape)
    torch.testing.assert_close(gated(gate, up, activation), ACTIVATE[activation](gate) * up)


@pytest.mark.parametrize("shape", [(1, 2), (3, 10), (2, 2, 6), (0, 4)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_its_gradients_are_the_derivatives(shape, activation):
    assert torch.autograd.gradcheck(lambda gate, up: gated(gate, up, activation), halves(*shape))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_error_is_no_larger_than_plain_operations_in_the_same_dtype(activation, dtype):
    sides, (dout, _) = halves(65, 192, dtype=dtype), halves(65, 192, dtype=dtype, seed=1)

    def plain(gate, up):
        return ACTIVATE[activation](gate) * up

    def outputs_and_gradients(function, sides, dout):
        out = function(*sides)
        return out, *torch.autograd.grad(out, sides, dout)

    exact = outputs_and_gradients(plain, [side.detach().double().requires_grad_() for side in sides], dout.double())
    found = outputs_and_gradients(lambda gate, up: gated(gate, up, activation), sides, dout)
    for one, other, truth in zip(found, outputs_and_gradients(plain, sides, dout), exact, strict=True):
        assert one.dtype == dtype
        error, allowed = ((value.double() - truth).norm() / truth.norm() for value in (one, other))
        assert error <= 2 * allowed + 1e-4


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_it_keeps_its_inputs_and_makes_one_matrix_of_gradients(activation):
    gate, up = halves(2, 50, 16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = gated(gate, up, activation)
    assert [tensor.data_ptr() for tensor in kept] == [gate.data_ptr(), up.data_ptr()]
    gradients = torch.autograd.grad(out, [gate, up], torch.ones_like(out))
    left, right = (gradient.reshape(-1, 8) for gradient in gradients)
    assert left.data_ptr() == gradients[0].data_ptr()
    assert right.data_ptr() == left.data_ptr() + 8 * left.element_size()
    assert left.stride() == right.stride() == (16, 1)


def test_unknown_activations_and_unequal_inputs_are_refused():
    gate, up = halves(3, 8)
    with pytest.raises(ValueError, match="Unknown activation 'relu'; expected one of silu, gelu_tanh"):
        gated(gate, up, "relu")
    with pytest.raises(ValueError, match=r"same shape and dtype, but are \[3, 4\]"):
        gated(gate, up[:2], "silu")
    with pytest.raises(ValueError, match="same shape and dtype"):
        gated(gate, up.float(), "silu")
