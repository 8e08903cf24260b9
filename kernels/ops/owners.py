"""Which of several adapters that lie side by side owns each row.

Shapes: N rows, n adapters.
"""

from typing import NamedTuple

from torch import Tensor

from . import backend


class Owners(NamedTuple):
    """The owner of each row, and where to look for the rows of each adapter.

    Attributes:
        of_rows: int32 [N], the adapter's number; -1 for none.
        ranges: int32 [n, 2], the first row of each adapter and the one after its last.
    """

    of_rows: Tensor
    ranges: Tensor

    @classmethod
    def of(cls, owners_N: Tensor, num_adapters: int) -> "Owners":
        """Finds the ranges, without waiting for a GPU."""
        return cls(owners_N, backend.implementation(owners_N, "owners").ranges_of(owners_N, num_adapters))
