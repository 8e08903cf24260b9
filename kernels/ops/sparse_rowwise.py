"""A function of single rows, such as a norm or an activation, with SEBP's backward pass.

    forward    y_n = f(x_n; theta)                        unchanged
    backward   dx_n = (df/dx_n)ᵀ dy_n,  dx elsewhere = 0  n in A: the active rows, all that carry gradient
               dtheta = sum over A of (df/dtheta)ᵀ dy_n

f runs twice: on all rows for the values, and on the active rows for autograd, which keeps nothing of the others.
Shapes: N rows (all leading dimensions of X, flattened), A active rows, K columns of X and Y.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .move_rows import copy_rows, take
from .rows import ActiveRows, as_rows, rows_of


class _SparseRowwise(torch.autograd.Function):
    """The values of all rows, with the gradient of the active ones."""

    @staticmethod
    def forward(ctx, function, x, out_AK, rows):
        ctx.rows = rows
        return function(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        dout_NK = dout.reshape(-1, dout.shape[-1])
        return None, None, take(dout_NK, rows_of(ctx.rows, dout_NK)), None


def sparse_rowwise(function: Callable[[Tensor], Tensor], x: Tensor, rows: Tensor | ActiveRows | slice) -> Tensor:
    """`function(x)`, with a backward pass over the active rows only.

    Args:
        function: maps each row by itself to one as wide, without randomness.
        x: [..., K], any floating dtype; its leading dimensions are the rows, flattened in order.
        rows: the only rows whose output gradient may be non-zero: int64 [A] on x's device, increasing; the same as
            `ActiveRows`; or a slice.

    Returns:
        [..., K], with gradients for x and for the parameters of `function`.
    """
    if not torch.is_grad_enabled():
        return function(x)
    rows = as_rows(rows, x.shape[:-1].numel())
    out_AK = function(copy_rows(x.reshape(-1, x.shape[-1]), rows))
    return _SparseRowwise.apply(function, x.detach(), out_AK, rows)
