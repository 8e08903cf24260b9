"""TeacherTokens: tokens that stand for a teacher's probabilities at each loss token of an example, with their shares.

Shapes: C loss tokens, K tokens of each.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from sebp_edge.errors import OptionError

# The largest difference of a group's sum of shares from 1: rounding, also that of shares in 16 bits.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class TeacherTokens:
    """What a teacher would predict at each loss token, as groups of k tokens; kept as arrays, as in examples.

    Attributes:
        ids: token ids, [C * K], each group's most probable token first.
        shares: their shares, [C * K]; those of a group sum to 1.
        k: the size of a group.

    Raises:
        OptionError: there are not as many shares as ids, or no whole number of groups, or a group does not sum to 1.
    """

    ids: Sequence[int]
    shares: Sequence[float]
    k: int

    def __post_init__(self):
        object.__setattr__(self, "ids", array("i", self.ids))
        object.__setattr__(self, "shares", array("f", self.shares))
        if self.k < 1 or len(self.ids) % self.k or len(self.ids) != len(self.shares):
            raise OptionError(
                f"TeacherTokens got {len(self.ids)} ids and {len(self.shares)} shares in groups of {self.k}; expected "
                "as many shares as ids, in whole groups of 1 or more."
            )
        totals = [math.fsum(self.shares[begin : begin + self.k]) for begin in range(0, len(self.ids), self.k)]
        wrong = next((total for total in totals if not abs(total - 1) <= TOLERANCE), None)
        if wrong is not None:
            raise OptionError(f"TeacherTokens got a group whose shares sum to {wrong:g}; expected 1.")

    @property
    def num_loss_tokens(self) -> int:
        """The number of groups, C."""
        return len(self.ids) // self.k
