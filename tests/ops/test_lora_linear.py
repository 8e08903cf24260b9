"""The op: PEFT's outputs and gradients for a group of projections, with gradients of the active rows only."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from pairwise import pairwise
from random_cases import quantised, random_group

from sebp_edge.ops import LoraGroup, LoraProjection, Recompute, ScratchBuffer, detect, lora_linear, select_rows


def dense(x, projections, dtype):
    """As PEFT computes it, with the adapters' products in `dtype`."""
    return tuple(
        F.linear(x, p.weight, p.bias)
        + (F.linear(F.linear(x.to(dtype), p.lora_A.to(dtype)), p.lora_B.to(dtype)) * p.scaling).to(x.dtype)
        for p in projections
    )


def stacked(x, projections, rows=None):
    return lora_linear(x, LoraGroup.stack(projections), rows)


def outputs_and_gradients(function, x, projections, douts):
    x = x.clone().requires_grad_()
    leaves = [
        p._replace(lora_A=p.lora_A.clone().requires_grad_(), lora_B=p.lora_B.clone().requires_grad_())
        for p in projections
    ]
    outputs = function(x, leaves)
    torch.autograd.backward(outputs, douts)
    return outputs, [x.grad, *(p.lora_A.grad for p in leaves), *(p.lora_B.grad for p in leaves)]


