"""Selects rows in the backward pass, from the gradient itself, on the device and without waiting for it.

The ids come in a tensor of fixed capacity and their count stays on the device, so the host depends on neither.
Shapes: N rows, M columns.
"""

import torch
from torch import Tensor

from . import backend
from .rows import ActiveRows


def row_norms(*douts_NM: Tensor) -> Tensor:
    """The squared norm of each row over all the matrices, fp32 [N]; fp64 for fp64."""
    return sum(backend.implementation(dout_NM, "reduce_rows").row_norms(dout_NM) for dout_NM in douts_NM)


def select_rows(keep_N: Tensor, *, capacity: int | None = None) -> ActiveRows:
    """The rows to keep, bool [N], whose number stays on the device; beyond a capacity none is kept."""
    num_rows = len(keep_N)
    capacity = num_rows if capacity is None else min(capacity, num_rows)
    slots_N = keep_N.cumsum(0) - 1
    kept_N = keep_N & (slots_N < capacity)
    # Rows that are not kept go to one extra slot at the end, which is cut off.
    targets_N = torch.where(kept_N, slots_N, capacity)
    ids = torch.zeros(capacity + 1, dtype=torch.int64, device=keep_N.device)
    ids.scatter_(0, targets_N, torch.arange(num_rows, device=keep_N.device))
    slots = torch.where(kept_N, slots_N, -1).to(torch.int32)
    return ActiveRows(ids[:capacity], slots, kept_N.sum())


def nonzero_rows(dout_NM: Tensor, *others_NM: Tensor) -> Tensor:
    """Whether a row has a non-zero element in any of the matrices, bool [N]; NaN is not zero."""
    nonzero_N = backend.implementation(dout_NM, "reduce_rows").nonzero_rows(dout_NM)
    for other_NM in others_NM:
        nonzero_N = nonzero_N | backend.implementation(other_NM, "reduce_rows").nonzero_rows(other_NM)
    return nonzero_N


def detect(douts_NM: tuple[Tensor, ...]) -> ActiveRows:
    """The rows with any non-zero element in any of the matrices; NaN is not zero."""
    return select_rows(nonzero_rows(*douts_NM))
