"""Sets of active rows: a slice where they are contiguous, which costs nothing, or increasing ids.

A right-padded batch of one sequence has a slice: its rows are a view, and a product is written where it belongs.
Shapes: N rows, A active rows, K columns.
"""

import os

import torch
from torch import Tensor

from sebp_edge.ops import backend
from sebp_edge.ops.select_rows import Selector

Rows = Tensor | slice | Selector
"""int64 [A], increasing; a slice with a begin and an end; or a function that chooses in the backward pass, such as
`detect`. None in its place means all rows."""


VERIFY = os.environ.get("SEBP_EDGE_VERIFY") == "1"
"""Whether backward passes check that the rows they skip are zero; costs a host synchronisation for each."""


def take_gradient(dout_NM: Tensor, rows: Tensor | slice | None) -> Tensor:
    """dY[A].

    Raises:
        RuntimeError: with `VERIFY`, a row outside A is not zero.
    """
    if VERIFY and rows is not None:
        skipped_N = torch.ones(len(dout_NM), dtype=torch.bool, device=dout_NM.device)
        skipped_N[rows] = False
        wrong, of = int((dout_NM.ne(0).any(dim=1) & skipped_N).sum()), int(skipped_N.sum())
        if wrong:
            raise RuntimeError(f"{wrong} of {of} skipped rows have a gradient: these rows are not exact for this loss.")
    return take(dout_NM, rows)


def take(x_NK: Tensor, rows: Tensor | slice | None, weights_A: Tensor | None = None) -> Tensor:
    """X[A], a view where that is possible; times the rows' weights, if there are any."""
    if rows is None:
        return x_NK
    x_AK = x_NK[rows] if isinstance(rows, slice) else backend.gather_rows(x_NK, rows)
    # In the weights' dtype: the large weight of a small row may be beyond fp16.
    return x_AK if weights_A is None else (x_AK * weights_A[:, None]).to(x_AK.dtype)


class RowTarget:
    """A matrix [N, K] that is zero outside its active rows; write these into `part` [A, K], then ask for `whole()`."""

    def __init__(self, rows: Tensor | slice | None, num_rows: int, num_columns: int, like: Tensor):
        self._rows, self._num_rows = rows, num_rows
        if isinstance(rows, slice):
            self._whole = like.new_empty(num_rows, num_columns)
            self._whole[: rows.start].zero_()
            self._whole[rows.stop :].zero_()
            self.part = self._whole[rows]
        else:
            self._whole = None
            self.part = like.new_empty(num_rows if rows is None else len(rows), num_columns)

    def whole(self) -> Tensor:
        """All rows, [N, K]."""
        if self._rows is None:
            return self.part
        return self._whole if self._whole is not None else backend.scatter_rows(self.part, self._rows, self._num_rows)