@pairwise(
    shape=[(1, 1, (1,), 1), (7, 5, (3, 2), 2), (65, 33, (17, 9, 9), 4)],
    share=[0.0, 0.3, 1.0],
    given=["rows", "detect", "all"],
)
def test_outputs_and_gradients_are_pefts(shape, share, given, poisoned_memory):
    active = round(share * shape[0])
    x, projections, rows, douts = random_group(*shape, active)
    expected_out, expected = outputs_and_gradients(lambda *a: dense(*a, torch.float64), x, projections, douts)
    rows = {"rows": rows, "detect": detect, "all": None}[given]
    found_out, found = outputs_and_gradients(lambda x, p: stacked(x, p, rows), x, projections, douts)
    for one, other in zip([*found_out, *found], [*expected_out, *expected], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("given", ["detect", "chosen"])
@pytest.mark.parametrize("needs_dx", [True, False])
def test_kernels_do_not_wait_for_the_number_of_selected_rows(given, needs_dx, kernels, no_host_sync, poisoned_memory):
    x, projections, active, douts = random_group(65, 33, (17, 9, 9), 4, 20, torch.float32, torch.float32)
    factors = torch.zeros(65).index_fill_(0, active if given == "detect" else active[::3], 1.0)

    def choose(douts):
        return select_rows(factors != 0, capacity=13)

    scaled = [dout * factors[:, None] for dout in douts]
    _, expected = outputs_and_gradients(lambda *a: dense(*a, torch.float32), x, projections, scaled)
    adapters = [*(p.lora_A.requires_grad_() for p in projections), *(p.lora_B.requires_grad_() for p in projections)]
    outputs = stacked(x.requires_grad_(needs_dx), projections, detect if given == "detect" else choose)
    with no_host_sync():
        found = torch.autograd.grad(outputs, [x, *adapters] if needs_dx else adapters, douts)
    for one, other in zip(found, expected if needs_dx else expected[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_error_is_no_larger_than_plain_sums_in_the_same_dtype(dtype):
    for seed in range(3):
        x, projections, rows, douts = random_group(130, 96, (64, 32), 8, 50, dtype, torch.float32, seed)
        scale = 0.1
        projections = [p._replace(weight=p.weight * scale, lora_B=p.lora_B * scale) for p in projections]
        exact = [LoraProjection(*(None if t is None else t.double() for t in p[:4]), p.scaling) for p in projections]
        _, truths = outputs_and_gradients(
            lambda *a: dense(*a, torch.float64), x.double(), exact, [dout.double() for dout in douts]
        )
        _, plain = outputs_and_gradients(lambda *a: dense(*a, dtype), x, projections, douts)
        _, found = outputs_and_gradients(lambda x, p, r=rows: stacked(x, p, r), x, projections, douts)
        for one, other, truth in zip(found, plain, truths, strict=True):
            error, allowed = ((value.double() - truth).norm() / truth.norm() for value in (one, other))
            assert error <= 2 * allowed + 1e-4


def test_a_slice_of_rows_gives_the_results_of_their_ids(poisoned_memory):
    x, projections, _, douts = random_group(24, 8, (6, 5), 2, 24)
    for dout in douts:
        dout[:3] = dout[9:] = 0
    _, expected = outputs_and_gradients(lambda *a: dense(*a, torch.float64), x, projections, douts)
    _, found = outputs_and_gradients(lambda x, p: stacked(x, p, slice(3, 9)), x, projections, douts)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_adapters_keep_their_dtype_and_leading_dimensions_their_shape():
    x, projections, _, douts = random_group(24, 8, (6, 5), 2, 24, torch.float32, torch.float64)
    outputs, found = outputs_and_gradients(
        lambda x, p: stacked(x, p), x.reshape(2, 12, 8), projections, [d.reshape(2, 12, -1) for d in douts]
    )
    assert [out.shape for out in outputs] == [(2, 12, 6), (2, 12, 5)]
    assert found[0].shape == (2, 12, 8)
    assert {gradient.dtype for gradient in found[1:]} == {torch.float64}


def test_only_active_rows_of_x_are_kept():
    x, projections, rows, _ = random_group(1000, 8, (6,), 2, 10)
    x.requires_grad_()
    projections = [p._replace(lora_A=p.lora_A.requires_grad_(), lora_B=p.lora_B.requires_grad_()) for p in projections]
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.shape) or t, lambda t: t):
        stacked(x, projections, rows)
    assert (10, 8) in sizes
    assert not any(size[:1] == (1000,) for size in sizes)


def test_outputs_can_be_changed_in_place():
    x, projections, rows, douts = random_group(12, 5, (3, 4, 2), 2, 6)

    def changed(x, projections, function):
        first, second, third = function(x, projections)
        return first.mul_(0.5), second, third.add_(1.0)

    expected_out, expected = outputs_and_gradients(
        lambda x, p: changed(x, p, lambda *a: dense(*a, torch.float64)), x, projections, douts
    )
    found_out, found = outputs_and_gradients(
        lambda x, p: changed(x, p, lambda *a: stacked(*a, rows)), x, projections, douts
    )
    for one, other in zip([*found_out, *found], [*expected_out, *expected], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_an_input_that_needs_no_gradient_gets_none():
    x, projections, rows, douts = random_group(24, 8, (6,), 2, 9)
    leaf = projections[0]._replace(lora_A=projections[0].lora_A.requires_grad_())
    stacked(x, [leaf], rows)[0].backward(douts[0])
    assert x.grad is None
    assert leaf.lora_A.grad is not None


@pytest.mark.parametrize("given", ["rows", "detect", "all"])
def test_a_quantised_weight_gives_the_results_of_its_matrix(given, poisoned_memory):
    x, projections, rows, douts = random_group(65, 33, (17, 9, 9), 4, 20)
    packed, plain = zip(*(quantised(projection, []) for projection in projections), strict=True)
    rows = {"rows": rows, "detect": detect, "all": None}[given]
    expected_out, expected = outputs_and_gradients(lambda *a: dense(*a, torch.float64), x, plain, douts)
    found_out, found = outputs_and_gradients(lambda x, p: stacked(x, p, rows), x, packed, douts)
    for one, other in zip([*found_out, *found], [*expected_out, *expected], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_a_quantised_weight_is_dequantised_once_a_pass_and_never_kept():
    x, projections, rows, douts = random_group(24, 8, (6,), 2, 9)
    made = []
    packed, _ = quantised(projections[0], made)
    leaf = packed._replace(lora_A=packed.lora_A.requires_grad_(), lora_B=packed.lora_B.requires_grad_())
    (out,) = stacked(x.requires_grad_(), [leaf], rows)
    assert [matrix() for matrix in made] == [None]
    out.backward(douts[0])
    assert [matrix() for matrix in made] == [None, None]


def test_a_scratch_buffer_first_used_in_inference_mode_serves_training():
    x, projections, _, douts = random_group(24, 8, (6, 11), 2, 9)
    group = LoraGroup.stack([quantised(one, [])[0] for one in projections], ScratchBuffer())
    with torch.inference_mode():
        expected = lora_linear(x, group)
    found = lora_linear(x.requires_grad_(), group)
    torch.autograd.backward(found, douts)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("given", ["rows", "slice", "detect", "all"])
def test_a_recomputed_input_gives_the_same_bits_and_is_not_kept(given, poisoned_memory):
    source, projections, rows, douts = random_group(65, 33, (17, 9, 9), 4, 20, torch.float32, torch.float32)
    source = source.reshape(5, 13, 33)
    if given == "slice":
        rows = slice(9, 29)
        for dout in douts:
            dout[: rows.start] = dout[rows.stop :] = 0
    rows = {"detect": detect, "all": None}.get(given, rows)
    douts = [dout.reshape(5, 13, -1) for dout in douts]
    made = []

    def run(x, leaves, recomputes):
        x = x.tanh()
        recompute = Recompute(lambda source: made.append(weakref.ref(again := source.tanh())) or again, (source,))
        return lora_linear(x, LoraGroup.stack(leaves), rows, recompute if recomputes else None)

    (expected_out, expected), (found_out, found) = (
        outputs_and_gradients(lambda x, leaves, flag=recomputes: run(x, leaves, flag), source, projections, douts)
        for recomputes in (False, True)
    )
    for one, other in zip([*found_out, *found], [*expected_out, *expected], strict=True):
        assert torch.equal(one, other)
    assert [again() for again in made] == [None]


def test_the_source_of_a_recomputed_input_is_kept_until_the_backward_pass():
    source, projections, _, douts = random_group(24, 8, (6, 5), 2, 24)
    leaves = [p._replace(lora_A=p.lora_A.requires_grad_(), lora_B=p.lora_B.requires_grad_()) for p in projections]
    source.requires_grad_()
    x = source.tanh()
    outputs = lora_linear(x, LoraGroup.stack(leaves), None, Recompute(torch.tanh, (source.detach(),)))
    kept = {tensor.data_ptr() for tensor in outputs[0].grad_fn.saved_tensors}
    assert source.data_ptr() in kept
    assert x.data_ptr() not in kept
    torch.autograd.backward(outputs, douts)
    with pytest.raises(RuntimeError, match="freed"):
        _ = outputs[0].grad_fn.saved_tensors


def test_autograd_notices_a_changed_source():
    source, projections, _, douts = random_group(24, 8, (6,), 2, 24)
    leaf = projections[0]._replace(lora_A=projections[0].lora_A.requires_grad_())
    (out,) = lora_linear(source.tanh(), LoraGroup.stack([leaf]), None, Recompute(torch.tanh, (source.detach(),)))
    source.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        out.backward(douts[0])
