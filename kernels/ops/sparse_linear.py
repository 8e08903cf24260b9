"""A linear layer with SEBP's backward pass.

    forward    Y = X Wᵀ + b                              unchanged
    backward   dX[A] = dY[A] W,  dX elsewhere = 0        A: the active rows, all that carry gradient
               dW    = dY[A]ᵀ X[A]
               db    = sum of dY[A]

Exact if and only if the rows of dY outside A are zero (Topchii et al., equations 1 and 2, with every gradient kept).
Shapes: N rows (all leading dimensions of X, flattened), A active rows, K inputs, M outputs.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sebp_edge.ops.rows import Rows, RowTarget, kept_rows, take, take_gradient, take_kept

Keep = Callable[[Tensor, Tensor, Rows], Tensor]


class _SparseLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_MK, bias_M, rows, kept_x):
        ctx.save_for_backward(weight_MK, kept_x)
        ctx.rows, ctx.x_shape = rows, x.shape
        return F.linear(x, weight_MK, bias_M)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        weight_MK, kept_x = ctx.saved_tensors
        rows, weights_A = ctx.rows, None
        dout_NM = dout.reshape(-1, dout.shape[-1])
        if callable(rows):
            rows, weights_A = rows((dout_NM,)).on_host()
            dout_AM = take(dout_NM, rows, weights_A)
        else:
            dout_AM = take_gradient(dout_NM, rows)
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            target = RowTarget(rows, dout_NM.shape[0], weight_MK.shape[1], dout_AM)
            torch.mm(dout_AM, weight_MK, out=target.part)
            dx = target.whole().reshape(ctx.x_shape)
        if ctx.needs_input_grad[1]:
            dweight = dout_AM.T @ take_kept(kept_x, rows, dout_NM.shape[0])
        if ctx.needs_input_grad[2]:
            dbias = dout_AM.sum(dim=0)
        return dx, dweight, dbias, None, None


def _keep(x: Tensor, x_cast: Tensor, rows: Rows) -> Tensor:
    return kept_rows(x_cast.detach().reshape(-1, x.shape[-1]), rows)


def sparse_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, rows: Rows | None = None, keep: Keep = _keep
) -> Tensor:
    """`F.linear(x, weight, bias)`, with a backward pass over the active rows only.

    Args:
        x: [..., K], any floating dtype; its leading dimensions are the rows, flattened in order.
        weight: [M, K]; under autocast x, weight and bias are cast as `F.linear` would cast them.
        bias: [M], or None.
        rows: the only rows whose output gradient may be non-zero: int64 [A] on x's device, increasing, or a slice;
            a function that chooses them in the backward pass (`detect` finds the non-zero ones: exact for any loss);
            None for all rows, which is `F.linear` itself.
        keep: gives what is kept of x for a trained weight, from x, x in the product's dtype, and rows (`kept_rows`);
            layers that read the same x may share it. A frozen weight needs nothing of x.

    Returns:
        [..., M] in the dtype `F.linear` gives. Twice differentiable it is not.
    """
    if rows is None or not torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    x_cast = x
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x_cast, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    kept_x = keep(x, x_cast, rows) if weight.requires_grad else None
    return _SparseLinear.apply(x_cast, weight, bias, rows, kept_x)
