"""Reads a learning-rate range test: where the loss begins to fall, falls most steeply, and is lowest."""

import math
from dataclasses import asdict, dataclass

from sebp_edge.basics.units import plural
from sebp_edge.errors import OptionError
from sebp_edge.research.lr_sweep import MEMORY, RangeStep

LOWEST, HIGHEST, STEPS = 1e-6, 1.0, 100
# The smoothed loss is an average of about this many steps, so earlier ones say little.
SETTLED = round(1 / (1 - MEMORY))
# Each step has another batch, so fewer steps say nothing; those of an average must not span more than a power of ten.
MIN_STEPS, MIN_STEPS_PER_DECADE = 2 * SETTLED, SETTLED
# The loss begins to fall where it leaves the top for good: this share of the whole fall below it.
BEGUN = 0.1
# A fall by less is within the differences between batches.
MIN_FALL = 0.05


@dataclass(frozen=True)
class LearningRateRange:
    """The outcome of a range test.

    Attributes:
        model: the public name of the base model.
        recipe: the name of the recipe, whose settings were used.
        seed: the random seed.
        planned_steps: the number of steps to the highest rate; a test that diverges has fewer.
        steps: the steps, with growing rates.
        begins, steepest, lowest: the rates at which the smoothed loss begins to fall, falls most steeply per decade,
            and is lowest; None if it does not fall.
    """

    model: str
    recipe: str
    seed: int
    planned_steps: int
    steps: tuple[RangeStep, ...]
    begins: float | None
    steepest: float | None
    lowest: float | None

    @classmethod
    def of(cls, model: str, recipe: str, seed: int, planned_steps: int, steps: list[RangeStep]) -> "LearningRateRange":
        """Finds the three rates."""
        return cls(model, recipe, seed, planned_steps, tuple(steps), *_rates(steps))

    @property
    def diverged(self) -> bool:
        """Whether the test stopped before its highest rate, because the loss rose or was not finite."""
        return len(self.steps) < self.planned_steps

    @property
    def summary(self) -> str:
        """What the test suggests, in a sentence or two."""
        tested = f"{self.steps[0].learning_rate:.1e} to {self.steps[-1].learning_rate:.1e}" if self.steps else "none"
        end = "; it then diverges" if self.diverged else ""
        if len(self.steps) < MIN_STEPS:
            return f"The loss diverged after {plural(len(self.steps), 'step')}, too few to tell; test lower rates."
        if self.steepest is None:
            return f"The loss does not fall at any learning rate tested ({tested}){end}; test a lower or wider range."
        return (
            f"The loss begins to fall at a learning rate of {self.begins:.1e}, falls most steeply at "
            f"{self.steepest:.1e} and is lowest at {self.lowest:.1e}{end}. Try learning rates from {self.begins:.1e} "
            f"to {self.steepest:.1e}."
        )

    def to_dict(self) -> dict:
        """The outcome as JSON-ready values."""
        return {"event": "lr_range", **asdict(self), "diverged": self.diverged, "summary": self.summary}


def _rates(steps: list[RangeStep]) -> tuple[float, float, float] | tuple[None, None, None]:
    losses = [step.smoothed for step in steps]
    if len(losses) < MIN_STEPS:
        return None, None, None
    bottom = min(range(SETTLED, len(losses)), key=losses.__getitem__)
    top = max(losses[SETTLED : bottom + 1])
    fall = top - losses[bottom]
    if fall < MIN_FALL * top:
        return None, None, None
    begin = max(number for number in range(bottom) if losses[number] >= top - BEGUN * fall)
    # Rates grow by the same factor each step, so the largest fall over equal spans is the steepest per decade.
    span = min(SETTLED, bottom - begin)
    steepest = max(range(begin, bottom - span + 1), key=lambda number: losses[number] - losses[number + span])
    return tuple(steps[number].learning_rate for number in (begin, steepest + span // 2, bottom))


def growing_rates(lowest: float, highest: float, num_steps: int) -> list[float]:
    """Returns exponentially growing learning rates."""
    numbers = all(isinstance(one, int | float) and math.isfinite(one) for one in (lowest, highest))
    if not numbers or not 0 < lowest < highest:
        raise OptionError(
            f"lowest={lowest!r} and highest={highest!r}; expected two learning rates above 0, the lower one first."
        )
    decades = round(math.log10(highest) - math.log10(lowest), 6)
    least = max(MIN_STEPS, math.ceil(MIN_STEPS_PER_DECADE * decades))
    if not isinstance(num_steps, int) or num_steps < least:
        raise OptionError(
            f"steps={num_steps!r} would be too few to tell; expected a whole number of at least {least} for rates from "
            f"{lowest:g} to {highest:g}."
        )
    factor = highest / lowest
    return [lowest * factor ** (number / (num_steps - 1)) for number in range(num_steps)]
