"""Rows chosen in the backward pass, from the gradient itself, on the device and without waiting for it.

    row_norms      v_n = sum over the matrices and their columns of dY_nm²
    select_rows    the ids of the rows to keep, in order, and how many they are

The ids come in a tensor of fixed capacity and their number in one element on the device, so that nothing on the host
depends on either. Shapes: N rows, M columns.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sebp_edge.ops import backend


class SelectedRows(NamedTuple):
    """Rows whose number only the device knows.

    Attributes:
        ids: int64 [capacity]; the first `count` are the rows, increasing, the others are 0.
        count: int64 [], on the device.
        weights: fp32 [capacity], by which each row's gradient is multiplied; None for one.
    """

    ids: Tensor
    count: Tensor
    weights: Tensor | None = None

    def on_host(self) -> tuple[Tensor, Tensor | None]:
        """The rows and their weights, without what is beyond their number; on a GPU this waits for the device."""
        count = int(self.count)
        return self.ids[:count], None if self.weights is None else self.weights[:count]


Selector = Callable[[tuple[Tensor, ...]], SelectedRows]
"""Chooses rows from the output gradients [N, M_i] of the layers that are computed together."""


def row_norms(*douts_NM: Tensor) -> Tensor:
    """The squared norm of each row over all the matrices, fp32 [N]; fp64 for fp64."""
    return sum(backend.row_norms(dout_NM) for dout_NM in douts_NM)


def select_rows(keep_N: Tensor, weights_N: Tensor | None = None, *, capacity: int | None = None) -> SelectedRows:
    """The ids of the rows to keep.

    Args:
        keep_N: bool [N].
        weights_N: fp32 [N], or None.
        capacity: most rows to keep, the first ones; N if not given.
    """
    num_rows = len(keep_N)
    capacity = num_rows if capacity is None else min(capacity, num_rows)
    places_N = keep_N.cumsum(0) - 1
    # What is not kept, and what is beyond the capacity, goes to one place past the end, which is cut off.
    places_N = torch.where(keep_N & (places_N < capacity), places_N, capacity)
    ids = torch.zeros(capacity + 1, dtype=torch.int64, device=keep_N.device)
    ids.scatter_(0, places_N, torch.arange(num_rows, device=keep_N.device))
    weights = None
    if weights_N is not None:
        weights = weights_N.new_zeros(capacity + 1).scatter_(0, places_N, weights_N)[:capacity]
    return SelectedRows(ids[:capacity], keep_N.sum().clamp(max=capacity), weights)


def detect(douts_NM: tuple[Tensor, ...]) -> SelectedRows:
    """The rows with any non-zero element in any of the matrices; NaN is not zero."""
    keep_N = backend.nonzero_rows(douts_NM[0])
    for dout_NM in douts_NM[1:]:
        keep_N = keep_N | backend.nonzero_rows(dout_NM)
    return select_rows(keep_N)
