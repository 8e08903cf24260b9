"""The phases of N:M training: dense, decay, sparse; and what happens to pruned weights at each step.

All methods keep the N largest weights of each group, chosen anew at each step, and train all weights: the gradient of a
pruned weight is that of the value that the model computed with (straight-through). They differ in the decay phase:

sr-ste              prunes to N:M at once; pruned weights shrink by η λ at each step (Zhou et al. 2021), with λ 2e-4
mdgf-linear         multiplies pruned weights by δ, which falls linearly from 1 to 0
mdgf-exponential    likewise, δ falls exponentially to 0.01, then to 0
sdgf-stepwise       prunes to (M-1):M, then to M/2:M, M/4:M, ... in equal parts
sdgf-geometric      prunes to 8N:8M, then to 4N:4M, 2N:2M and N:M in equal parts

MdGf and SdGf are from Bambhaniya et al. 2024, "Progressive Gradient Flow for Robust N:M Sparsity Training in
Transformers".
"""

import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

from sebp_edge.errors import OptionError, suggest

PruningMethod = Literal["sr-ste", "mdgf-linear", "mdgf-exponential", "sdgf-stepwise", "sdgf-geometric"]
METHODS = get_args(PruningMethod)
MAX_M = 32
# SR-STE's λ.
SHRINKAGE = 2e-4
# δ of mdgf-exponential at the end of the decay phase.
LAST_DECAY = 0.01
_GEOMETRIC = (8, 4, 2, 1)
_PATTERN = re.compile(r"([1-9][0-9]?):([1-9][0-9]?)")


@dataclass(frozen=True)
class Stage:
    """What the model computes with: weights pruned to n:m, where pruned ones are multiplied by `decay`."""

    n: int
    m: int
    decay: float = 0.0

    @property
    def is_dense(self) -> bool:
        return self.n == self.m or self.decay == 1.0


DENSE = Stage(1, 1)


@dataclass(frozen=True, kw_only=True)
class Phases:
    """The stages of a training; see `nm_sparse`.

    Raises:
        OptionError: a value is of the wrong type or out of range.
    """

    pattern: str
    num_steps: int
    method: PruningMethod = "mdgf-exponential"
    dense: float = 0.0
    decay: float = 0.5

    def __post_init__(self):
        parse_pattern(self.pattern)
        if self.method not in METHODS:
            raise OptionError(f"Unknown N:M method {str(self.method)[:40]!r}; {suggest(str(self.method), METHODS)}")
        shares, decay = (self.dense, self.decay), 0 if self.method == "sr-ste" else self.decay
        if not all(type(share) in (int, float) and 0 <= share < 1 for share in shares) or self.dense + decay >= 1:
            raise OptionError(
                f"The dense phase is {str(self.dense)[:40]} and the decay phase {str(self.decay)[:40]} of the steps; "
                "expected shares of at least 0 whose sum is below 1, since the sparse phase has the rest."
            )
        if type(self.num_steps) is not int or self.num_steps < 1:
            raise OptionError(f"The number of steps is {str(self.num_steps)[:40]}; expected a whole number above 0.")

    @property
    def shrinkage(self) -> float:
        """λ, times which the learning rate is the share that pruned weights lose at each step."""
        return SHRINKAGE if self.method == "sr-ste" else 0.0

    @property
    def final(self) -> Stage:
        return Stage(*parse_pattern(self.pattern))

    @property
    def largest_group(self) -> int:
        """The largest group in which weights are ranked; layers' inputs must be multiples of it."""
        return self.final.m * (_GEOMETRIC[0] if self.method == "sdgf-geometric" else 1)

    def stage(self, step: int) -> Stage:
        """Returns the stage of a step, counted from 0."""
        n, m, time = self.final.n, self.final.m, step - math.floor(self.dense * self.num_steps)
        num_decay_steps = 0 if self.method == "sr-ste" else math.floor(self.decay * self.num_steps)
        if time < 0:
            return DENSE
        if time >= num_decay_steps:
            return self.final
        match self.method:
            case "mdgf-linear":
                return Stage(n, m, 1 - time / num_decay_steps)
            case "mdgf-exponential":
                return Stage(n, m, LAST_DECAY ** (time / num_decay_steps))
            case "sdgf-stepwise":
                return Stage(_part(time, num_decay_steps, _halved(n, m)), m)
            case "sdgf-geometric":
                factor = _part(time, num_decay_steps, _GEOMETRIC)
                return Stage(factor * n, factor * m)


def parse_pattern(text: str) -> tuple[int, int]:
    """Returns N and M of a pattern such as "2:4": of each M neighbours in a row of a weight, N are kept.

    Raises:
        OptionError: it is no pattern with 0 < N < M <= 32.
    """
    found = _PATTERN.fullmatch(text) if isinstance(text, str) else None
    if found is None or not 0 < int(found[1]) < int(found[2]) <= MAX_M:
        raise OptionError(
            f"The pattern is {str(text)[:40]!r}; expected N:M with N below M and M at most {MAX_M}, such as '2:4'."
        )
    return int(found[1]), int(found[2])


def _part(time: int, num_steps: int, values: tuple[int, ...]) -> int:
    """Returns the value of the equal part of the steps that `time` is in."""
    return values[time * len(values) // num_steps]


def _halved(n: int, m: int) -> tuple[int, ...]:
    """The numbers of kept weights in the parts of sdgf-stepwise: M - 1, then M/2, M/4, ... down to N."""
    return m - 1, *(max(n, m >> half) for half in range(1, 1 + int(math.log2(m / n))))
