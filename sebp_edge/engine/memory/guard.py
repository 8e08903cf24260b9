"""Keeps a training within its memory budget.

The budget covers all memory that the process uses on the device, including memory outside torch's allocator. On a GPU
the allocator is capped at what remains, so that exceeding the budget raises an out-of-memory error, and the stacks of
threads are small. The CPU has no cap, so the training is stopped if the process uses more than the budget.
"""

from contextlib import ExitStack

import torch

from sebp_edge.basics.units import gigabytes, sizes_apart
from sebp_edge.errors import BudgetExceeded
from sebp_edge.machine import devices, process, stacks

# Bytes that must stay free, for code that is loaded late and for other programs.
MIN_FREE = 64 * 2**20
# A check reads counters and does not synchronise with a GPU.
STEPS_BETWEEN_CHECKS = 8


class MemoryGuard:
    """Checks the memory of an adaptation; a context manager that restores the cap of torch's allocator.

    Args:
        budget: the bytes of its memory that this process may use; None for all free memory.
        predicted: the peak that the plan predicts, in bytes.
    """

    def __init__(self, device: torch.device, budget: int | None = None, predicted: int | None = None):
        self.predicted, self.budget, self._device = predicted, budget, device
        self._memory = process.memory_of(device)
        self._undo = ExitStack()
        self._cap = lambda size: None
        self._transient = self._num_steps = self._accepted = 0

    def __enter__(self) -> "MemoryGuard":
        with ExitStack() as undo:
            if self.budget is not None:
                undo.enter_context(stacks.lowered(self._device))
                # Measured again, since the memory of stacks is free now.
                self._memory = process.memory_of(self._device)
                self._cap = undo.enter_context(process.capped(self._device))
                self._cap(self.budget - self._memory.outside_expected)
            self._memory.begin()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exception) -> None:
        with self._undo:
            self._memory.measure()

    @property
    def has_limit(self) -> bool:
        """Whether memory must be checked before the first step.

        True with a budget, and on a GPU, where not every out-of-memory error can be recovered from.
        """
        return self.budget is not None or self._memory.is_capped

    @property
    def peak(self) -> int:
        """Peak bytes that the process used."""
        return self._memory.peak

    @property
    def allocator_peak(self) -> int | None:
        """Peak bytes of tensors on a GPU; None on the CPU."""
        return self._memory.allocator_peak

    def begin(self) -> None:
        """Starts a new measurement, which excludes earlier peaks, such as that of loading the model."""
        self._memory.measure()
        self._memory.begin()

    def check(self) -> None:
        """Compares the memory of the process with the budget, unless a cap does."""
        if self._memory.is_capped:
            return
        peak = self._memory.measure()
        if self.budget is not None and peak > self.budget:
            used, budget = sizes_apart(peak, self.budget)
            raise BudgetExceeded(f"This process used {used}, more than its memory budget of {budget}.")

    def record_transient(self) -> None:
        """Records the bytes that were allocated and freed since `begin`, which every step needs again."""
        self.check()
        self._transient = self._memory.transient()
        if shortfall := self._shortfall():
            raise BudgetExceeded(
                f"A step needs {gigabytes(shortfall)} more memory than is left; close other programs or raise the "
                "memory budget."
            )

    def shortfall(self) -> int:
        """Returns the bytes that the next step lacks, or 0; to be called before each step, checks every eighth time."""
        self._num_steps += 1
        if not self.has_limit or self._num_steps % STEPS_BETWEEN_CHECKS:
            return 0
        shortfall = self._shortfall()
        return shortfall if shortfall > self._accepted else 0

    def halve_transient(self) -> None:
        """Records that micro-batches are half as large from now on."""
        self._transient //= 2

    def accept_shortfall(self, shortfall: int) -> None:
        """Records a shortfall that cannot be fixed, which `shortfall` reports again only if it grows."""
        self._accepted = shortfall

    def _shortfall(self) -> int:
        """Returns the bytes that a step lacks now; adjusts the cap to the memory outside torch's allocator.

        Synchronises with a GPU only to release memory.
        """
        self._memory.measure()
        excess = 0
        if self.budget is not None:
            self._cap(self.budget - self._memory.outside)
            if self._memory.used > self.budget:
                devices.release_memory(self._device)
                excess = self._memory.used - self.budget
        short = MIN_FREE + max(0, self._transient - self._memory.cached) - devices.free_memory(self._device)
        return max(0, short, excess)
