"""SoftTargets: tokens that share the loss of each loss row with its target, as a teacher finds them probable.

Shapes: C loss rows, K soft targets of each.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class SoftTargets(NamedTuple):
    """Further targets of each loss row; the row's own target has the share that they leave of 1.

    Attributes:
        ids: token ids, int64 [C, K].
        shares: their shares, fp32 [C, K]; 0 for those that a row lacks.
    """

    ids: Tensor
    shares: Tensor

    @classmethod
    def unused(cls, num_rows: int, number: int) -> "SoftTargets":
        """Returns soft targets of share 0, on the host."""
        return cls(torch.zeros(num_rows, number, dtype=torch.int64), torch.zeros(num_rows, number))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "SoftTargets":
        """Returns the same soft targets on `device`."""
        return SoftTargets(*(part.to(device, non_blocking=non_blocking) for part in self))

    def filled(self, num_filler: int) -> "SoftTargets":
        """Appends rows of share 0."""
        return SoftTargets(*(F.pad(part, (0, 0, 0, num_filler)) for part in self))
