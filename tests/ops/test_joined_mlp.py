"""A gated MLP as one operation against its parts, on a GPU or in Triton's interpreter."""

import pytest
import torch
from random_cases import DEVICE, DTYPES, draw

from sebp_edge.ops import (
    GatedInputs,
    LoraGroup,
    LoraProjection,
    Recompute,
    can_join_mlp,
    gated,
    gated_lora_linear,
    joined_mlp,
    lora_linear,
)


@pytest.fixture(autouse=True)
def our_kernels(request):
    if DEVICE == "cpu":
        request.getfixturevalue("kernels")


def draw_mlp(num_in, num_columns, num_out, ranks, dtype, *, bias):
    """Projections of gate, up and down, whose adapters are fp32 leaves."""

    def projection(rows, columns, rank, seed):
        adapters = [draw(*size, seed=seed + i) for i, size in enumerate(((rank, columns), (rows, rank)))]
        small = [adapter.div(columns**0.5).requires_grad_() for adapter in adapters]
        weight = draw(rows, columns, dtype=dtype, seed=seed + 2) / columns**0.5
        return LoraProjection(weight, draw(rows, dtype=dtype, seed=seed + 3) if bias else None, *small, 1.5)

    sides = [projection(num_columns, num_in, ranks[0], seed) for seed in (0, 10)]
    return [*sides, projection(num_out, num_columns, ranks[1], 20)]


def by_parts(x, gate_up, down, activation):
    gate, up = lora_linear(x, gate_up)
    return gated_lora_linear(gated(gate, up, activation), GatedInputs(gate, up, activation), down)


def exactly(x, projections, activation):
    def linear(x, p, bias):
        return torch.nn.functional.linear(x, p.weight.double(), bias) + p.scaling * (
            x @ p.lora_A.double().T @ p.lora_B.double().T
        )

    gate, up, down = projections
    biases = [None if p.bias is None else p.bias.double() for p in projections]
    hidden = gated(linear(x, gate, biases[0]), linear(x, up, biases[1]), activation)
    return linear(hidden, down, biases[2])


def with_gradients(out, x, projections, dout):
    leaves = [x, *(p.lora_A for p in projections), *(p.lora_B for p in projections)]
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sizes", "ranks", "activation", "bias"),
    [
        ((1, 64, 72, 40), (16, 16), "silu", False),
        ((67, 40, 72, 24), (5, 3), "gelu_tanh", True),
        ((130, 136, 200, 72), (16, 8), "silu", False),
        ((300, 16, 64, 136), (20, 16), "silu", True),
    ],
)
def test_outputs_and_gradients_are_those_of_the_parts(sizes, ranks, activation, bias, dtype, poisoned_memory):
    num_rows, *columns = sizes
    projections = draw_mlp(*columns, ranks, dtype, bias=bias)
    gate_up, down = (LoraGroup.stack(part, joined=True) for part in (projections[:2], projections[2:]))
    x = draw(num_rows, columns[0], dtype=dtype, seed=40).requires_grad_()
    dout = draw(num_rows, columns[2], dtype=dtype, seed=41)
    assert can_join_mlp(x, gate_up, down)
    found, again = (with_gradients(joined_mlp(x, gate_up, down, activation), x, projections, dout) for _ in range(2))
    parts = with_gradients(by_parts(x, gate_up, down, activation), x, projections, dout)
    wide = x.detach().double().requires_grad_()
    exact = with_gradients(exactly(wide, projections, activation), wide, projections, dout.double())
    for one, same, other, truth in zip(found, again, parts, exact, strict=True):
        assert torch.equal(one, same)
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        error, allowed = ((value.double() - truth).norm() / truth.norm() for value in (one, other))
        assert error <= 2 * allowed + 1e-5


def test_leading_dimensions_stay_and_x_need_not_be_kept():
    projections = draw_mlp(16, 24, 8, (2, 2), torch.float32, bias=False)
    gate_up, down = (LoraGroup.stack(part, joined=True) for part in (projections[:2], projections[2:]))
    x, kept = draw(2, 3, 16).requires_grad_(), []
    root = x.detach().clone()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = joined_mlp(x, gate_up, down, "silu", Recompute(lambda root: root * 1.0, (root,)))
    assert out.shape == (2, 3, 8)
    assert x.data_ptr() not in {tensor.data_ptr() for tensor in kept}
    found = with_gradients(out, x, projections, torch.ones_like(out))
    expected = with_gradients(joined_mlp(x, gate_up, down, "silu"), x, projections, torch.ones_like(out))
    assert all(map(torch.equal, found, expected))


def test_other_groups_and_rows_are_left_to_the_parts(monkeypatch):
    projections = draw_mlp(16, 24, 8, (2, 2), torch.float32, bias=False)
    gate_up, down = (LoraGroup.stack(part, joined=True) for part in (projections[:2], projections[2:]))
    apart = LoraGroup.stack(projections[2:])
    x = draw(4, 16)
    assert can_join_mlp(x, gate_up, down)
    assert not can_join_mlp(x, gate_up, apart)
    assert not can_join_mlp(x, down, down)
    assert not can_join_mlp(x[:0], gate_up, down)
    wide = LoraGroup.stack(draw_mlp(16, 24, 8, (2, 33), torch.float32, bias=False)[2:], joined=True)
    assert not can_join_mlp(x, gate_up, wide)
    monkeypatch.setattr("sebp_edge.ops.joined_weight.MAX_ROWS", 3)
    assert not can_join_mlp(x, gate_up, down)
