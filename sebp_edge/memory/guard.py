"""Keeps a training within its memory.

The budget covers all that the process holds of the device, also outside torch's allocator. On a GPU the allocator is
capped at what remains, so that exceeding the budget raises an out-of-memory error, and threads have small stacks
meanwhile. The CPU has no cap: there a training is stopped when the process holds more than the budget.
"""

from contextlib import ExitStack

import torch

from sebp_edge.errors import BudgetExceeded
from sebp_edge.machine import devices, process, stacks
from sebp_edge.units import gigabytes

# Bytes that must stay free, for what is loaded late and for other programs.
MIN_FREE = 64 * 2**20
# How often free memory is checked. That reads counters, and does not synchronise with a GPU.
STEPS_BETWEEN_CHECKS = 8


class MemoryGuard:
    """Watches what an adaptation holds; a context manager that restores the cap of torch's allocator.

    Args:
        device: the device of the training.
        budget: bytes of its memory that this process may hold; None for all that is free.
        predicted: the peak that the plan predicts, in bytes.
    """

    def __init__(self, device: torch.device, budget: int | None = None, predicted: int | None = None):
        self.predicted, self._budget, self._device = predicted, budget, device
        self._memory = process.memory_of(device)
        self._undo = ExitStack()
        self._cap = lambda size: None
        self._transient = self._num_steps = self._accepted = 0

    def __enter__(self) -> "MemoryGuard":
        with ExitStack() as undo:
            if self._budget is not None:
                undo.enter_context(stacks.cut(self._device))
                # Measured again: what stacks held is free now.
                self._memory = process.memory_of(self._device)
                self._cap = undo.enter_context(process.capped(self._device))
                self._cap(self._budget - self._memory.outside_expected)
            self._memory.begin()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exception) -> None:
        with self._undo:
            self._memory.measure()

    @property
    def has_limit(self) -> bool:
        """Whether to check before the first step that memory suffices: with a budget, or on a GPU, where not every
        out-of-memory error can be recovered from."""
        return self._budget is not None or self._memory.is_capped

    @property
    def peak(self) -> int:
        """Peak bytes that the process held."""
        return self._memory.peak

    @property
    def allocator_peak(self) -> int | None:
        """Peak bytes of tensors on a GPU; None on the CPU."""
        return self._memory.allocator_peak

    def begin(self) -> None:
        """Starts a new measurement, without what was held before, for example while the model was loaded."""
        self._memory.measure()
        self._memory.begin()

    def check(self) -> None:
        """Compares what the process holds with the budget, if there is no cap that does.

        Raises:
            BudgetExceeded: it has held more since `begin`.
        """
        if self._memory.is_capped:
            return
        most = self._memory.measure()
        if self._budget is not None and most > self._budget:
            raise BudgetExceeded(
                f"This process held {gigabytes(most)}, more than its memory budget of {gigabytes(self._budget)}."
            )

    def record_transient(self) -> None:
        """Records what was allocated and freed since `begin`: every step needs that again.

        Raises:
            BudgetExceeded: there is no room for it.
        """
        self.check()
        self._transient = self._memory.transient()
        if shortfall := self._shortfall():
            raise BudgetExceeded(f"{gigabytes(shortfall)} are missing for a step.")

    def shortfall(self) -> int:
        """Bytes that the next step lacks; 0 if there is room. To be called before each step; checks every eighth."""
        self._num_steps += 1
        if not self.has_limit or self._num_steps % STEPS_BETWEEN_CHECKS:
            return 0
        shortfall = self._shortfall()
        return shortfall if shortfall > self._accepted else 0

    def cut(self) -> None:
        """Records that micro-batches are half as large from now on."""
        self._transient //= 2

    def accept_shortfall(self, shortfall: int) -> None:
        """Records a shortfall that cannot be fixed; `shortfall` reports it again only if it grows."""
        self._accepted = shortfall

    def _shortfall(self) -> int:
        """Bytes that a step lacks now; also adjusts the cap to what the process holds outside torch's allocator.

        Synchronises with a GPU only to give memory back.
        """
        self._memory.measure()
        too_much = 0
        if self._budget is not None:
            self._cap(self._budget - self._memory.outside)
            if self._memory.used > self._budget:
                devices.release_memory(self._device)
                too_much = self._memory.used - self._budget
        short = MIN_FREE + max(0, self._transient - self._memory.cached) - devices.free_memory(self._device)
        return max(0, short, too_much)
