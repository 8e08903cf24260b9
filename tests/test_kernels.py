"""Our Triton kernels against plain PyTorch: on a GPU where there is one, else in Triton's interpreter."""

import pytest
import torch

from sebp_edge.ops import reference

pytest.importorskip("triton", reason="Triton is not installed on this platform")
from sebp_edge.ops import cross_entropy_kernel, row_kernels, row_reduction_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])


def draw(*size, dtype=torch.float32, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def random_rows(num_rows, active, seed=0):
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))[:active].sort().values.to(DEVICE)


@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 1), (9, 7), (33, 513), (100, 1030)])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.4, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_gathered_and_scattered_exactly(num_rows, num_columns, share, dtype, poisoned_memory):
    rows = random_rows(num_rows, round(share * num_rows))
    x = draw(num_rows, num_columns, dtype=dtype)
    gathered = row_kernels.gather_rows(x, rows)
    assert torch.equal(gathered, reference.gather_rows(x, rows))
    scattered = row_kernels.scatter_rows(gathered, rows, num_rows)
    assert torch.equal(scattered, reference.scatter_rows(gathered, rows, num_rows))


def test_strides_do_not_matter():
    x, rows = draw(24, 40), random_rows(24, 9)
    for strided in (x.T.contiguous().T, x[:, ::2], draw(24, 80)[:, 7:47]):
        assert torch.equal(row_kernels.gather_rows(strided, rows), strided[rows])


@pytest.mark.parametrize(("num_rows", "num_columns"), [(0, 5), (1, 1), (9, 7), (5, 1025), (33, 2100)])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_norms_and_nonzero_rows_are_plain_pytorchs(num_rows, num_columns, share, dtype, poisoned_memory):
    x = torch.zeros(num_rows, num_columns, dtype=dtype, device=DEVICE)
    rows = random_rows(num_rows, round(share * num_rows))
    x[rows] = draw(len(rows), num_columns, dtype=dtype)
    norms = row_reduction_kernels.row_norms(x)
    assert norms.dtype == torch.float32
    torch.testing.assert_close(norms.double(), reference.row_norms(x.double()), rtol=1e-5, atol=0)
    assert torch.equal(row_reduction_kernels.nonzero_rows(x), reference.nonzero_rows(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_element_makes_a_row_non_zero_however_small_or_broken(dtype):
    smallest = torch.finfo(dtype).smallest_normal
    x = torch.zeros(6, 1500, dtype=dtype, device=DEVICE)
    for row, value in enumerate([0.0, smallest, float("nan"), -0.0, float("-inf"), -smallest]):
        x[row, -1 - row] = value
    assert row_reduction_kernels.nonzero_rows(x).tolist() == [False, True, True, False, True, True]
    norms = row_reduction_kernels.row_norms(x)
    assert norms[[2, 4]].isfinite().tolist() == [False, False]
    assert norms[[0, 3]].tolist() == [0.0, 0.0]


def test_strides_do_not_matter_to_row_norms():
    x = draw(24, 40)
    for strided in (x.T.contiguous().T, x.T, x[::3, ::2], x[:, 7:9], x[:1].expand(24, 40), x[:1, :1].expand(24, 40)):
        torch.testing.assert_close(row_reduction_kernels.row_norms(strided), reference.row_norms(strided))
        assert row_reduction_kernels.nonzero_rows(strided).all()


@pytest.mark.parametrize(("num_rows", "vocabulary"), [(0, 5), (1, 2), (5, 11), (7, 300), (3, 9000)])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.25, None), (2.0, 5.0)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wanted", [True, False])
def test_losses_and_gradients_are_plain_pytorchs(num_rows, vocabulary, scale, softcap, dtype, wanted, poisoned_memory):
    logits = 3 * draw(num_rows, vocabulary, dtype=dtype)
    targets = torch.randint(vocabulary, (num_rows,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    expected, gradient = reference.cross_entropy_and_dlogits_(logits.clone(), targets, scale, softcap, wanted=wanted)
    losses, found = cross_entropy_kernel.cross_entropy_and_dlogits_(logits, targets, scale, softcap, wanted=wanted)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    assert (found is None) == (not wanted)
    if wanted:
        assert found.data_ptr() == logits.data_ptr()
        torch.testing.assert_close(found, gradient)


def test_logits_that_would_overflow_do_not():
    logits = torch.tensor([[3e4, -3e4, 0.0], [-3e4, -3e4, -3e4]], device=DEVICE)
    targets = torch.tensor([1, 0], device=DEVICE)
    losses, gradient = cross_entropy_kernel.cross_entropy_and_dlogits_(logits, targets, 1.0, None, wanted=True)
    torch.testing.assert_close(losses, torch.tensor([6e4, 1.0986123], device=DEVICE))
    assert gradient.isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and there is none here")
def test_matrices_beyond_two_to_the_31_elements():
    x = torch.empty(2**16 + 8, 2**15 + 8, dtype=torch.bfloat16, device="cuda")
    rows = torch.tensor([0, 1, 2**16, 2**16 + 7], device="cuda")
    x[rows] = draw(4, x.shape[1], dtype=torch.bfloat16)
    gathered = row_kernels.gather_rows(x, rows)
    assert torch.equal(gathered, x[rows])
    scattered = row_kernels.scatter_rows(gathered, rows, len(x))
    assert torch.equal(scattered[rows], gathered)
    assert int((scattered != 0).any(dim=1).sum()) == 4
    nonzero = row_reduction_kernels.nonzero_rows(scattered)
    assert torch.equal(nonzero.nonzero().squeeze(1), rows)
    torch.testing.assert_close(row_reduction_kernels.row_norms(scattered)[rows], reference.row_norms(gathered))
    along_columns = torch.zeros(2**15 + 8, 2**16 + 8, dtype=torch.bfloat16, device="cuda").T
    along_columns[-1, -1] = 1
    assert int(row_reduction_kernels.nonzero_rows(along_columns).sum()) == 1
