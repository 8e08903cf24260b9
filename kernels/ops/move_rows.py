"""Rows taken out of a matrix and put back, differentiable: each is the other's transpose.

    gather     out = X[A]                              backward   dX[A] = dout, zero elsewhere
    scatter    out[A] = X, zero elsewhere              backward   dX = dout[A]

Shapes: N rows, A active rows, K columns.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import backend
from .rows import ActiveRows, as_rows, take


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_NK, rows):
        ctx.rows = rows
        return take(x_NK, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout_AK):
        return backend.scatter_rows(dout_AK, ctx.rows.places), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_AK, rows):
        ctx.rows = rows
        return backend.scatter_rows(x_AK, rows.places)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout_NK):
        return take(dout_NK, ctx.rows), None


def gather_rows(x: Tensor, rows: Tensor | ActiveRows | slice) -> Tensor:
    """X[A].

    Args:
        x: [N, K].
        rows: int64 [A] on x's device, increasing; the same as `ActiveRows`; or a slice, which gives a view.
    """
    return x[rows] if isinstance(rows, slice) else _Gather.apply(x, as_rows(rows, len(x)))


def scatter_rows(x: Tensor, rows: Tensor | ActiveRows | slice, num_rows: int) -> Tensor:
    """A matrix [num_rows, K] with x's rows [A, K] at the ids `rows`, and zeros elsewhere."""
    if isinstance(rows, slice):
        return F.pad(x, (0, 0, rows.start, num_rows - rows.stop))
    return _Scatter.apply(x, as_rows(rows, num_rows))
