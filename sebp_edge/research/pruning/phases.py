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
from dataclasses import dataclass

from sebp_edge.errors import OptionError
from sebp_edge.research.pruning.pruning_recipe import PruningRecipe, parse_pattern

# SR-STE's λ.
SHRINKAGE = 2e-4
# δ of mdgf-exponential at the end of the decay phase.
LAST_DECAY = 0.01
_GEOMETRIC = (8, 4, 2, 1)


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


@dataclass(frozen=True)
class Phases:
    """The stages of a training of `num_steps` steps."""

    sparsity: PruningRecipe
    num_steps: int

    def __post_init__(self):
        if type(self.num_steps) is not int or self.num_steps < 1:
            raise OptionError(f"The number of steps is {str(self.num_steps)[:40]}; expected a whole number above 0.")

    @property
    def shrinkage(self) -> float:
        """λ, times which the learning rate is the share that pruned weights lose at each step."""
        return SHRINKAGE if self.sparsity.method == "sr-ste" else 0.0

    @property
    def final(self) -> Stage:
        return Stage(*parse_pattern(self.sparsity.pattern))

    def stage(self, step: int) -> Stage:
        """Returns the stage of a step, counted from 0."""
        n, m, time = self.final.n, self.final.m, step - self._num_dense_steps
        if time < 0:
            return DENSE
        if time >= self._num_decay_steps:
            return self.final
        match self.sparsity.method:
            case "mdgf-linear":
                return Stage(n, m, 1 - time / self._num_decay_steps)
            case "mdgf-exponential":
                return Stage(n, m, LAST_DECAY ** (time / self._num_decay_steps))
            case "sdgf-stepwise":
                return Stage(_part(time, self._num_decay_steps, _halved(n, m)), m)
            case "sdgf-geometric":
                factor = _part(time, self._num_decay_steps, _GEOMETRIC)
                return Stage(factor * n, factor * m)

    @property
    def _num_dense_steps(self) -> int:
        return math.floor(self.sparsity.dense * self.num_steps)

    @property
    def _num_decay_steps(self) -> int:
        return 0 if self.sparsity.method == "sr-ste" else math.floor(self.sparsity.decay * self.num_steps)


def largest_group(sparsity: PruningRecipe) -> int:
    """Returns the largest group in which weights are ranked; layers' inputs must be multiples of it."""
    return parse_pattern(sparsity.pattern)[1] * (_GEOMETRIC[0] if sparsity.method == "sdgf-geometric" else 1)


def _part(time: int, num_steps: int, values: tuple[int, ...]) -> int:
    """Returns the value of the equal part of the steps that `time` is in."""
    return values[time * len(values) // num_steps]


def _halved(n: int, m: int) -> tuple[int, ...]:
    """The numbers of kept weights in the parts of sdgf-stepwise: M - 1, then M/2, M/4, ... down to N."""
    return m - 1, *(max(n, m >> half) for half in range(1, 1 + int(math.log2(m / n))))
