"""Sets of active rows: a slice where they are contiguous, which costs nothing, or ids with their places.

A right-padded batch of one sequence has a slice: its rows are a view, and a product is written where it belongs.
Shapes: N rows, A active rows, K columns.
"""

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import backend


class ActiveRows(NamedTuple):
    """Scattered rows. Make it once for all layers that compute the same rows: the map is then made once too.

    Attributes:
        ids: int64 [A], increasing. With a `count`, A is a capacity: the first `count` are the rows, the others are 0.
        places: int32 [N], the place of each row in `ids`, or -1.
        count: int64 [], on the device, where only the device knows how many rows there are; None: all of `ids`.
        weights: fp32 [A], by which each row's gradient is multiplied; None for one.
    """

    ids: Tensor
    places: Tensor
    count: Tensor | None = None
    weights: Tensor | None = None

    @classmethod
    def from_ids(cls, ids: Tensor, num_rows: int) -> "ActiveRows":
        """The rows with these ids, int64 [A] and increasing, of `num_rows`."""
        places = torch.full((num_rows,), -1, dtype=torch.int32, device=ids.device)
        return cls(ids, places.index_copy_(0, ids, torch.arange(len(ids), dtype=torch.int32, device=ids.device)))

    def on_host(self) -> "ActiveRows":
        """The same rows, without what is beyond their number; on a GPU this waits for the device."""
        if self.count is None:
            return self
        count = int(self.count)
        return ActiveRows(self.ids[:count], self.places, None, None if self.weights is None else self.weights[:count])


Selector = Callable[[tuple[Tensor, ...]], ActiveRows]
"""Chooses rows from the output gradients [N, M_i] of the layers that are computed together."""

Rows = Tensor | ActiveRows | slice | Selector
"""int64 ids [A], increasing; the same as `ActiveRows`, for several layers; a slice with a begin and an end; or a
function that chooses in the backward pass, such as `detect`. None in its place means all rows."""


KEEP_ALL_ABOVE = 0.5
"""The share of active rows above which all of X is kept: it is there already, a copy of most of it comes on top."""

VERIFY = os.environ.get("SEBP_EDGE_VERIFY") == "1"
"""Whether backward passes check that the rows they skip are zero; costs a host synchronisation for each."""


def as_rows(rows: Rows | None, num_rows: int) -> ActiveRows | slice | Selector | None:
    """The same rows, ids with their places."""
    return ActiveRows.from_ids(rows, num_rows) if isinstance(rows, Tensor) else rows


def verify_skipped(dout_NM: Tensor, rows: ActiveRows | slice | None) -> None:
    """With `VERIFY`, checks that dY is zero outside the active rows.

    Raises:
        RuntimeError: it is not.
    """
    if not VERIFY or rows is None:
        return
    if isinstance(rows, slice):
        skipped_N = torch.ones(len(dout_NM), dtype=torch.bool, device=dout_NM.device)
        skipped_N[rows] = False
    else:
        skipped_N = rows.places < 0
    wrong, of = int((dout_NM.ne(0).any(dim=1) & skipped_N).sum()), int(skipped_N.sum())
    if wrong:
        raise RuntimeError(f"{wrong} of {of} skipped rows have a gradient: these rows are not exact for this loss.")


def take(x_NK: Tensor, rows: ActiveRows | slice | None) -> Tensor:
    """X[A], a view where that is possible; rows beyond the number of rows are zero."""
    if rows is None:
        return x_NK
    return x_NK[rows] if isinstance(rows, slice) else backend.gather_rows(x_NK, rows.ids, rows.count)


def take_gradient(dout_NM: Tensor, rows: ActiveRows | slice | None) -> Tensor:
    """dY[A], times the rows' weights, if there are any."""
    if isinstance(rows, ActiveRows):
        return backend.gather_rows(dout_NM, rows.ids, rows.count, rows.weights)
    return take(dout_NM, rows)


def kept_rows(x_NK: Tensor, rows: Rows | None) -> Tensor:
    """What of X is kept for dW: a copy of X[A], or X itself where A is unknown or most of its rows.

    Never a view of few rows, which would keep all of X in memory.
    """
    if rows is None or callable(rows):
        return x_NK
    rows = as_rows(rows, len(x_NK))
    num_active = rows.stop - rows.start if isinstance(rows, slice) else len(rows.ids)
    if num_active > KEEP_ALL_ABOVE * len(x_NK):
        return x_NK
    return x_NK[rows].clone() if isinstance(rows, slice) else take(x_NK, rows)


def take_kept(kept: Tensor, rows: ActiveRows | slice | None, num_rows: int) -> Tensor:
    """X[A] from what `kept_rows` kept."""
    return take(kept, rows) if len(kept) == num_rows else kept


class RowTarget:
    """A matrix [N, K] that is zero outside its active rows; write these into `part` [A, K], then ask for `whole()`."""

    def __init__(self, rows: ActiveRows | slice | None, num_rows: int, num_columns: int, like: Tensor):
        self._rows = rows
        if isinstance(rows, slice):
            self._whole = like.new_empty(num_rows, num_columns)
            self._whole[: rows.start].zero_()
            self._whole[rows.stop :].zero_()
            self.part = self._whole[rows]
        else:
            self._whole = None
            self.part = like.new_empty(num_rows if rows is None else len(rows.ids), num_columns)

    def whole(self) -> Tensor:
        """All rows, [N, K]."""
        if self._rows is None:
            return self.part
        return self._whole if self._whole is not None else backend.scatter_rows(self.part, self._rows.places)
