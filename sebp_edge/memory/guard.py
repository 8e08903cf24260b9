"""A training is kept within its memory: a cap on a GPU, a look at what the process holds, and at what others leave.

The budget is what the process holds of the device, with all that is outside torch's allocator. On a GPU the allocator
is capped at the rest, and memory runs out there; threads have small stacks meanwhile. On the CPU nothing runs out, so a
training is stopped.
"""

from contextlib import ExitStack

import torch

from sebp_edge.errors import BudgetExceeded
from sebp_edge.machine import devices, process, stacks
from sebp_edge.units import gigabytes

# So much must be free beside: what is loaded late takes it, and other programs.
SPARE = 64 * 2**20
# How often what others leave is looked at: counters are read, and a GPU is not waited for.
STEPS_BETWEEN_LOOKS = 8


class MemoryGuard:
    """What an adaptation may hold; a context manager that leaves torch's allocator capped as it was.

    Args:
        device: what is trained on.
        budget: bytes of it that this process may hold; None for all that is free.
        predicted: bytes that the plan says it will hold at most.
    """

    def __init__(self, device: torch.device, budget: int | None = None, predicted: int | None = None):
        self.predicted, self._budget, self._device = predicted, budget, device
        self._memory = process.memory_of(device)
        self._undo = ExitStack()
        self._cap = lambda size: None
        self._transient = self._num_steps = self._borne = 0

    def __enter__(self) -> "MemoryGuard":
        with ExitStack() as undo:
            if self._budget is not None:
                undo.enter_context(stacks.cut(self._device))
                # Anew: what stacks held is free.
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
    def is_set(self) -> bool:
        """Whether there is something to prove: a budget, or a GPU, where running out is not always survived."""
        return self._budget is not None or self._memory.is_capped

    @property
    def peak(self) -> int:
        """Bytes that the process held at most."""
        return self._memory.peak

    @property
    def allocator_peak(self) -> int | None:
        """Bytes of tensors on a GPU at most; None on the CPU."""
        return self._memory.allocator_peak

    def begin(self) -> None:
        """Begins to measure anew: what was held before, for example while the model was loaded, is past."""
        self._memory.measure()
        self._memory.begin()

    def check(self) -> None:
        """Looks at what the process holds, where no cap does.

        Raises:
            BudgetExceeded: it was more than the budget since `begin`.
        """
        if self._memory.is_capped:
            return
        most = self._memory.measure()
        if self._budget is not None and most > self._budget:
            raise BudgetExceeded(
                f"This process held {gigabytes(most)}, more than its memory budget of {gigabytes(self._budget)}."
            )

    def settle(self) -> None:
        """Notes what came and went since `begin`, which every step will need again.

        Raises:
            BudgetExceeded: there would be no room for it.
        """
        self.check()
        self._transient = self._memory.transient()
        if missing := self._missing():
            raise BudgetExceeded(f"{gigabytes(missing)} are missing for a step.")

    def missing(self) -> int:
        """To be asked before each step: bytes that are short for it, if now is the time to look; 0 if it has room."""
        self._num_steps += 1
        if not self.is_set or self._num_steps % STEPS_BETWEEN_LOOKS:
            return 0
        missing = self._missing()
        return missing if missing > self._borne else 0

    def cut(self) -> None:
        """Is told that micro-batches are half as large from now on."""
        self._transient //= 2

    def bear(self, missing: int) -> None:
        """Is told that nothing can be cut; as long as no more is missing, that is not said again."""
        self._borne = missing

    def _missing(self) -> int:
        """Measures anew what the process holds outside torch's allocator, and the cap follows. A GPU is waited for only
        if memory is to be given back."""
        self._memory.measure()
        too_much = 0
        if self._budget is not None:
            self._cap(self._budget - self._memory.outside)
            if self._memory.held > self._budget:
                devices.give_memory_back(self._device)
                too_much = self._memory.held - self._budget
        short = SPARE + max(0, self._transient - self._memory.cached) - devices.free_memory(self._device)
        return max(0, short, too_much)
