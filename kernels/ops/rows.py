"""Sets of active rows: None for all rows, a slice if they are contiguous, which costs nothing, else `ActiveRows`.

The active rows of a right-padded batch of one sequence are a slice: a view selects them, and a product is written
straight into its rows. Public functions turn what they are given into one of the three; only this file and `move_rows`
tell them apart. Shapes: N rows, A active rows, M columns.
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
    """

    ids: Tensor
    slots: Tensor
    count: Tensor | None = None

    @classmethod
    def from_ids(cls, ids: Tensor, num_rows: int) -> "ActiveRows":
        """The rows with these ids, int64 [A] and increasing, of `num_rows`."""
        slots = torch.full((num_rows,), -1, dtype=torch.int32, device=ids.device)
        return cls(ids, slots.index_copy_(0, ids, torch.arange(len(ids), dtype=torch.int32, device=ids.device)))

    def on_host(self) -> "ActiveRows":
        """The same rows, `ids` trimmed to `count`; on a GPU this waits for the device."""
        return self if self.count is None else ActiveRows(self.ids[: int(self.count)], self.slots)


Selector = Callable[[tuple[Tensor, ...]], ActiveRows]
"""Chooses rows from the output gradients [N, M_i] of layers that are computed together."""

Rows = Tensor | ActiveRows | slice | Selector
"""int64 ids [A], increasing; `ActiveRows`; a slice with start and stop; or a function that chooses rows in the backward
pass, such as `detect`. None stands for all rows."""

KnownRows = ActiveRows | slice | None
"""What every backward pass computes with."""

VERIFY = os.environ.get("SEBP_EDGE_VERIFY") == "1"
"""Whether backward passes check that the rows they skip are zero; costs a host synchronisation each."""


def as_rows(rows: Rows | None, num_rows: int) -> KnownRows | Selector:
    """Turns ids into `ActiveRows`; returns anything else as it is."""
    return ActiveRows.from_ids(rows, num_rows) if isinstance(rows, Tensor) else rows


def rows_of(rows: KnownRows | Selector, *douts_NM: Tensor) -> KnownRows:
    """The rows of a backward pass: those that a selector chooses now, or the given ones, which `VERIFY` checks."""
    if callable(rows):
        return rows(douts_NM)
    if VERIFY and rows is not None:
        for dout_NM in douts_NM:
            _verify_skipped(dout_NM, rows)
    return rows


def num_active(rows: ActiveRows | slice) -> int:
    """The number of rows, or their capacity if only the device knows it."""
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows.ids)


def has_unknown_count(rows: KnownRows) -> bool:
    """Whether only the device knows how many rows there are."""
    return isinstance(rows, ActiveRows) and rows.count is not None


def skipped_rows(rows: ActiveRows | slice, like_N: Tensor) -> Tensor:
    """Whether a row is not active, bool [N], on the device of any tensor of N rows."""
    if isinstance(rows, ActiveRows):
        return rows.slots < 0
    skipped_N = torch.ones(len(like_N), dtype=torch.bool, device=like_N.device)
    skipped_N[rows] = False
    return skipped_N


def _verify_skipped(dout_NM: Tensor, rows: ActiveRows | slice) -> None:
    skipped_N = skipped_rows(rows, dout_NM)
    num_wrong, num_skipped = int((dout_NM.ne(0).any(dim=1) & skipped_N).sum()), int(skipped_N.sum())
    if num_wrong:
        raise RuntimeError(
            f"{num_wrong} of {num_skipped} skipped rows have a gradient, so these active rows are wrong for this loss."
        )
