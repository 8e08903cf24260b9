"""Weights joined with their adapters: outputs and gradients of the parts, on a GPU or in Triton's interpreter."""

import pytest
import torch
from pairwise import pairwise
from random_cases import (
    DEVICE,
    DTYPES,
    as_leaves,
    assert_as_good,
    draw,
    quantised,
    random_group,
    results_of_parts,
    twice,
)

from sebp_edge.ops import GatedInputs, LoraGroup, gated, gated_lora_linear, lora_linear

pytestmark = pytest.mark.usefixtures("our_kernels")


def outputs_and_gradients(x, projections, douts, dtype, adapter_dtype, *, joined):
    leaves, x = as_leaves(projections, dtype, adapter_dtype), x.to(DEVICE, dtype).requires_grad_()
    group = LoraGroup.stack(leaves, joined=joined)
    assert (group.joined is not None) == joined
    outs = lora_linear(x, group)
    adapters = [*(p.lora_A for p in leaves), *(p.lora_B for p in leaves)]
    return [*outs, *torch.autograd.grad(outs, [x, *adapters], [dout.to(DEVICE, dtype) for dout in douts])]


@pairwise(
    dtype=DTYPES,
    **{"num_rows, num_in, outs, rank": [(1, 8, (8,), 1), (67, 40, (24, 8, 8), 5), (130, 136, (200, 129), 16)]},
)
def test_outputs_and_gradients_are_those_of_the_parts(num_rows, num_in, outs, rank, dtype, poisoned_memory):
    x, projections, _, douts = random_group(num_rows, num_in, outs, rank, num_rows)
    x, douts = x / num_in**0.5, [dout / num_in**0.5 for dout in douts]
    # fp64 has no kernels on a GPU, and its products are the reference.
    exact = [value.cpu() for value in results_of_parts(x, projections, douts)]
    found, again = twice(lambda: outputs_and_gradients(x, projections, douts, dtype, torch.float32, joined=True))
    apart = outputs_and_gradients(x, projections, douts, dtype, torch.float32, joined=False)
    for one, same, other, truth in zip(found, again, apart, exact, strict=True):
        assert torch.equal(one, same)
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        error, allowed = ((value.detach().cpu().double() - truth).norm() / truth.norm() for value in (one, other))
        assert error <= 2 * allowed + 1e-4


@pytest.mark.parametrize("num_rows", [1, 70])
def test_a_gated_product_has_the_gradients_of_a_gate_and_a_projection(num_rows, poisoned_memory):
    _, projections, _, _ = random_group(1, 40, (24,), 3, 1)
    sides = draw(num_rows, 80).chunk(2, dim=-1)
    dout, results = draw(num_rows, 24, seed=2), []
    for joined in (True, False):
        (projection,) = as_leaves(projections, torch.float32, torch.float32)
        gate, up = (side.detach().requires_grad_() for side in sides)
        group = LoraGroup.stack([projection], joined=joined)
        out = gated_lora_linear(gated(gate, up, "silu"), GatedInputs(gate, up, "silu"), group)
        leaves = [gate, up, projection.lora_A, projection.lora_B]
        results.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
    for one, other in zip(*results, strict=True):
        assert_as_good(one, other.double(), torch.float32)


def test_no_rows_and_many_rows_are_multiplied_apart():
    x, projections, _, douts = random_group(1025, 8, (8,), 2, 1025)
    apart = outputs_and_gradients(x, projections, douts, torch.float32, torch.float32, joined=True)
    for one, truth in zip(apart, results_of_parts(x, projections, douts), strict=True):
        assert_as_good(one, truth.detach().to(DEVICE), torch.float32)
    (none, *_) = outputs_and_gradients(x[:0], projections, [douts[0][:0]], torch.float32, torch.float32, joined=True)
    assert none.shape == (0, 8)


def test_changed_adapters_are_used_after_a_refresh():
    _, projections, _, _ = random_group(9, 8, (8, 16), 2, 9)
    leaves = as_leaves(projections, torch.float32, torch.float32)
    group = LoraGroup.stack(leaves, joined=True)
    with torch.no_grad():
        for leaf in leaves:
            leaf.lora_A.mul_(3)
            leaf.lora_B.neg_()
    group.refresh()
    fresh = LoraGroup.stack(leaves, joined=True)
    assert torch.equal(group.joined.matrix, fresh.joined.matrix)
    assert torch.equal(group.stacked_B, fresh.stacked_B)


def test_a_weight_that_is_kept_dequantised_has_the_bits_of_the_same_weight_in_full():
    x, projections, _, _ = random_group(9, 8, (8, 16), 2, 9)
    leaves = as_leaves(projections, torch.float32, torch.float32)
    packed, full = zip(*(quantised(leaf, []) for leaf in leaves), strict=True)
    packed = [leaf._replace(weight=leaf.weight._replace(identity=(number,))) for number, leaf in enumerate(packed)]
    kept, whole = LoraGroup.stack(packed, joined=True, dequantised=True), LoraGroup.stack(list(full), joined=True)
    assert torch.equal(kept.joined.matrix, whole.joined.matrix)
    x = x.to(DEVICE, torch.float32)
    for one, other in zip(lora_linear(x, kept), lora_linear(x, whole), strict=True):
        assert torch.equal(one, other)


def test_adapters_of_large_rank_stay_apart():
    _, projections, _, _ = random_group(1, 8, (8, 8), 65, 1)
    leaves = as_leaves(projections, torch.float32, torch.float32)
    assert LoraGroup.stack(leaves, joined=True).joined is None
    assert LoraGroup.stack(leaves[:1], joined=True).joined is not None


def give_places(leaves):
    """Gives tensors, A_1, B_1, A_2 and so on, a `main_grad` each, one after another."""
    flat = torch.randn(sum(map(torch.Tensor.numel, leaves))).to(DEVICE)
    for leaf, part in zip(leaves, flat.split([leaf.numel() for leaf in leaves]), strict=True):
        leaf.main_grad = part.view_as(leaf)


@pytest.mark.parametrize("is_gated", [False, True])
def test_kernels_add_gradients_to_their_places(is_gated):
    num_rows, num_in, rank, outs = 67, 40, 8, (24,) if is_gated else (24, 8, 16)
    x, projections, _, douts = random_group(num_rows, num_in, outs, rank, num_rows)
    projections, up = as_leaves(projections, torch.float32, torch.float32), draw(num_rows, num_in, seed=8)
    x, up, *douts = (each.float().to(DEVICE) for each in (x, up, *douts))
    group, leaves = (
        LoraGroup.stack(projections, joined=True),
        [leaf for p in projections for leaf in (p.lora_A, p.lora_B)],
    )
    x.requires_grad_()

    def gradients():
        outs = [gated_lora_linear(x * up, GatedInputs(x, up, "silu"), group)] if is_gated else lora_linear(x, group)
        return torch.autograd.grad(outs, leaves, douts, allow_unused=True)

    expected = gradients()
    give_places(leaves)
    earlier = [leaf.main_grad.clone() for leaf in leaves]
    assert gradients() == tuple(None for _ in leaves)
    for leaf, before, truth in zip(leaves, earlier, expected, strict=True):
        assert (leaf.main_grad - before - truth).norm() <= 1e-6 * (before.norm() + truth.norm())
    # Elsewhere they lie in another order, so that autograd gets them.
    give_places(leaves[::-1])
    assert all(map(torch.equal, gradients(), expected))
