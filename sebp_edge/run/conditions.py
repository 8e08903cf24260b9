"""What a training is planned for, apart from its texts and its recipe: a model and a machine. Imports no torch."""

from dataclasses import dataclass
from typing import Any

from sebp_edge.basics.units import sizes_apart
from sebp_edge.engine.memory.budget import MemoryBudget
from sebp_edge.engine.memory.known_machine import recall_machine
from sebp_edge.engine.memory.target import Target
from sebp_edge.engine.models.known_models import recall_model
from sebp_edge.engine.models.shape import DecoderShape
from sebp_edge.errors import OptionError
from sebp_edge.values.model_reference import ModelReference


class NotKnown(Exception):
    """The model or this machine is not known without torch."""


@dataclass(frozen=True)
class Conditions:
    """What a training is planned for.

    Attributes:
        shape: the sizes of the base model, which need not be on this machine.
        tokenizer: the model's, or if it is not on this machine, the bundled model's.
        target: the device.
        budget: what the process may use of its memory now, weights included.
    """

    shape: DecoderShape
    tokenizer: Any
    target: Target
    budget: MemoryBudget

    @classmethod
    def known(
        cls,
        reference: ModelReference,
        device: str | None,
        used: int,
        budget: MemoryBudget | None,
        gpu: str | int | None = None,
        *,
        needs_speed: bool = False,
    ) -> "Conditions":
        """Returns the conditions of another process, by what was remembered of the model and of this machine.

        Args:
            used: bytes of host memory of that process; 0 if it has not started.
            gpu: see `absent_gpu`.
            needs_speed: whether a machine whose speed is not known is none.

        Raises:
            NotKnown: the model or this machine is not known without torch.
        """
        model = recall_model(reference)
        machine = model and recall_machine(device, model.shape.hidden)
        # How much of a GPU a process uses is often known to itself only.
        if machine is None or (used and machine[0].on_gpu):
            raise NotKnown
        target, free = machine
        if needs_speed and target.rate is None and gpu is None:
            raise NotKnown
        return cls(model.shape, model.tokenizer, *absent_gpu(gpu, budget) or (target, limited(budget, free + used)))


def absent_gpu(gpu: str | int | None, budget: MemoryBudget | None) -> tuple[Target, MemoryBudget] | None:
    """Returns an absent GPU with so much memory, and what of it may be used; None without one.

    Raises:
        OptionError: `gpu` is not a size, or the budget exceeds it.
    """
    if gpu is None:
        return None
    memory = MemoryBudget.parse(gpu, "GPU memory")
    if budget is not None and budget.size > memory.size:
        asked, size = sizes_apart(budget.size, memory.size)
        raise OptionError(f"The memory budget is {asked}, but the GPU has {size}; lower the budget or omit it.")
    return Target.absent_gpu(memory.size), budget or memory


def limited(budget: MemoryBudget | None, free: int) -> MemoryBudget:
    """Returns what of a budget is free; without one, all that is free."""
    return MemoryBudget(free) if budget is None else budget.within(free)
