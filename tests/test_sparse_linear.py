"""The op: F.linear forward, exact gradients from the active rows alone."""

import pytest
import torch
import torch.nn.functional as F

from sebp_edge.ops import detect, sparse_linear

SHAPES = [(1, 1, 1), (7, 5, 3), (64, 33, 17), (129, 64, 96)]


def random_case(num_rows, num_in, num_out, active, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    rows = torch.randperm(num_rows, generator=generator)[:active].sort().values
    x, weight, bias = draw(num_rows, num_in), draw(num_out, num_in), draw(num_out)
    dout = torch.zeros(num_rows, num_out, dtype=dtype)
    dout[rows] = draw(active, num_out)
    return x, weight, bias, rows, dout


def gradients(function, tensors, dout):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = function(*leaves)
    out.backward(dout)
    return out.detach(), [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.4, 1.0])
@pytest.mark.parametrize("find", ["given", "detected"])
def test_gradients_equal_dense_ones(shape, share, find, poisoned_memory):
    active = max(1, round(share * shape[0])) if share else 0
    x, weight, bias, rows, dout = random_case(*shape, active)
    expected_out, expected = gradients(F.linear, (x, weight, bias), dout)
    rows = detect if find == "detected" else rows
    out, found = gradients(lambda *tensors: sparse_linear(*tensors, rows), (x, weight, bias), dout)
    assert torch.equal(out, expected_out)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_error_is_no_larger_than_dense_in_the_same_dtype(dtype):
    for seed in range(3):
        x, weight, bias, rows, dout = random_case(200, 96, 64, 50, dtype, seed)
        tensors = (x, weight, bias)
        _, exact = gradients(F.linear, [tensor.double() for tensor in tensors], dout.double())
        _, dense = gradients(F.linear, tensors, dout)
        _, found = gradients(lambda *t, rows=rows: sparse_linear(*t, rows), tensors, dout)
        for one, other, truth in zip(found, dense, exact, strict=True):
            error, allowed = ((value.double() - truth).norm() / truth.norm() for value in (one, other))
            assert one.dtype == dtype
            assert error <= 2 * allowed + 1e-4


def test_gradcheck():
    x, weight, bias, rows, _ = random_case(6, 4, 3, 6)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    assert torch.autograd.gradcheck(lambda *tensors: sparse_linear(*tensors, rows), leaves)
    assert torch.autograd.gradcheck(lambda *tensors: sparse_linear(*tensors, detect), leaves)


@pytest.mark.parametrize(("begin", "end"), [(0, 0), (0, 5), (3, 4), (0, 24), (20, 24)])
def test_a_slice_of_rows_is_as_good_as_their_ids(begin, end, poisoned_memory):
    x, weight, bias, _, dout = random_case(24, 8, 6, 24)
    dout[:begin] = dout[end:] = 0
    _, expected = gradients(F.linear, (x, weight, bias), dout)
    _, found = gradients(lambda *tensors: sparse_linear(*tensors, slice(begin, end)), (x, weight, bias), dout)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_leading_dimensions_and_strides_do_not_matter():
    x, weight, bias, rows, dout = random_case(24, 8, 6, 9)
    _, expected = gradients(F.linear, (x, weight, bias), dout)
    strided = torch.empty(8, 24, dtype=x.dtype).copy_(x.T).T
    assert not strided.is_contiguous()
    _, found = gradients(
        lambda x, w, b: sparse_linear(x.reshape(2, 12, 8), w, b, rows), (strided, weight, bias), dout.reshape(2, 12, 6)
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("trained", ["x", "weight", "bias"])
def test_only_wanted_gradients_are_made(trained):
    x, weight, bias, rows, dout = random_case(24, 8, 6, 9)
    tensors = {"x": x, "weight": weight, "bias": bias}
    tensors[trained].requires_grad_()
    sparse_linear(**tensors, rows=rows).backward(dout)
    assert [name for name, tensor in tensors.items() if tensor.grad is not None] == [trained]


def saved_elements(function) -> int:
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        function()
    return sum(sizes)


def test_a_frozen_weight_keeps_nothing_of_x():
    x, weight, _, rows, _ = random_case(1000, 8, 6, 10)
    x.requires_grad_()
    assert saved_elements(lambda: sparse_linear(x, weight, None, rows)) == weight.numel()


def test_a_trained_weight_keeps_only_the_active_rows():
    x, weight, _, rows, _ = random_case(1000, 8, 6, 10)
    weight.requires_grad_()
    kept = saved_elements(lambda: sparse_linear(x, weight, None, rows))
    assert kept == weight.numel() + 10 * 8


def test_autocast_gives_what_dense_gives():
    x, weight, bias, rows, dout = random_case(24, 8, 6, 9, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected_out, expected = gradients(F.linear, (x, weight, bias), dout.bfloat16())
        out, found = gradients(lambda *tensors: sparse_linear(*tensors, rows), (x, weight, bias), dout.bfloat16())
    assert out.dtype == expected_out.dtype == torch.bfloat16
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_a_non_finite_row_is_detected_not_dropped():
    x, weight, bias, _, dout = random_case(8, 4, 3, 2)
    dout[5] = float("nan")
    _, (dx, _, _) = gradients(lambda *tensors: sparse_linear(*tensors, detect), (x, weight, bias), dout)
    assert dx[5].isnan().all()
