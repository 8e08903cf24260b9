"""Adapters side by side on one weight: each row's outputs and gradients are those of its owner alone."""

from itertools import accumulate, chain

import pytest
import torch
from pairwise import pairwise
from random_cases import DEVICE, DTYPES, as_leaves, quantised, random_group, results_of_parts

from sebp_edge.ops import GatedInputs, LoraGroup, gated, gated_lora_linear, lora_linear

# Rows, inputs, outputs, rank, and how many rows each adapter owns; in the last two there is filler.
OWNED = {
    "mixed": (67, 40, (24, 8, 8), 5, (30, 1, 36)),
    "one": (130, 136, (200, 129), 16, (0, 130, 0)),
    "single": (1, 8, (8,), 1, (0, 0, 1)),
    "filled": (90, 16, (40, 8), 4, (33, 17, 20)),
    "only one filled": (70, 16, (24,), 4, (0, 5, 0)),
}
NUM_ADAPTERS = 3


@pytest.fixture(params=["kernels", "plain"])
def joined(request):
    if request.param == "kernels" and DEVICE == "cpu":
        request.getfixturevalue("kernels")
    return request.param == "kernels"


def begins_of(*sizes):
    """Where the rows of each adapter begin, and those of the last end."""
    return torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=DEVICE)


def rows_of(cu_owned):
    """The rows of each adapter."""
    ends = cu_owned.tolist()
    return list(map(slice, ends[:-1], ends[1:]))


def draw_adapters(case):
    """Returns x, the projections with each of the adapters, and the gradients of the outputs; fp64."""
    num_rows, num_in, outs, rank, sizes = OWNED[case]
    x, projections, _, douts = random_group(num_rows, num_in, outs, rank, num_rows)
    for dout in douts:
        dout[sum(sizes) :] = 0  # filler has no gradient
    adapters = [random_group(1, num_in, outs, rank, 1, seed=1 + number)[1] for number in range(NUM_ADAPTERS)]
    each = [
        [own._replace(lora_A=p.lora_A, lora_B=p.lora_B) for own, p in zip(projections, adapter, strict=True)]
        for adapter in adapters
    ]
    return x / num_in**0.5, each, [dout / num_in**0.5 for dout in douts]


def on_same_weights(each, dtype):
    """Returns the projections as leaves, all adapters on the first one's weights, and the leaves of each adapter."""
    leaves = [as_leaves(projections, dtype, torch.float32) for projections in each]
    shared = [
        p._replace(weight=own.weight, bias=own.bias)
        for projections in leaves
        for p, own in zip(projections, leaves[0], strict=True)
    ]
    return shared, [[*(p.lora_A for p in own), *(p.lora_B for p in own)] for own in leaves]


def run(x, each, douts, cu_owned, dtype, *, joined):
    """Returns the outputs and the gradients of x, and the gradients of each adapter."""
    shared, adapters = on_same_weights(each, dtype)
    x = x.to(DEVICE, dtype).requires_grad_()
    group = LoraGroup.stack(shared, joined=joined, num_adapters=len(each))
    assert (group.joined is not None) == joined
    outs = lora_linear(x, group, cu_owned=cu_owned)
    leaves = [x, *(leaf for adapter in adapters for leaf in adapter)]
    dx, *grads = torch.autograd.grad(outs, leaves, [dout.to(DEVICE, dtype) for dout in douts])
    size = len(adapters[0])
    return [*outs, dx], [grads[begin : begin + size] for begin in range(0, len(grads), size)]


@pairwise(dtype=DTYPES, case=list(OWNED))
def test_each_row_has_the_results_of_its_owner_alone(case, dtype, joined, poisoned_memory):
    x, each, douts = draw_adapters(case)
    cu_owned = begins_of(*OWNED[case][-1])
    found, again = (run(x, each, douts, cu_owned, dtype, joined=joined) for _ in range(2))
    tolerance = max(4 * torch.finfo(dtype).eps, 1e-5)
    for adapter, (projections, own) in enumerate(zip(each, rows_of(cu_owned), strict=True)):
        truths = results_of_parts(x[own], projections, [dout[own] for dout in douts])
        values = [*(value[own] for value in found[0]), *found[1][adapter]]
        for value, truth in zip(values, truths, strict=True):
            assert (value.detach().cpu().double() - truth).norm() <= tolerance * truth.norm()
    everything = [[*rows, *(grad for grads in of_adapters for grad in grads)] for rows, of_adapters in (found, again)]
    assert all(map(torch.equal, *everything))
    assert all(value.isfinite().all() for value in found[0])


