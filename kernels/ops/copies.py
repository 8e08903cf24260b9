"""Copies of trained tensors in the dtype and place where products read them, many at once."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import backend


class TensorCopy(NamedTuple):
    """destination = scale * source, rounded once; both [rows, columns], of any strides and floating dtypes."""

    source: Tensor
    destination: Tensor
    scale: float = 1.0


@torch.no_grad()
def copy_all(copies: Sequence[TensorCopy]) -> None:
    """Makes the copies now."""
    if plain := [copy for copy in copies if copy.scale == 1]:
        torch._foreach_copy_([copy.destination for copy in plain], [copy.source for copy in plain])
    for copy in copies:
        if copy.scale != 1:
            torch.mul(copy.source, copy.scale, out=copy.destination)


def repeatedly(copies: Sequence[TensorCopy]) -> Callable[[], None]:
    """A function that makes these copies again and again, in one launch if our kernels can.

    It keeps the tensors, and a table that a graph captured with it reads.
    """
    if copies and backend.runs_kernels(copies[0].destination) and backend.kernels("copies").can_copy(copies):
        return backend.kernels("copies").CopyTable(copies).run
    return lambda: copy_all(copies)
