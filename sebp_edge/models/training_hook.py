"""The hook that trained weights offer to a training: what happens around the steps, besides the updates."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


class TrainingHook:
    """What trained weights do in a training, from `begin` on; these do nothing.

    Attributes:
        is_settled: whether a training that no longer improves may stop.
    """

    is_settled = True

    def updated(self, parameters: list[nn.Parameter]) -> list[Tensor] | None:
        """Returns what the optimizer updates with the gradient of each parameter; None for the parameters."""

    def begin(self, num_steps: int, num_done: int = 0) -> None:
        """Begins a training of `num_steps` steps with the model's current weights.

        Args:
            num_done: how many are done, if the training goes on; what the optimizer updates is as it was then.
        """

    def after_step(self, learning_rate: float) -> None:
        """Follows each update."""

    def finish(self) -> None:
        """Gives the model the weights that it has after a training."""

    @contextmanager
    def finished(self) -> Iterator[None]:
        """Context in which the model has the weights that it would have if the training ended now."""
        yield