@pytest.mark.parametrize("case", ["mixed", "filled"])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, in Triton's interpreter
def test_what_one_adapter_owns_does_not_depend_on_the_others(case, joined, poisoned_memory):
    x, each, douts = draw_adapters(case)
    cu_owned = begins_of(*OWNED[case][-1])
    own, *others = rows_of(cu_owned)
    found, grads = run(x, each, douts, cu_owned, torch.float32, joined=joined)
    broken = [[p._replace(lora_A=p.lora_A * torch.nan, lora_B=p.lora_B * torch.inf) for p in own] for own in each[1:]]
    for rows in others:
        x[rows] = torch.nan
        for dout in douts:
            dout[rows] = torch.nan
    beside, grads_beside = run(x, [each[0], *broken], douts, cu_owned, torch.float32, joined=joined)
    assert all(torch.equal(value[own], other[own]) for value, other in zip(found, beside, strict=True))
    assert all(map(torch.equal, grads[0], grads_beside[0]))
    if joined:
        assert all(value[others[-1].stop :].isfinite().all() for value in beside)


def run_gated(gate, up, adapters, dout, cu_owned, dtype, *, joined):
    """Returns the output of a gated product's projection, the gradients of both sides, and those of each adapter."""
    shared, leaves = on_same_weights(adapters, dtype)
    gate, up = (side.to(DEVICE, dtype).requires_grad_() for side in (gate, up))
    group = LoraGroup.stack(shared, joined=joined, num_adapters=len(adapters))
    source = GatedInputs(gate, up, "silu")
    out = gated_lora_linear(gated(*source), source, group, cu_owned)
    flat = [gate, up, *(leaf for own in leaves for leaf in own)]
    dgate, dup, *grads = torch.autograd.grad(out, flat, dout.to(DEVICE, dtype))
    return [out, dgate, dup], [grads[begin : begin + 2] for begin in range(0, len(grads), 2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, in Triton's interpreter
def test_a_gated_product_has_the_results_of_its_owner_alone(dtype, joined, poisoned_memory):
    num_rows, num_in, rank = 300, 40, 8
    adapters = [random_group(num_rows, num_in, (24,), rank, 1, seed=1 + number)[1] for number in range(NUM_ADAPTERS)]
    adapters = [[p._replace(weight=adapters[0][0].weight) for p in own] for own in adapters]
    gate, up = (random_group(num_rows, num_in, (24,), rank, 1, seed=seed)[0] / num_in**0.25 for seed in (7, 8))
    dout, cu_owned = random_group(num_rows, num_in, (24,), rank, num_rows)[3][0], begins_of(140, 0, 127)
    dout[cu_owned[-1] :] = 0
    found = run_gated(gate, up, adapters, dout, cu_owned, dtype, joined=joined)
    tolerance = max(8 * torch.finfo(dtype).eps, 1e-5)
    for adapter, ((projection,), own) in enumerate(zip(adapters, rows_of(cu_owned), strict=True)):
        leaves = [each.clone().requires_grad_() for each in (gate[own], up[own], projection.lora_A, projection.lora_B)]
        hidden = torch.nn.functional.silu(leaves[0]) * leaves[1]
        truth = hidden @ projection.weight.T + projection.scaling * hidden @ leaves[2].T @ leaves[3].T
        truths = truth, *torch.autograd.grad(truth, leaves, dout[own])
        for value, expected in zip([*(value[own] for value in found[0]), *found[1][adapter]], truths, strict=True):
            assert (value.detach().cpu().double() - expected).norm() <= tolerance * expected.norm()
    own, *others = rows_of(cu_owned)
    for rows in others:
        gate[rows] = dout[rows] = torch.nan
    broken = [[p._replace(lora_A=p.lora_A * torch.nan) for p in own] for own in adapters[1:]]
    again = run_gated(gate, up, [adapters[0], *broken], dout, cu_owned, dtype, joined=joined)
    assert all(torch.equal(one[own], other[own]) for one, other in zip(again[0], found[0], strict=True))
    assert all(map(torch.equal, again[1][0], found[1][0]))


def test_more_rows_and_a_first_layer_without_a_gradient_of_its_input(joined, monkeypatch):
    monkeypatch.setattr("sebp_edge.ops.joined_weight.MAX_ROWS", 39)
    x, each, douts = draw_adapters("mixed")
    cu_owned = begins_of(*OWNED["mixed"][-1])
    _, grads = run(x, each, douts, cu_owned, torch.float32, joined=joined)
    shared, adapters = on_same_weights(each, torch.float32)
    group = LoraGroup.stack(shared, joined=joined, num_adapters=NUM_ADAPTERS)
    outs = lora_linear(x.to(DEVICE, torch.float32), group, cu_owned=cu_owned)
    leaves = [leaf for adapter in adapters for leaf in adapter]
    for found, expected in zip(
        torch.autograd.grad(outs, leaves, [dout.to(DEVICE, torch.float32) for dout in douts]),
        (grad for of_adapter in grads for grad in of_adapter),
        strict=True,
    ):
        assert torch.equal(found, expected)


def test_changed_adapters_are_used_after_a_refresh(joined):
    _, each, _ = draw_adapters("mixed")
    shared, adapters = on_same_weights(each, torch.float32)
    group = LoraGroup.stack(shared, joined=joined, num_adapters=NUM_ADAPTERS)
    with torch.no_grad():
        for leaf in adapters[2]:
            leaf.mul_(3)
    group.refresh()
    fresh = LoraGroup.stack(shared, joined=joined, num_adapters=NUM_ADAPTERS)
    assert torch.equal(group.stacked_A, fresh.stacked_A)
    if joined:
        assert torch.equal(group.joined.matrix, fresh.joined.matrix)
    else:
        assert torch.equal(group.stacked_B, fresh.stacked_B)


def test_no_rows_have_no_gradients(joined):
    x, each, douts = draw_adapters("mixed")
    outs, grads = run(x[:0], each, [dout[:0] for dout in douts], begins_of(0, 0, 0), torch.float32, joined=joined)
    assert [out.shape for out in outs] == [(0, 24), (0, 8), (0, 8), (0, 40)]
    assert not any(grad.any() for of_adapter in grads for grad in of_adapter)


def test_what_cannot_lie_side_by_side_is_refused():
    x, each, _ = draw_adapters("single")
    x, (one, two, _) = x.float().to(DEVICE), [as_leaves(own, torch.float32, torch.float32) for own in each]
    with pytest.raises(ValueError, match="on the same weights"):
        LoraGroup.stack([*one, *two], num_adapters=2)
    packed, _ = quantised(one[0], [])
    with pytest.raises(ValueError, match="not quantised"):
        LoraGroup.stack([packed, packed], num_adapters=2)
    group = LoraGroup.stack([one[0], one[0]], num_adapters=2)
    one_row = begins_of(1, 0)
    for bad in (None, one_row.long(), one_row[:2]):
        with pytest.raises(ValueError, match=r"owners|begin at"):
            lora_linear(x, group, cu_owned=bad)
        with pytest.raises(ValueError, match=r"owners|begin at"):
            gated_lora_linear(x, GatedInputs(x, x, "silu"), group, bad)
    for sizes in ((2, 0), (1, 1), (2, -1)):
        with pytest.raises(ValueError, match="one after another from 0 to 1"):
            lora_linear(x, group, cu_owned=begins_of(*sizes))
    with pytest.raises(ValueError, match="all active"):
        lora_linear(x, group, slice(0, 1), cu_owned=one_row)
    with pytest.raises(ValueError, match="only then"):
        lora_linear(x, LoraGroup.stack(one), cu_owned=one_row)


def give_places(leaves):
    """Gives tensors, A_1, B_1, A_2 and so on, a `main_grad` each, one after another."""
    flat = torch.randn(sum(map(torch.Tensor.numel, leaves))).to(DEVICE)
    for leaf, part in zip(leaves, flat.split([leaf.numel() for leaf in leaves]), strict=True):
        leaf.main_grad = part.view_as(leaf)


@pytest.mark.parametrize("num_adapters", [1, NUM_ADAPTERS])
@pytest.mark.parametrize("is_gated", [False, True])
def test_kernels_add_gradients_to_their_places(num_adapters, is_gated, kernels):
    num_rows, num_in, rank, outs = 67, 40, 8, (24,) if is_gated else (24, 8, 16)
    adapters = [random_group(1, num_in, outs, rank, 1, seed=1 + number)[1] for number in range(num_adapters)]
    adapters = [
        [own._replace(lora_A=p.lora_A, lora_B=p.lora_B) for own, p in zip(adapters[0], adapter, strict=True)]
        for adapter in adapters
    ]
    shared, leaves = on_same_weights(adapters, torch.float32)
    x, up = (random_group(num_rows, num_in, outs, rank, 1, seed=seed)[0].float().to(DEVICE) for seed in (7, 8))
    douts = [dout.float().to(DEVICE) for dout in random_group(num_rows, num_in, outs, rank, num_rows)[3]]
    cu_owned = begins_of(30, 1, 36) if num_adapters > 1 else None
    group = LoraGroup.stack(shared, joined=True, num_adapters=num_adapters)
    x.requires_grad_()

    def gradients():
        if is_gated:
            outs = [gated_lora_linear(x * up, GatedInputs(x, up, "silu"), group, cu_owned)]
        else:
            outs = lora_linear(x, group, cu_owned=cu_owned)
        return torch.autograd.grad(outs, [leaf for own in leaves for leaf in own], douts, allow_unused=True)

    expected = gradients()
    earlier = []
    for own in leaves:
        pairs = zip(own[: len(outs)], own[len(outs) :], strict=True)
        give_places([leaf for pair in pairs for leaf in pair])
        earlier += [leaf.main_grad.clone() for leaf in own]
    found = gradients()
    for leaf, before, truth in zip(chain(*leaves), earlier, expected, strict=True):
        assert (leaf.main_grad - before - truth).norm() <= 1e-6 * (before.norm() + truth.norm())
    assert found == tuple(None for _ in found)
    for leaf in chain(*leaves):
        leaf.overwrite_main_grad = True
    gradients()
    assert all(torch.equal(leaf.main_grad, truth) for leaf, truth in zip(chain(*leaves), expected, strict=True))
