"""A linear layer with SEBP's backward pass.

    forward    Y = X Wᵀ + b                              unchanged
    backward   dX[A] = dY[A] W,  dX elsewhere = 0        A: the active rows, all that carry gradient
               dW    = dY[A]ᵀ X[A]
               db    = sum of dY[A]

Exact if and only if the rows of dY outside A are zero (Topchii et al., equations 1 and 2, with every gradient kept).
Shapes: N rows (all leading dimensions of X, flattened), A active rows, K inputs, M outputs.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, library
from torch.autograd.function import once_differentiable

from . import backend, choices
from .move_rows import RowTarget, keep_rows, take, take_kept
from .precise_sums import precise_sums
from .rows import ActiveRows, Rows, as_rows, has_unknown_count, num_active, rows_of

Keep = Callable[[Tensor, Tensor, Rows], Tensor]


class NeededGradients(NamedTuple):
    """Which gradients are needed."""

    dx: bool
    dweight: bool
    dbias: bool


class Gradients(NamedTuple):
    """dX [N, K], dW [M, K], db [M]; None for those that are not needed."""

    dx: Tensor | None = None
    dweight: Tensor | None = None
    dbias: Tensor | None = None


@precise_sums()
def _gradients_of_compact_rows(
    dout_NM: Tensor, weight_MK: Tensor, x_AK: Tensor | None, rows: ActiveRows | slice, needed: NeededGradients
) -> Gradients:
    """PyTorch multiplies the active rows, which are gathered unless a view selects them."""
    dout_AM = take(dout_NM, rows)
    dx = dweight = dbias = None
    if needed.dx:
        target = RowTarget(rows, len(dout_NM), weight_MK.shape[1], dout_AM)
        torch.mm(dout_AM, weight_MK, out=target.part)
        dx = target.whole()
    if needed.dweight:
        dweight = dout_AM.T @ x_AK
    if needed.dbias:
        dbias = dout_AM.sum(dim=0)
    return Gradients(dx, dweight, dbias)


def _gradients_of_rows(
    dout_NM: Tensor, weight_MK: Tensor, x: Tensor | None, rows: ActiveRows | slice, needed: NeededGradients
) -> Gradients:
    """Computes each product by its chosen algorithm: our kernels on rows in place, or PyTorch on compact rows.

    x is what `keep_rows` kept; None if dW is not needed.
    """
    algorithms = _choose_algorithms(dout_NM, weight_MK, rows, needed)
    dx = dweight = dbias = None
    if needed.dx and algorithms.dx is not None:
        dx = backend.kernels("products").dx(dout_NM, weight_MK, rows, algorithms.dx)
        needed = needed._replace(dx=False)
    if needed.dweight and algorithms.dweight is not None:
        dweight, dbias = backend.kernels("products").dweight(
            dout_NM, x, rows, algorithms.dweight, x_has_all_rows=len(x) == len(dout_NM), with_bias=needed.dbias
        )
        needed = needed._replace(dweight=False, dbias=False)
    if any(needed):
        if has_unknown_count(rows) and algorithms.dx is algorithms.dweight is None:
            # Without kernels, read the count on the host (synchronises) and trim the rows.
            rows = rows.on_host()
        x_AK = take_kept(x, rows, len(dout_NM)) if needed.dweight else None
        rest = _gradients_of_compact_rows(dout_NM, weight_MK, x_AK, rows, needed)
        dx, dweight = rest.dx if needed.dx else dx, rest.dweight if needed.dweight else dweight
        dbias = rest.dbias if needed.dbias else dbias
    return Gradients(dx, dweight, dbias)


def _choose_algorithms(
    dout_NM: Tensor, weight_MK: Tensor, rows: ActiveRows | slice, needed: NeededGradients
) -> choices.Algorithms:
    """The algorithm of each product; PyTorch computes contiguous rows, and all rows where our kernels do not run."""
    if isinstance(rows, slice) or not (backend.runs_kernels(dout_NM) and (needed.dx or needed.dweight)):
        return choices.Algorithms()
    itemsize, device = dout_NM.dtype.itemsize, dout_NM.device
    if has_unknown_count(rows):
        return choices.choose_for_unknown_count(itemsize, device)
    num_outputs, num_inputs = weight_MK.shape
    shape = choices.Shape.of(needed.dx, needed.dweight, itemsize, num_inputs, num_outputs, num_active(rows))
    return choices.choose(shape, device)


@library.custom_op("sebp_edge::sparse_linear_backward", mutates_args=())
def _backward_op(
    dout_NM: Tensor,
    weight_MK: Tensor,
    x: Tensor | None,
    ids: Tensor,
    slots: Tensor,
    count: Tensor | None,
    needed: list[bool],
) -> list[Tensor]:
    """`_gradients_of_rows` as one operation of a compiled graph; returns only the needed gradients."""
    rows = ActiveRows(ids, slots, count)
    gradients = _gradients_of_rows(dout_NM, weight_MK, x, rows, NeededGradients._make(needed))
    return [gradient for gradient in gradients if gradient is not None]


@_backward_op.register_fake
def _(dout_NM, weight_MK, x, ids, slots, count, needed):
    shapes = (dout_NM.shape[0], weight_MK.shape[1]), weight_MK.shape, weight_MK.shape[:1]
    return [weight_MK.new_empty(shape) for shape, is_needed in zip(shapes, needed, strict=True) if is_needed]


class _SparseLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_MK, bias_M, rows, kept_x):
        ctx.save_for_backward(weight_MK, kept_x)
        ctx.rows, ctx.x_shape = rows, x.shape
        # With a bias the result is a view, and views that a Function returns cannot be changed in place.
        return F.linear(x, weight_MK, bias_M).data

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        weight_MK, x = ctx.saved_tensors
        dout_NM = dout.reshape(-1, dout.shape[-1])
        rows, needed = rows_of(ctx.rows, dout_NM), NeededGradients(*ctx.needs_input_grad[:3])
        if torch.compiler.is_compiling() and isinstance(rows, ActiveRows):
            found = iter(_backward_op(dout_NM, weight_MK, x, *rows, list(needed)))
            gradients = Gradients(*[next(found) if is_needed else None for is_needed in needed])
        else:
            gradients = _gradients_of_rows(dout_NM, weight_MK, x, rows, needed)
        dx = gradients.dx.reshape(ctx.x_shape) if needed.dx else None
        return dx, gradients.dweight, gradients.dbias, None, None


def _keep(x: Tensor, x_cast: Tensor, rows: Rows) -> Tensor:
    return keep_rows(x_cast.detach().reshape(-1, x.shape[-1]), rows)


def sparse_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, rows: Rows | None = None, keep: Keep = _keep
) -> Tensor:
    """`F.linear(x, weight, bias)`, with a backward pass over the active rows only.

    Args:
        x: [..., K], any floating dtype; its leading dimensions are the rows, flattened in order.
        weight: [M, K]; under autocast x, weight and bias are cast as `F.linear` would cast them.
        bias: [M], or None.
        rows: the only rows whose output gradient may be non-zero: int64 [A] on x's device, increasing; the same as
            `ActiveRows`, for several layers; a slice; a function that chooses them in the backward pass (`detect` finds
            the non-zero ones, exact for any loss); None for all rows, which is `F.linear` itself.
        keep: returns what to keep of x for a trained weight (see `keep_rows`), given x, x in the product's dtype, and
            rows; layers that read the same x may share it. A frozen weight needs nothing of x.

    Returns:
        [..., M] in the dtype `F.linear` gives. First-order gradients only.
    """
    if rows is None or not torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    rows = as_rows(rows, x.shape[:-1].numel())
    x_cast = x
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x_cast, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    kept_x = keep(x, x_cast, rows) if weight.requires_grad else None
    return _SparseLinear.apply(x_cast, weight, bias, rows, kept_x)
