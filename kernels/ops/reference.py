"""Plain PyTorch of every op: the ground truth, and the path wherever no kernel of ours runs.

Shapes: N rows (batch times time), A active rows, K inputs, M outputs.
"""

import torch
from torch import Tensor


def nonzero_rows(dout_NM: Tensor) -> Tensor:
    """Ids of the rows with any non-zero element, int64 [A], increasing. NaN counts as non-zero."""
    return dout_NM.ne(0).any(dim=1).nonzero().squeeze(1)


def sparse_linear_dx(dout_AM: Tensor, weight_MK: Tensor, rows_A: Tensor, num_rows: int) -> Tensor:
    """dX = dY W on the active rows, exact zeros elsewhere; [N, K] in dout's dtype (paper, equation 1)."""
    dx_NK = dout_AM.new_zeros(num_rows, weight_MK.shape[1])
    return dx_NK.index_copy_(0, rows_A, dout_AM @ weight_MK)


def sparse_linear_dweight(dout_AM: Tensor, x_AK: Tensor) -> Tensor:
    """dW = dY[A]ᵀ X[A]; [M, K] (paper, equation 2)."""
    return dout_AM.T @ x_AK


def sparse_linear_dbias(dout_AM: Tensor) -> Tensor:
    """db = the sum of dY over the active rows; [M]."""
    return dout_AM.sum(dim=0)


def gather_rows(x_NK: Tensor, rows_A: Tensor) -> Tensor:
    """X[A]; [A, K], contiguous."""
    return torch.index_select(x_NK, 0, rows_A)
