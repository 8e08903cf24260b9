"""The op on plain PyTorch: sums and gradients of its parts, and what it keeps. Its kernel is in test_small_kernels."""

import pytest
import torch
from random_cases import quantised, random_group

from sebp_edge.ops import ACTIVATIONS, GatedInputs, LoraGroup, gated, gated_lora_linear, lora_linear


def draw_group(outs=(7,), rank=3, num_in=10):
    """Its adapters are leaves."""
    _, projections, _, _ = random_group(1, num_in, outs, rank, 1)
    return [p._replace(lora_A=p.lora_A.requires_grad_(), lora_B=p.lora_B.requires_grad_()) for p in projections]


def draw_sides(*size):
    generator = torch.Generator().manual_seed(1)
    return [half.detach().requires_grad_() for half in torch.randn(*size, generator=generator).double().chunk(2, -1)]


def as_one(gate, up, activation, projections):
    hidden = gated(gate, up, activation)
    return gated_lora_linear(hidden, GatedInputs(gate, up, activation), LoraGroup.stack(projections))


@pytest.mark.parametrize("shape", [(1, 20), (9, 20), (2, 3, 20), (0, 20)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_it_is_a_gate_and_a_projection_one_after_the_other(shape, activation):
    sides, (projection,) = draw_sides(*shape), draw_group()
    leaves = [*sides, projection.lora_A, projection.lora_B]
    out = as_one(*sides, activation, [projection])
    (expected,) = lora_linear(gated(*sides, activation), LoraGroup.stack([projection]))
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).double()
    found = torch.autograd.grad(out, leaves, dout)
    for one, other in zip(found, torch.autograd.grad(expected, leaves, dout), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_its_gradients_are_the_derivatives(activation):
    (projection,) = draw_group()

    def run(gate, up, lora_A, lora_B):
        return as_one(gate, up, activation, [projection._replace(lora_A=lora_A, lora_B=lora_B)])

    assert torch.autograd.gradcheck(run, (*draw_sides(4, 20), projection.lora_A, projection.lora_B))


def test_it_keeps_gate_and_up_and_not_their_product():
    (gate, up), (projection,) = draw_sides(40, 20), draw_group()
    kept = []
    hidden = gated(gate, up, "silu")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = gated_lora_linear(hidden, GatedInputs(gate, up, "silu"), LoraGroup.stack([projection]))
    addresses = {tensor.data_ptr() for tensor in kept}
    assert {gate.data_ptr(), up.data_ptr()} <= addresses
    assert hidden.data_ptr() not in addresses
    dgate, dup = torch.autograd.grad(out, [gate, up], torch.ones_like(out))
    assert dup.data_ptr() - dgate.data_ptr() == 10 * dgate.itemsize


def test_a_quantised_weight_gives_the_results_of_its_matrix():
    sides, (projection,) = draw_sides(9, 20), draw_group()
    packed, plain = quantised(projection, [])
    leaves = [*sides, projection.lora_A, projection.lora_B]
    found, expected = (as_one(*sides, "silu", [one]) for one in (packed, plain))
    torch.testing.assert_close(found, expected)
    for one, other in zip(*(torch.autograd.grad(out.sum(), leaves) for out in (found, expected)), strict=True):
        torch.testing.assert_close(one, other)


def test_several_projections_are_refused():
    with pytest.raises(ValueError, match="one projection, but the group has 2"):
        as_one(*draw_sides(3, 20), "silu", draw_group((7, 5)))
