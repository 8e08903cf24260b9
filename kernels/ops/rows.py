"""Sets of active rows: a slice if they are contiguous, which costs nothing, else their ids.

The active rows of a right-padded batch of one sequence are a slice: a view selects them, and a product is written
straight into its rows. Shapes: N rows, A active rows, M columns.
"""

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class ActiveRows(NamedTuple):
    """Scattered rows. Make one for all layers that share these rows, so that `slots` is computed once.

    Attributes:
        ids: int64 [A], increasing. With a `count`, A is a capacity: only the first `count` are rows, the rest are 0.
        slots: int32 [N], the index of each row in `ids`, or -1.
        count: int64 [], the number of rows, if only the device knows it; None for all of `ids`.
        weights: fp32 [A], factors on the rows' gradients; None for 1.
    """

    ids: Tensor
    slots: Tensor
    count: Tensor | None = None
    weights: Tensor | None = None

    @classmethod
    def from_ids(cls, ids: Tensor, num_rows: int) -> "ActiveRows":
        """The rows with these ids, int64 [A] and increasing, of `num_rows`."""
        slots = torch.full((num_rows,), -1, dtype=torch.int32, device=ids.device)
        return cls(ids, slots.index_copy_(0, ids, torch.arange(len(ids), dtype=torch.int32, device=ids.device)))

    def on_host(self) -> "ActiveRows":
        """The same rows, `ids` and `weights` trimmed to `count`; on a GPU this waits for the device."""
        if self.count is None:
            return self
        count = int(self.count)
        return ActiveRows(self.ids[:count], self.slots, None, None if self.weights is None else self.weights[:count])


Selector = Callable[[tuple[Tensor, ...]], ActiveRows]
"""Chooses rows from the output gradients [N, M_i] of layers that are computed together."""

Rows = Tensor | ActiveRows | slice | Selector
"""int64 ids [A], increasing; `ActiveRows`; a slice with start and stop; or a function that chooses rows in the backward
pass, such as `detect`. None stands for all rows."""

VERIFY = os.environ.get("SEBP_EDGE_VERIFY") == "1"
"""Whether backward passes check that the rows they skip are zero; costs a host synchronisation each."""


def as_rows(rows: Rows | None, num_rows: int) -> ActiveRows | slice | Selector | None:
    """Turns ids into `ActiveRows`; returns anything else as it is."""
    return ActiveRows.from_ids(rows, num_rows) if isinstance(rows, Tensor) else rows


def num_active(rows: ActiveRows | slice) -> int:
    """The number of rows, or their capacity if only the device knows it."""
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows.ids)


def verify_skipped(dout_NM: Tensor, rows: ActiveRows | slice | None) -> None:
    """With `VERIFY`, checks that dY is zero outside the active rows.

    Raises:
        RuntimeError: a skipped row has a gradient.
    """
    if not VERIFY or rows is None:
        return
    if isinstance(rows, slice):
        skipped_N = torch.ones(len(dout_NM), dtype=torch.bool, device=dout_NM.device)
        skipped_N[rows] = False
    else:
        skipped_N = rows.slots < 0
    num_wrong, num_skipped = int((dout_NM.ne(0).any(dim=1) & skipped_N).sum()), int(skipped_N.sum())
    if num_wrong:
        raise RuntimeError(
            f"{num_wrong} of {num_skipped} skipped rows have a gradient, so these active rows are wrong for this loss."
        )
