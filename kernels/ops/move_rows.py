"""Rows taken out of a matrix and put back, differentiable: each is the other's transpose.

    gather     out = X[A]                              backward   dX[A] = dout, zero elsewhere
    scatter    out[A] = X, zero elsewhere              backward   dX = dout[A]

Shapes: N rows, A active rows, K columns.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sebp_edge.ops import backend


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_NK, rows_A):
        ctx.save_for_backward(rows_A)
        ctx.num_rows = x_NK.shape[0]
        return backend.gather_rows(x_NK, rows_A)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout_AK):
        return backend.scatter_rows(dout_AK, *ctx.saved_tensors, ctx.num_rows), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_AK, rows_A, num_rows):
        ctx.save_for_backward(rows_A)
        return backend.scatter_rows(x_AK, rows_A, num_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout_NK):
        return backend.gather_rows(dout_NK, *ctx.saved_tensors), None, None


def gather_rows(x: Tensor, rows: Tensor | slice) -> Tensor:
    """X[A].

    Args:
        x: [N, K].
        rows: int64 [A] on x's device, increasing, or a slice, which gives a view.
    """
    return x[rows] if isinstance(rows, slice) else _Gather.apply(x, rows)


def scatter_rows(x: Tensor, rows: Tensor | slice, num_rows: int) -> Tensor:
    """A matrix [num_rows, K] with x's rows [A, K] at the ids `rows`, and zeros elsewhere."""
    if isinstance(rows, slice):
        return F.pad(x, (0, 0, rows.start, num_rows - rows.stop))
    return _Scatter.apply(x, rows, num_rows)
