"""Chooses a learning rate by measuring: which rates are tried, on what, and what was found. Imports no numpy.

Each rate gets a short training from the same start, with the same documents in the same order, a warm-up and decay of
its own, and a multiple of the rate, which makes up for the few steps. The validation loss decides. As it falls and
rises again with the rate, the rates are tried from the middle in the direction in which it falls, until it rises.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sebp_edge.basics.units import plural
from sebp_edge.recipe import Recipe

if TYPE_CHECKING:  # a version's report is read without numpy
    from sebp_edge.texts.schedule import Schedule

# In the order in which they may be tried: the usual one, those below, those above.
USUAL, LOWER, HIGHER = 5e-4, (2e-4, 1e-4), (1e-3, 2e-3)
ORDER = (USUAL, *LOWER, *HIGHER)
# The usual one, the first below, and all above.
MOST = 2 + len(HIGHER)
# Of the tokens that the trainings train on, for all tries together.
SHARE = 0.15
# A training that is about a twelfth as long as the one it stands for is best at a higher rate, by about this factor
# (kernels/bench/quality/README.md).
STRETCH = 4
# Fewer steps say too little.
MIN_STEPS = 3


@dataclass(frozen=True)
class TriedRate:
    """A learning rate, and the validation loss after its short training; None if that was not finite."""

    learning_rate: float
    loss: float | None


@dataclass(frozen=True)
class RateSearch:
    """What trying learning rates has shown so far.

    Attributes:
        learning_rate: the best one; the usual one if none was tried.
        documents: the number of validation documents; 0 if they are too few to try any.
        loss_before: the validation loss before the training, in nats per token.
        tried: the rates that were tried, in order.
    """

    learning_rate: float = USUAL
    documents: int = 0
    loss_before: float | None = None
    tried: tuple[TriedRate, ...] = ()

    @property
    def next_rate(self) -> float | None:
        """The learning rate to try next; None at the end."""
        if not (self.documents and self.tried):
            return USUAL if self.documents else None
        losses = {each.learning_rate: _finite(each.loss) for each in self.tried}
        for direction in (LOWER, HIGHER):
            best = USUAL
            for rate in direction:
                if rate not in losses:
                    return rate
                # Below a rate that diverges, a lower one may not.
                if losses[best] <= losses[rate] and losses[best] < math.inf:
                    break
                best = rate
            if best != USUAL:
                break
        return None

    @property
    def best_loss(self) -> float:
        """The lowest validation loss so far; infinite before the first try."""
        return min((_finite(each.loss) for each in self.tried), default=math.inf)

    def with_tried(self, loss: float) -> "RateSearch":
        """Returns the search after the next rate was tried."""
        tried = (*self.tried, TriedRate(self.next_rate, loss if math.isfinite(loss) else None))
        # Of two equal ones, the lower.
        best = min(tried, key=lambda each: (_finite(each.loss), each.learning_rate))
        return replace(self, learning_rate=best.learning_rate, tried=tried)

    @property
    def summary(self) -> str:
        """What was found, in a sentence."""
        rate, number = f"{self.learning_rate:g}", len(self.tried)
        if not self.tried:
            return f"The learning rate is {rate}, the usual one: there are too few documents to try others."
        on = f"on {plural(self.documents, 'validation document')}"
        if self.best_loss >= self.loss_before:
            return f"The loss {on} did not fall at any of the {number} learning rates tried; {rate} raised it least."
        return f"The learning rate is {rate}, the best of {number} tried {on}."


def _finite(loss: float | None) -> float:
    return math.inf if loss is None else loss


def trials(schedules: "Sequence[Schedule]", recipe: Recipe) -> "list[Schedule]":
    """Returns the short trainings, equal ones, as many as there may be; none if the recipe states its learning rate.

    There are none with folds either, whose validation documents are the test documents of others, nor if the documents
    are too few.
    """
    judged = [schedule for schedule in schedules if not schedule.trains_on_all]
    if recipe.learning_rate is not None or len(judged) != 1:
        return []
    tokens = sum(schedule.num_tokens for schedule in schedules)
    trial = judged[0].beginning(int(SHARE / MOST * tokens))
    return MOST * [trial] if trial.num_batches >= MIN_STEPS else []
