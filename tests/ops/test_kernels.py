"""Our Triton kernels against plain PyTorch: on a GPU where there is one, else in Triton's interpreter."""

import pytest
import torch
from pairwise import pairwise
from random_cases import DEVICE, DTYPES, assert_as_good, assert_no_worse_than_torch, draw

from sebp_edge.ops import reference, select_rows

pytest.importorskip("triton", reason="Triton is not installed on this platform")
from sebp_edge.ops import ActiveRows
from sebp_edge.ops.gpu import cross_entropy, lora, move_rows, products, reduce_rows
from sebp_edge.ops.tiles import Tiles


def random_rows(num_rows, active, seed=0):
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))[:active].sort().values.to(DEVICE)


def selected(num_rows, active, capacity, seed=0):
    """Rows whose number only the device knows, none of them row 0."""
    keep = torch.zeros(num_rows, dtype=torch.bool, device=DEVICE)
    keep[1 + random_rows(num_rows - 1, active, seed)] = True
    return select_rows(keep, capacity=capacity)


@pairwise(share=[0.0, 0.03, 0.4, 1.0], dtype=DTYPES, **{"num_rows, num_columns": [(1, 1), (9, 7), (33, 513)]})
def test_rows_are_gathered_and_scattered_exactly(num_rows, num_columns, share, dtype, poisoned_memory):
    rows = random_rows(num_rows, round(share * num_rows))
    x = draw(num_rows, num_columns, dtype=dtype)
    gathered = move_rows.gather_rows(x, rows)
    assert torch.equal(gathered, reference.gather_rows(x, rows))
    expected = torch.zeros_like(x)
    expected[rows] = x[rows]
    slots = ActiveRows.from_ids(rows, num_rows).slots
    assert torch.equal(move_rows.scatter_rows(gathered, slots), expected)
    assert torch.equal(reference.scatter_rows(gathered, slots), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_beyond_the_count_are_gathered_as_zeros(dtype, poisoned_memory):
    x = draw(33, 600, dtype=dtype)
    x[0] = float("nan")
    rows = selected(33, 9, capacity=20)
    gathered = move_rows.gather_rows(x, rows.ids, rows.count)
    assert torch.equal(gathered, reference.gather_rows(x, rows.ids, rows.count))
    assert torch.equal(gathered[:9], x[rows.ids[:9]])
    assert not gathered[9:].any()


def test_strides_do_not_matter():
    x, rows = draw(24, 40), random_rows(24, 9)
    for strided in (x.T.contiguous().T, x[:, ::2], draw(24, 80)[:, 7:47]):
        assert torch.equal(move_rows.gather_rows(strided, rows), strided[rows])


# Tiles larger and smaller than the matrices, with and without a split contraction.
TILES = [Tiles(16, 32, 16, 1, 4, 2), Tiles(32, 16, 32, 3, 4, 3)]
SHAPES = [(1, 1, 1), (17, 32, 32), (37, 45, 41)]


@pairwise(shape=SHAPES, share=[0.0, 0.4, 1.0], tiles=TILES, dtype=DTYPES)
def test_products_of_active_rows_equal_dense_ones(shape, share, tiles, dtype, poisoned_memory):
    num_rows, num_inputs, num_outputs = shape
    ids = random_rows(num_rows, max(1, round(share * num_rows)) if share else 0)
    x, weight = draw(num_rows, num_inputs, dtype=dtype, seed=1), draw(num_outputs, num_inputs, dtype=dtype, seed=2)
    dout = torch.full((num_rows, num_outputs), float("nan"), dtype=dtype, device=DEVICE)
    dout[ids] = draw(len(ids), num_outputs, dtype=dtype)
    rows = ActiveRows.from_ids(ids, num_rows)

    dx = products.dx(dout, weight, rows, tiles)
    assert_no_worse_than_torch(dx[ids], dout[ids] @ weight, dout[ids].double() @ weight.double())
    assert not dx[rows.slots < 0].any()

    for whole in (False, True):
        found = products.dweight(dout, x if whole else x[ids], rows, tiles, x_has_all_rows=whole, with_bias=True)
        truth = dout[ids].double().T @ x[ids].double()
        assert_no_worse_than_torch(found.dweight, dout[ids].T @ x[ids], truth)
        assert_no_worse_than_torch(found.dbias, dout[ids].sum(0), dout[ids].double().sum(0))


@pairwise(active=[0, 1, 20, 36], tiles=TILES)
def test_products_read_the_count_from_the_device(active, tiles, poisoned_memory):
    rows = selected(37, active, capacity=36)
    x, weight, dout = draw(37, 45), draw(41, 45, seed=1), draw(37, 41, seed=2)
    # Rows that are not active are not read: row 0 fills the slots beyond the count.
    x[rows.slots < 0] = dout[rows.slots < 0] = float("nan")
    ids = rows.ids[:active]
    active_dout = dout[ids].double()
    dx = products.dx(dout, weight, rows, tiles)
    torch.testing.assert_close(dx[ids].double(), active_dout @ weight.double(), rtol=1e-4, atol=1e-4)
    assert not dx[rows.slots < 0].any()
    found = products.dweight(dout, x, rows, tiles, x_has_all_rows=True, with_bias=True)
    torch.testing.assert_close(found.dweight.double(), active_dout.T @ x[ids].double(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.dbias.double(), active_dout.sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tiles", TILES)
def test_products_take_any_strides_and_are_bitwise_reproducible(tiles):
    rows = ActiveRows.from_ids(random_rows(40, 21), 40)
    x, weight, dout = draw(40, 2 * 18)[:, ::2], draw(18, 23, seed=1).T, draw(40, 99, seed=2)[:, 3:26]
    dx = products.dx(dout, weight, rows, tiles)
    torch.testing.assert_close(dx[rows.ids], dout[rows.ids] @ weight, rtol=1e-4, atol=1e-4)
    dweight, dbias = products.dweight(dout, x, rows, tiles, x_has_all_rows=True, with_bias=False)
    assert dbias is None
    torch.testing.assert_close(dweight, dout[rows.ids].T @ x[rows.ids], rtol=1e-4, atol=1e-4)
    assert torch.equal(dx, products.dx(dout, weight, rows, tiles))
    again, _ = products.dweight(dout, x, rows, tiles, x_has_all_rows=True, with_bias=False)
    assert torch.equal(dweight, again)


@pairwise(
    share=[0.0, 0.4, 1.0], dtype=DTYPES, **{"num_rows, num_columns": [(0, 5), (1, 1), (9, 7), (5, 1025), (33, 2100)]}
)
def test_row_norms_and_nonzero_rows_equal_plain_pytorchs(num_rows, num_columns, share, dtype, poisoned_memory):
    x = torch.zeros(num_rows, num_columns, dtype=dtype, device=DEVICE)
    rows = random_rows(num_rows, round(share * num_rows))
    x[rows] = draw(len(rows), num_columns, dtype=dtype)
    norms = reduce_rows.row_norms(x)
    assert norms.dtype == torch.float32
    torch.testing.assert_close(norms.double(), reference.row_norms(x.double()), rtol=1e-5, atol=0)
    assert torch.equal(reduce_rows.nonzero_rows(x), reference.nonzero_rows(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_element_makes_a_row_non_zero_however_small_or_broken(dtype):
    smallest = torch.finfo(dtype).smallest_normal
    x = torch.zeros(6, 1500, dtype=dtype, device=DEVICE)
    for row, value in enumerate([0.0, smallest, float("nan"), -0.0, float("-inf"), -smallest]):
        x[row, -1 - row] = value
    assert reduce_rows.nonzero_rows(x).tolist() == [False, True, True, False, True, True]
    norms = reduce_rows.row_norms(x)
    assert norms[[2, 4]].isfinite().tolist() == [False, False]
    assert norms[[0, 3]].tolist() == [0.0, 0.0]


def test_row_norms_take_any_strides():
    x = draw(24, 40)
    for strided in (x.T.contiguous().T, x.T, x[::3, ::2], x[:, 7:9], x[:1].expand(24, 40), x[:1, :1].expand(24, 40)):
        torch.testing.assert_close(reduce_rows.row_norms(strided), reference.row_norms(strided))
        assert reduce_rows.nonzero_rows(strided).all()


@pairwise(
    dtype=DTYPES,
    needs_gradient=[True, False],
    **{
        "num_rows, vocabulary": [(0, 5), (1, 2), (5, 11), (7, 300), (3, 9000)],
        "scale, softcap": [(1.0, None), (0.25, None), (2.0, 5.0)],
    },
)
def test_losses_and_gradients_equal_plain_pytorchs(
    num_rows, vocabulary, scale, softcap, dtype, needs_gradient, poisoned_memory
):
    logits = 3 * draw(num_rows, vocabulary, dtype=dtype)
    targets = torch.randint(vocabulary, (num_rows,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    expected, gradient = reference.cross_entropy_and_dlogits_(
        logits.clone(), targets, scale, softcap, needs_gradient=needs_gradient
    )
    losses, found = cross_entropy.cross_entropy_and_dlogits_(
        logits, targets, scale, softcap, needs_gradient=needs_gradient
    )
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    assert (found is None) == (not needs_gradient)
    if needs_gradient:
        assert found.data_ptr() == logits.data_ptr()
        torch.testing.assert_close(found, gradient)


@pairwise(
    columns=[(1,), (130,), (5, 3), (200, 64, 129)],
    dtype=DTYPES,
    **{"num_rows, rank": [(0, 4), (1, 16), (67, 5), (33, 70), (5, 257)]},
)
def test_rank_products_of_a_group_equal_plain_pytorchs(columns, num_rows, rank, dtype, poisoned_memory):
    down, weight = draw(num_rows, rank * len(columns), dtype=dtype), draw(sum(columns), rank, dtype=dtype, seed=1)
    bias, dout = draw(sum(columns), dtype=dtype, seed=2), draw(num_rows, sum(columns), dtype=dtype, seed=3)
    doubles = [tensor.double() for tensor in (down, weight, bias, dout)]
    for given_bias, exact_bias in ((bias, doubles[2]), (None, None)):
        found = lora.lora_up(down, weight, given_bias, columns, 0.5)
        assert_as_good(found, reference.lora_up(doubles[0], doubles[1], exact_bias, columns, 0.5), dtype)
    # The gradient is a part of a wider matrix.
    wide = torch.cat([dout, dout], dim=1)[:, : sum(columns)]
    expected = reference.lora_up_backward(doubles[3], doubles[0], doubles[1], columns, 0.5)
    found = lora.lora_up_backward(wide, down, weight, columns, 0.5)
    again = lora.lora_up_backward(dout, down, weight, columns, 0.5)
    for one, other, truth in zip(found, again, expected, strict=True):
        assert torch.equal(one, other)
        assert_as_good(one, truth, dtype)


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[3e4, -3e4, 0.0], [-3e4, -3e4, -3e4]], device=DEVICE)
    targets = torch.tensor([1, 0], device=DEVICE)
    losses, gradient = cross_entropy.cross_entropy_and_dlogits_(logits, targets, 1.0, None, needs_gradient=True)
    torch.testing.assert_close(losses, torch.tensor([6e4, 1.0986123], device=DEVICE))
    assert gradient.isfinite().all()


@pytest.mark.gpu
def test_matrices_beyond_two_to_the_31_elements():
    x = torch.empty(2**16 + 8, 2**15 + 8, dtype=torch.bfloat16, device="cuda")
    rows = torch.tensor([0, 1, 2**16, 2**16 + 7], device="cuda")
    x[rows] = draw(4, x.shape[1], dtype=torch.bfloat16)
    gathered = move_rows.gather_rows(x, rows)
    assert torch.equal(gathered, x[rows])
    scattered = move_rows.scatter_rows(gathered, ActiveRows.from_ids(rows, len(x)).slots)
    assert torch.equal(scattered[rows], gathered)
    assert int((scattered != 0).any(dim=1).sum()) == 4
    nonzero = reduce_rows.nonzero_rows(scattered)
    assert torch.equal(nonzero.nonzero().squeeze(1), rows)
    torch.testing.assert_close(reduce_rows.row_norms(scattered)[rows], reference.row_norms(gathered))
    along_columns = torch.zeros(2**15 + 8, 2**16 + 8, dtype=torch.bfloat16, device="cuda").T
    along_columns[-1, -1] = 1
    assert int(reduce_rows.nonzero_rows(along_columns).sum()) == 1


@pytest.mark.gpu
def test_products_of_matrices_beyond_two_to_the_31_elements():
    num_rows, num_outputs, num_inputs = 2**16 + 8, 2**15 + 8, 64
    dout = torch.empty(num_rows, num_outputs, dtype=torch.bfloat16, device="cuda")
    rows = ActiveRows.from_ids(torch.tensor([0, 1, 2**16, 2**16 + 7], device="cuda"), num_rows)
    compact = dout[rows.ids] = draw(4, num_outputs, dtype=torch.bfloat16)
    weight, x = (draw(n, num_inputs, dtype=torch.bfloat16, seed=n) for n in (num_outputs, num_rows))
    tiles = Tiles(64, 64, 64, 1, 4, 3)
    dx = products.dx(dout, weight, rows, tiles)
    assert_no_worse_than_torch(dx[rows.ids], compact @ weight, compact.double() @ weight.double())
    assert int((dx != 0).any(dim=1).sum()) == 4
    found = products.dweight(dout, x, rows, tiles, x_has_all_rows=True, with_bias=True)
    truth = compact.double().T @ x[rows.ids].double()
    assert_no_worse_than_torch(found.dweight, compact.T @ x[rows.ids], truth)
    transposed = products.dx(x, dout[:64].contiguous(), ActiveRows.from_ids(rows.ids, num_rows), tiles)
    assert transposed.shape == (num_rows, num_outputs)
    assert not transposed[rows.slots < 0].any()
