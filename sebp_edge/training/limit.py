"""A training is kept within its memory: a cap on a GPU, a look at what the process holds, and at what others leave.

The budget is what the process holds of the device, with all that is outside torch's allocator. On a GPU the allocator
is capped at the rest, and memory runs out there; on the CPU nothing runs out, so a training is stopped.
"""

from contextlib import ExitStack

import torch

from sebp_edge.errors import BudgetExceeded
from sebp_edge.models import machine, process
from sebp_edge.units import gigabytes

# So much must be free beside: what is loaded late takes it, and other programs.
SPARE = 64 * 2**20


class MemoryLimit:
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

    def __enter__(self) -> "MemoryLimit":
        self._memory.begin()
        if self._budget is not None:
            self._cap = self._undo.enter_context(process.capped(self._device))
            self._cap(self._budget - self._memory.outside_planned)
        return self

    def __exit__(self, *exception) -> None:
        self._memory.measure()
        self._undo.close()

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
        """Begins to look: what was held before, while the model was loaded, does not count."""
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

    def transient(self) -> int:
        """Bytes that came and went since `begin`."""
        return self._memory.transient()

    def missing(self, transient: int) -> int:
        """Bytes that are short for a micro-batch of which so many come and go; 0 if it has room.

        What the process holds outside torch's allocator is measured anew, and the cap follows. A GPU is waited for only
        if memory is to be given back.
        """
        self._memory.measure()
        too_much = 0
        if self._budget is not None:
            self._cap(self._budget - self._memory.outside)
            if self._memory.held > self._budget:
                machine.give_memory_back(self._device)
                too_much = self._memory.held - self._budget
        short = SPARE + max(0, transient - self._memory.cached) - machine.free_memory(self._device)
        return max(0, short, too_much)
