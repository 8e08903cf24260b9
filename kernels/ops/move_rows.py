"""Gathers rows of a matrix and scatters them back: two differentiable ops, and helpers of backward passes.

Each of the two is the other's transpose. Shapes: N rows, A active rows, K or M columns.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import backend
from .rows import ActiveRows, KnownRows, Rows, as_rows, num_active

KEEP_ALL_ABOVE = 0.5
"""The share of active rows above which all of X is kept: X is there already, a copy of most of it would come on top."""


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_NK, rows):
        ctx.rows, ctx.num_rows = rows, len(x_NK)
        return take(x_NK, rows, copied=True)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout_AK):
        return put(dout_AK, ctx.rows, ctx.num_rows), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_AK, rows, num_rows):
        ctx.rows = rows
        return put(x_AK, rows, num_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout_NK):
        return take(dout_NK, ctx.rows), None, None


def gather_rows(x: Tensor, rows: Tensor | ActiveRows | slice) -> Tensor:
    """X[A].

    Args:
        x: [N, K].
        rows: int64 [A] on x's device, increasing; `ActiveRows`; or a slice, which gives a view.
    """
    return x[rows] if isinstance(rows, slice) else copy_rows(x, as_rows(rows, len(x)))


def scatter_rows(x: Tensor, rows: Tensor | ActiveRows | slice, num_rows: int) -> Tensor:
    """A matrix [num_rows, K] with x's rows [A, K] at the ids `rows`, and zeros elsewhere."""
    return _Scatter.apply(x, as_rows(rows, num_rows), num_rows)


# ------------------------------------------------------------------------------------------------------ in other ops


def copy_rows(x_NK: Tensor, rows: ActiveRows | slice) -> Tensor:
    """X[A] in memory of its own, differentiable: a view of a few rows would keep all of X."""
    return _Gather.apply(x_NK, rows)


def take(x_NK: Tensor, rows: KnownRows, *, copied: bool = False) -> Tensor:
    """X[A], zero from `rows.count` on; a view for all rows and for a slice, unless it must be copied."""
    if isinstance(rows, ActiveRows):
        return backend.implementation(x_NK, "move_rows").gather_rows(x_NK, rows.ids, rows.count)
    part = x_NK if rows is None else x_NK[rows]
    return part.clone() if copied else part


def keep_rows(x_NK: Tensor, rows: Rows | None) -> Tensor:
    """What to keep of X for dW: a copy of X[A], or X itself if A is not known yet or is most of its rows.

    Never a view of few rows, which would keep all of X in memory.
    """
    if rows is None or callable(rows):
        return x_NK
    rows = as_rows(rows, len(x_NK))
    return x_NK if num_active(rows) > KEEP_ALL_ABOVE * len(x_NK) else take(x_NK, rows, copied=True)


def take_kept(kept: Tensor, rows: KnownRows, num_rows: int) -> Tensor:
    """X[A] from what `keep_rows` kept, before the rows were trimmed to their count."""
    return take(kept, rows) if len(kept) == num_rows else kept[: num_active(rows)]


def put(x_AK: Tensor, rows: ActiveRows | slice, num_rows: int) -> Tensor:
    """The transpose of `take`: a matrix with X's rows at their ids, zeros elsewhere; [N, K]."""
    if isinstance(rows, ActiveRows):
        return backend.implementation(x_AK, "move_rows").scatter_rows(x_AK, rows.slots)
    return F.pad(x_AK, (0, 0, rows.start, num_rows - rows.stop))


class RowTarget:
    """A matrix [N, K] that is zero outside its active rows: write these into `part`, [A, K], then ask for `whole()`."""

    def __init__(self, rows: KnownRows, num_rows: int, num_columns: int, like: Tensor):
        is_scattered = isinstance(rows, ActiveRows)
        self._scattered = (rows, num_rows) if is_scattered else None
        self._whole = self.part = like.new_empty(num_active(rows) if is_scattered else num_rows, num_columns)
        if isinstance(rows, slice):
            self._whole[: rows.start].zero_()
            self._whole[rows.stop :].zero_()
            self.part = self._whole[rows]

    def whole(self) -> Tensor:
        """All rows, [N, K]."""
        return self._whole if self._scattered is None else put(self.part, *self._scattered)
