"""Gathers rows of a matrix and scatters them back: two differentiable ops, and helpers of backward passes.

    gather     out = X[A]                              backward   dX[A] = dout, zero elsewhere
    scatter    out[A] = X, zero elsewhere              backward   dX = dout[A]

Each is the other's transpose. Shapes: N rows, A active rows, K or M columns.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import backend
from .rows import ActiveRows, Rows, as_rows, num_active

KEEP_ALL_ABOVE = 0.5
"""The share of active rows above which all of X is kept: X is there already, a copy of most of it would come on top."""


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_NK, rows):
        ctx.rows = rows
        return take(x_NK, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout_AK):
        return put(dout_AK, ctx.rows), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_AK, rows):
        ctx.rows = rows
        return put(x_AK, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout_NK):
        return take(dout_NK, ctx.rows), None


def gather_rows(x: Tensor, rows: Tensor | ActiveRows | slice) -> Tensor:
    """X[A].

    Args:
        x: [N, K].
        rows: int64 [A] on x's device, increasing; `ActiveRows`; or a slice, which gives a view.
    """
    return x[rows] if isinstance(rows, slice) else _Gather.apply(x, as_rows(rows, len(x)))


def scatter_rows(x: Tensor, rows: Tensor | ActiveRows | slice, num_rows: int) -> Tensor:
    """A matrix [num_rows, K] with x's rows [A, K] at the ids `rows`, and zeros elsewhere."""
    if isinstance(rows, slice):
        return F.pad(x, (0, 0, rows.start, num_rows - rows.stop))
    return _Scatter.apply(x, as_rows(rows, num_rows))


# ------------------------------------------------------------------------------------- in backward passes of other ops


def take(x_NK: Tensor, rows: ActiveRows | slice | None, weights_A: Tensor | None = None) -> Tensor:
    """X[A], a view if possible, times the weights, which a slice does not have; zero from `rows.count` on."""
    if rows is None:
        return x_NK
    if isinstance(rows, slice):
        return x_NK[rows]
    return backend.implementation(x_NK, "move_rows").gather_rows(x_NK, rows.ids, rows.count, weights_A)


def take_gradient(dout_NM: Tensor, rows: ActiveRows | slice | None) -> Tensor:
    """dY[A], times the rows' weights, if there are any."""
    return take(dout_NM, rows, rows.weights if isinstance(rows, ActiveRows) else None)


def keep_rows(x_NK: Tensor, rows: Rows | None) -> Tensor:
    """What to keep of X for dW: a copy of X[A], or X itself if A is not known yet or is most of its rows.

    Never a view of few rows, which would keep all of X in memory.
    """
    if rows is None or callable(rows):
        return x_NK
    rows = as_rows(rows, len(x_NK))
    if num_active(rows) > KEEP_ALL_ABOVE * len(x_NK):
        return x_NK
    return x_NK[rows].clone() if isinstance(rows, slice) else take(x_NK, rows)


def take_kept(kept: Tensor, rows: ActiveRows | slice | None, num_rows: int) -> Tensor:
    """X[A] from what `keep_rows` kept."""
    return take(kept, rows) if len(kept) == num_rows else kept


def put(x_AK: Tensor, rows: ActiveRows) -> Tensor:
    """The transpose of `take`: a matrix with X's rows at their ids, zeros elsewhere; [N, K]."""
    return backend.implementation(x_AK, "move_rows").scatter_rows(x_AK, rows.slots)


class RowTarget:
    """A matrix [N, K] that is zero outside its active rows: write these into `part`, [A, K], then ask for `whole()`."""

    def __init__(self, rows: ActiveRows | slice | None, num_rows: int, num_columns: int, like: Tensor):
        self._rows = rows
        self._whole = None
        if isinstance(rows, slice):
            self._whole = like.new_empty(num_rows, num_columns)
            self._whole[: rows.start].zero_()
            self._whole[rows.stop :].zero_()
            self.part = self._whole[rows]
        else:
            self.part = like.new_empty(num_rows if rows is None else len(rows.ids), num_columns)

    def whole(self) -> Tensor:
        """All rows, [N, K]."""
        if self._whole is not None:
            return self._whole
        return self.part if self._rows is None else put(self.part, self._rows)
