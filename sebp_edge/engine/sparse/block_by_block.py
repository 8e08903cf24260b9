"""Compares two passes of a decoder block by block, so that what one block rounds does not grow in those after it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from sebp_edge.engine.models.architecture import blocks_of
from sebp_edge.engine.sparse.patches.agreement import HIDDEN_STATES, disagreement


class BlockByBlock:
    """The hidden states that blocks read in a padded pass, which they read again in a pass on active rows.

    Attributes:
        difference: the first mean difference over the mean that rounding in one block does not explain; None if the
            second pass had no such difference.
    """

    def __init__(self, decoder: nn.Module, active_rows: Tensor):
        self._decoder, self._active_rows = decoder, active_rows
        self._read: list[Tensor] = []
        self.difference: float | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context of the padded pass."""

        def record(hidden_BTD: Tensor) -> Tensor:
            self._read.append(hidden_BTD.flatten(0, 1)[self._active_rows])
            return hidden_BTD

        with self._before_blocks(record):
            yield

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Context of the pass on active rows, whose blocks read what was recorded."""
        recorded = iter(self._read)

        def repeat(hidden_1AD: Tensor) -> Tensor:
            expected_AD = next(recorded, None)
            if expected_AD is None or hidden_1AD.shape[1:] != expected_AD.shape:
                return hidden_1AD
            if self.difference is None:
                self.difference = disagreement(self._decoder, expected_AD, hidden_1AD.squeeze(0), HIDDEN_STATES)
            return expected_AD[None]

        with self._before_blocks(repeat):
            yield

    @contextmanager
    def _before_blocks(self, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
        def hook(_block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            if args and _is_hidden(args[0]):
                args = change(args[0]), *args[1:]
            elif _is_hidden(kwargs.get("hidden_states")):
                kwargs = kwargs | {"hidden_states": change(kwargs["hidden_states"])}
            return args, kwargs

        with ExitStack() as hooks:
            for block in blocks_of(self._decoder):
                hooks.enter_context(block.register_forward_pre_hook(hook, with_kwargs=True))
            yield


def _is_hidden(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 3 and value.is_floating_point()
