"""The op: F.linear forward, exact gradients from the active rows only."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from pairwise import pairwise
from random_cases import gradients, random_case
from torch import library

from sebp_edge.ops import ActiveRows, detect, select_rows, sparse_linear

SHAPES = [(1, 1, 1), (7, 5, 3), (64, 33, 17), (129, 64, 96)]


@pairwise(shape=SHAPES, share=[0.0, 0.01, 0.4, 1.0], find=["given", "shared", "detected"])
def test_gradients_equal_dense_ones(shape, share, find, poisoned_memory):
    active = max(1, round(share * shape[0])) if share else 0
    x, weight, bias, rows, dout = random_case(*shape, active)
    expected_out, expected = gradients(F.linear, (x, weight, bias), dout)
    rows = {"given": rows, "shared": ActiveRows.from_ids(rows, shape[0]), "detected": detect}[find]
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
def test_a_slice_of_rows_gives_the_results_of_their_ids(begin, end, poisoned_memory):
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
def test_only_needed_gradients_are_computed(trained):
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


@pytest.mark.parametrize("capacity", [9, 20])
@pytest.mark.parametrize("chosen", ["before", "in the backward pass"])
def test_rows_are_selected_within_a_capacity(capacity, chosen, poisoned_memory):
    x, weight, bias, ids, dout = random_case(24, 8, 6, 9)
    keep = torch.zeros(24, dtype=torch.bool).index_fill_(0, ids, True)
    rows = select_rows(keep, capacity=capacity)
    _, expected = gradients(F.linear, (x, weight, bias), dout)
    _, found = gradients(
        lambda *t: sparse_linear(*t, rows if chosen == "before" else lambda douts: rows), (x, weight, bias), dout
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


class Mixed(torch.nn.Module):
    """Layers with and without a bias, trained and frozen, one for each way to name rows."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(*sizes, bias=sizes[0] < 12) for sizes in ((8, 12), (12, 6), (6, 5), (5, 3))
        ).double()
        self.layers[1].weight.requires_grad_(False)

    def forward(self, x, ids, shared):
        for layer, rows in zip(self.layers, (ids, detect, shared, slice(2, 9)), strict=True):
            x = torch.tanh(self.linear(x, layer.weight, layer.bias, rows))
        return x


def test_detected_rows_need_no_host_synchronisation(kernels, no_host_sync):
    x, weight, bias, _, dout = random_case(24, 8, 6, 9, torch.float32)
    with no_host_sync():
        gradients(lambda *tensors: sparse_linear(*tensors, detect), (x, weight, bias), dout)


# torch.compile itself warns when it traces a Function.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_model_is_one_graph_and_gets_dense_gradients():
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Mixed(sparse_linear)
    # Inductor's compiler takes a minute on a few cores; without it, its decompositions and partitions are the same.
    generates = torch.cuda.is_available() and shutil.which("g++")
    backend, batches = ("inductor", (3,)) if generates else ("aot_eager_decomp_partition", (3, 5))
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=not generates)
    for batch in batches:
        x, ids = torch.randn(batch, 7, 8, dtype=torch.float64), torch.arange(2, 9)
        dout = torch.zeros(batch * 7, 3, dtype=torch.float64)
        dout[ids] = torch.randn(len(ids), 3, dtype=torch.float64)
        rows = ids, ActiveRows.from_ids(ids, batch * 7)
        trained = [p for p in model.parameters() if p.requires_grad]
        leaf = x.clone().requires_grad_()
        found = torch.autograd.grad(compiled(leaf, *rows), [leaf, *trained], dout.view(batch, 7, 3))
        model.linear = lambda x, weight, bias, rows: F.linear(x, weight, bias)
        expected = torch.autograd.grad(model(leaf, *rows), [leaf, *trained], dout.view(batch, 7, 3))
        model.linear = sparse_linear
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_the_registration_of_the_compiled_op_is_correct():
    x, weight, _, ids, dout = random_case(24, 8, 6, 9)
    rows = ActiveRows.from_ids(ids, 24)
    for needed in ([True, True, True], [False, True, False], [True, False, True]):
        arguments = (dout, weight, x[ids], *rows, needed)
        library.opcheck(torch.ops.sebp_edge.sparse_linear_backward.default, arguments)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("find", ["given", "slice", "detected"])
def test_outputs_can_be_changed_in_place(with_bias, find):
    x, weight, bias, rows, dout = random_case(12, 5, 3, 4)
    rows = {"given": rows, "slice": slice(0, 12), "detected": detect}[find]
    tensors = (x.view(3, 4, 5), weight, *[bias][:with_bias])

    def changed(linear):
        return lambda *tensors: linear(*tensors).mul_(0.5).add_(1.0)

    expected_out, expected = gradients(changed(F.linear), tensors, dout.view(3, 4, 3))
    sparse = changed(lambda x, weight, bias=None: sparse_linear(x, weight, bias, rows))
    out, found = gradients(sparse, tensors, dout.view(3, 4, 3))
    assert torch.equal(out, expected_out)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
