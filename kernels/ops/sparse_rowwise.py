"""A function of single rows, such as a norm or an activation, with SEBP's backward pass.

    forward    y_n = f(x_n; theta)                        unchanged
    backward   dx_n = (df/dx_n)ᵀ dy_n,  dx elsewhere = 0  n in A: the active rows, all that carry gradient
               dtheta = sum over A of (df/dtheta)ᵀ dy_n

f runs again, on the active rows, and autograd does the rest; nothing of the other rows is kept. Shapes: N rows (all
leading dimensions of X, flattened), A active rows, K columns of X and Y.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sebp_edge.ops.rows import ActiveRows, as_rows, kept_rows, put_back, take_gradient, take_kept, verify_skipped


class _SparseRowwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, function, rows, kept_x, *parameters):
        # The parameters themselves, so that autograd notices if they change before the backward pass.
        ctx.save_for_backward(kept_x, *parameters)
        ctx.function, ctx.rows = function, rows
        device = x.device.type
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        return function(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        kept_x, *parameters = ctx.saved_tensors
        dout_NK = dout.reshape(-1, dout.shape[-1])
        verify_skipped(dout_NK, ctx.rows)
        asked_x, _, _, _, *asked = ctx.needs_input_grad
        x_AK = take_kept(kept_x, ctx.rows, len(dout_NK)).detach().requires_grad_(asked_x)
        with torch.enable_grad(), torch.autocast(*ctx.autocast):
            out_AK = ctx.function(x_AK)
        wanted = [tensor for tensor in (x_AK, *parameters) if tensor.requires_grad]
        found = iter(torch.autograd.grad(out_AK, wanted, take_gradient(dout_NK, ctx.rows)))
        dx = put_back(next(found), ctx.rows, len(dout_NK)).view(dout.shape) if asked_x else None
        return dx, None, None, None, *[next(found) if one else None for one in asked]


def sparse_rowwise(
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    rows: Tensor | ActiveRows | slice,
    parameters: tuple[Tensor, ...] = (),
) -> Tensor:
    """`function(x)`, with a backward pass over the active rows only.

    Args:
        function: of each row by itself, to one as wide, without randomness.
        x: [..., K], any floating dtype; its leading dimensions are the rows, flattened in order.
        rows: the only rows whose output gradient may be non-zero: int64 [A] on x's device, increasing; the same as
            `ActiveRows`; or a slice.
        parameters: all that `function` reads and may train.

    Returns:
        [..., K]. Twice differentiable it is not.
    """
    if not torch.is_grad_enabled():
        return function(x)
    rows = as_rows(rows, x.shape[:-1].numel())
    kept_x = kept_rows(x.detach().reshape(-1, x.shape[-1]), rows)
    return _SparseRowwise.apply(x, function, rows, kept_x, *parameters)
