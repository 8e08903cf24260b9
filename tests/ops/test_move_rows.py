"""Gathering and scattering rows, each the other's transpose, and what is kept of an input for the backward pass."""

import pytest
import torch

from sebp_edge.ops import detect, gather_rows, keep_rows, scatter_rows

CASES = [
    (7, torch.tensor([0, 3, 6])),
    (1, torch.tensor([0])),
    (5, torch.tensor([], dtype=torch.int64)),
    (9, slice(2, 7)),
    (6, slice(0, 6)),
]


@pytest.mark.parametrize(("num_rows", "rows"), CASES)
def test_gather_and_scatter_move_rows_and_their_gradients(num_rows, rows):
    x = torch.randn(num_rows, 3, dtype=torch.float64, requires_grad=True)
    taken = gather_rows(x, rows)
    assert torch.equal(taken, x[rows])
    expected = torch.zeros(num_rows, 3, dtype=torch.float64)
    expected[rows] = x.detach()[rows]
    assert torch.equal(scatter_rows(taken, rows, num_rows), expected)
    if len(taken):
        assert torch.autograd.gradcheck(lambda x: gather_rows(x, rows), x)
        assert torch.autograd.gradcheck(lambda x: scatter_rows(x, rows, num_rows), taken.detach().requires_grad_())


@pytest.mark.parametrize("rows", [torch.tensor([4, 5, 9]), slice(4, 7)], ids=["ids", "one span"])
def test_few_rows_are_kept_as_a_copy_of_their_own_size(rows):
    x = torch.randn(12, 5)
    kept = keep_rows(x, rows)
    assert torch.equal(kept, x[rows])
    assert kept.untyped_storage().nbytes() == 3 * 5 * 4


@pytest.mark.parametrize("rows", [torch.arange(7), slice(3, 12), detect], ids=["ids", "one span", "unknown"])
def test_most_rows_or_unknown_ones_are_kept_as_the_input_itself(rows):
    x = torch.randn(12, 5)
    assert keep_rows(x, rows) is x
