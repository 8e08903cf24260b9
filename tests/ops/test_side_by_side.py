"""Adapters side by side on one weight: each row's outputs and gradients are those of its owner alone."""

from itertools import chain

import pytest
import torch
from pairwise import pairwise
from random_cases import DEVICE, DTYPES, as_leaves, quantised, random_group, results_of_parts

from sebp_edge.ops import GatedInputs, LoraGroup, Owners, gated, gated_lora_linear, lora_linear, reference

# The owners of rows: mixed; of one adapter only, so that others have none; a single row.
OWNERS = {"mixed": (67, 40, (24, 8, 8), 5), "one": (130, 136, (200, 129), 16), "single": (1, 8, (8,), 1)}
NUM_ADAPTERS = 3


@pytest.fixture(params=["kernels", "plain"])
def joined(request):
    if request.param == "kernels" and DEVICE == "cpu":
        request.getfixturevalue("kernels")
    return request.param == "kernels"


def draw_owners(case, num_rows):
    owners = torch.randint(NUM_ADAPTERS, (num_rows,), generator=torch.Generator().manual_seed(num_rows))
    return (owners if case == "mixed" else torch.full_like(owners, 1)).int()


def draw_adapters(case):
    """Returns x, the projections with each of the adapters, and the gradients of the outputs; fp64."""
    num_rows, num_in, outs, rank = OWNERS[case]
    x, projections, _, douts = random_group(num_rows, num_in, outs, rank, num_rows)
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


def run(x, each, douts, owners, dtype, *, joined):
    """Returns the outputs and the gradients of x, and the gradients of each adapter."""
    shared, adapters = on_same_weights(each, dtype)
    x = x.to(DEVICE, dtype).requires_grad_()
    group = LoraGroup.stack(shared, joined=joined, num_adapters=len(each))
    assert (group.joined is not None) == joined
    outs = lora_linear(x, group, owners=Owners.of(owners.to(DEVICE), NUM_ADAPTERS))
    leaves = [x, *(leaf for adapter in adapters for leaf in adapter)]
    dx, *grads = torch.autograd.grad(outs, leaves, [dout.to(DEVICE, dtype) for dout in douts])
    size = len(adapters[0])
    return [*outs, dx], [grads[begin : begin + size] for begin in range(0, len(grads), size)]


@pairwise(dtype=DTYPES, case=list(OWNERS))
def test_each_row_has_the_results_of_its_owner_alone(case, dtype, joined, poisoned_memory):
    x, each, douts = draw_adapters(case)
    owners = draw_owners(case, len(x))
    found, again = (run(x, each, douts, owners, dtype, joined=joined) for _ in range(2))
    tolerance = max(4 * torch.finfo(dtype).eps, 1e-5)
    for adapter, projections in enumerate(each):
        own = owners == adapter
        truths = results_of_parts(x[own], projections, [dout[own] for dout in douts])
        values = [*(value[own.to(DEVICE)] for value in found[0]), *found[1][adapter]]
        for value, truth in zip(values, truths, strict=True):
            assert (value.detach().cpu().double() - truth).norm() <= tolerance * truth.norm()
    everything = [[*rows, *(grad for grads in of_adapters for grad in grads)] for rows, of_adapters in (found, again)]
    assert all(map(torch.equal, *everything))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, in Triton's interpreter
def test_what_one_adapter_owns_does_not_depend_on_the_others(joined, poisoned_memory):
    x, each, douts = draw_adapters("mixed")
    owners = draw_owners("mixed", len(x))
    found, grads = run(x, each, douts, owners, torch.float32, joined=joined)
    broken = [[p._replace(lora_A=p.lora_A * torch.nan, lora_B=p.lora_B * torch.inf) for p in own] for own in each[1:]]
    x[owners > 0] = torch.nan
    douts = [dout.index_fill(0, (owners > 0).nonzero().squeeze(1), torch.nan) for dout in douts]
    beside, grads_beside = run(x, [each[0], *broken], douts, owners, torch.float32, joined=joined)
    own = (owners == 0).to(DEVICE)
    for value, other in zip((*found, *grads[0]), (*beside, *grads_beside[0]), strict=True):
        value, other = (each[own] if len(each) == len(own) else each for each in (value, other))
        assert torch.equal(value, other)


def run_gated(gate, up, adapters, dout, owners, dtype, *, joined):
    """Returns the output of a gated product's projection, the gradients of both sides, and those of each adapter."""
    shared, leaves = on_same_weights(adapters, dtype)
    gate, up = (side.to(DEVICE, dtype).requires_grad_() for side in (gate, up))
    group = LoraGroup.stack(shared, joined=joined, num_adapters=len(adapters))
    source = GatedInputs(gate, up, "silu")
    out = gated_lora_linear(gated(*source), source, group, Owners.of(owners.to(DEVICE), len(adapters)))
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
    ((dout,), owners) = random_group(num_rows, num_in, (24,), rank, num_rows)[3], draw_owners("mixed", num_rows)
    found = run_gated(gate, up, adapters, dout, owners, dtype, joined=joined)
    tolerance = max(8 * torch.finfo(dtype).eps, 1e-5)
    for adapter, (projection,) in enumerate(adapters):
        own = owners == adapter
        leaves = [each.clone().requires_grad_() for each in (gate[own], up[own], projection.lora_A, projection.lora_B)]
        hidden = torch.nn.functional.silu(leaves[0]) * leaves[1]
        truth = hidden @ projection.weight.T + projection.scaling * hidden @ leaves[2].T @ leaves[3].T
        truths = truth, *torch.autograd.grad(truth, leaves, dout[own])
        for value, expected in zip([*(v[own.to(DEVICE)] for v in found[0]), *found[1][adapter]], truths, strict=True):
            assert (value.detach().cpu().double() - expected).norm() <= tolerance * expected.norm()
    gate[owners > 0] = dout[owners > 0] = torch.nan
    broken = [[p._replace(lora_A=p.lora_A * torch.nan) for p in own] for own in adapters[1:]]
    again = run_gated(gate, up, [adapters[0], *broken], dout, owners, dtype, joined=joined)
    own = (owners == 0).to(DEVICE)
    assert all(torch.equal(one[own], other[own]) for one, other in zip(again[0], found[0], strict=True))
    assert all(map(torch.equal, again[1][0], found[1][0]))


def test_kernels_look_for_rows_where_they_are(kernels):
    for owners in ([0, 0, 2, 1, 1, 1], [1, 2, 0, 2], [2] * 1500 + [0], [0], []):
        owners = torch.tensor(owners, dtype=torch.int32, device=DEVICE)
        for found, (begin, end) in zip(
            Owners.of(owners, 3).ranges.tolist(), reference.ranges_of(owners, 3), strict=True
        ):
            assert found == [begin, end] or (begin == end and found[0] >= found[1])


def test_more_rows_and_a_first_layer_without_a_gradient_of_its_input(joined, monkeypatch):
    monkeypatch.setattr("sebp_edge.ops.joined_weight.MAX_ROWS", 39)
    x, each, douts = draw_adapters("mixed")
    owners = draw_owners("mixed", len(x))
    _, grads = run(x, each, douts, owners, torch.float32, joined=joined)
    shared, adapters = on_same_weights(each, torch.float32)
    outs = lora_linear(
        x.to(DEVICE, torch.float32),
        LoraGroup.stack(shared, joined=joined, num_adapters=NUM_ADAPTERS),
        owners=Owners.of(owners.to(DEVICE), NUM_ADAPTERS),
    )
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
    assert torch.equal(group.stacked_B, fresh.stacked_B)
    assert not joined or torch.equal(group.joined.matrix, fresh.joined.matrix)


def test_no_rows_have_no_gradients(joined):
    x, each, douts = draw_adapters("mixed")
    none = torch.zeros(0, dtype=torch.int32)
    outs, grads = run(x[:0], each, [dout[:0] for dout in douts], none, torch.float32, joined=joined)
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
    owners = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for bad in (None, Owners(owners.long(), owners), Owners(owners[:0], owners)):
        with pytest.raises(ValueError, match="owners"):
            lora_linear(x, group, owners=bad)
        with pytest.raises(ValueError, match="owners"):
            gated_lora_linear(x, GatedInputs(x, x, "silu"), group, bad)
    with pytest.raises(ValueError, match="one of the 2 adapters"):
        lora_linear(x, group, owners=Owners.of(owners + 2, 2))
    with pytest.raises(ValueError, match="all active"):
        lora_linear(x, group, slice(0, 1), owners=Owners.of(owners, 2))
    with pytest.raises(ValueError, match="only then"):
        lora_linear(x, LoraGroup.stack(one), owners=Owners.of(owners, 2))


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
    owners = draw_owners("mixed", num_rows).to(DEVICE)
    owners = Owners.of(owners, num_adapters) if num_adapters > 1 else None
    group = LoraGroup.stack(shared, joined=True, num_adapters=num_adapters)
    x.requires_grad_()

    def gradients():
        if is_gated:
            outs = [gated_lora_linear(x * up, GatedInputs(x, up, "silu"), group, owners)]
        else:
            outs = lora_linear(x, group, owners=owners)
        return torch.autograd.grad(outs, [leaf for own in leaves for leaf in own], douts, allow_unused=True)

    expected = gradients()
    earlier = []
    for own in leaves:
        pairs = zip(own[: len(outs)], own[len(outs) :], strict=True)
        give_places([leaf for pair in pairs for leaf in pair])
        earlier += [leaf.main_grad.clone() for leaf in own]
    found = gradients()
    for leaf, before, truth in zip(chain(*leaves), earlier, expected, strict=True):
        assert torch.equal(leaf.main_grad, before + truth)
    assert found == tuple(None for _ in found)
