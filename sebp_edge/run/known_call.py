"""A call that plans with what is known of the model and of this machine, without torch.

It plans for another process.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from sebp_edge.engine.memory.budget import MemoryBudget
from sebp_edge.engine.memory.known_machine import recall_machine
from sebp_edge.engine.memory.target import Target
from sebp_edge.engine.models.known_models import KnownModel, recall_model
from sebp_edge.engine.models.known_tokenizer import KnownTokenizer
from sebp_edge.engine.models.shape import DecoderShape
from sebp_edge.errors import AdapterError
from sebp_edge.run.texts_call import TextsCall
from sebp_edge.values.model_reference import ModelReference

_MAX_HEADER = 2**26


class NotKnown(Exception):
    """The model or this machine is not known without torch."""


@dataclass(frozen=True)
class KnownCall(TextsCall):
    """What a call works with that has no torch.

    Attributes:
        free: its free bytes.
    """

    named: ModelReference
    model: KnownModel
    target: Target
    free: int

    @classmethod
    def of(cls, reference: ModelReference, device: str | None, used: int, **values) -> "KnownCall":
        """Returns a call.

        Args:
            used: bytes of host memory of the process that the training would run in; 0 if that has not started.

        Raises:
            NotKnown: the model or this machine is not known without torch.
        """
        model, machine = recall_model(reference), recall_machine(device)
        # How much of a GPU a process uses is often known to itself only.
        if model is None or machine is None or (used and machine[0].on_gpu):
            raise NotKnown
        return cls(**values, named=reference, model=model, target=machine[0], free=machine[1] + used)

    @property
    def reference(self) -> ModelReference:
        return self.named

    @property
    def on_gpu(self) -> bool:
        return self.target.on_gpu

    @property
    def shape(self) -> DecoderShape:
        return self.model.shape

    def tokenizer(self) -> KnownTokenizer:
        return self.model.tokenizer

    def target_and_budget(self) -> tuple[Target, MemoryBudget]:
        return self.target, MemoryBudget(self.free) if self.budget is None else self.budget.within(self.free)

    def refuse_damaged(self, adapter: Path) -> None:
        """Raises an AdapterError if the file of weights is shorter than it says; only a training reads all of it."""
        file = adapter / "adapter_model.safetensors"
        try:
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                if size > _MAX_HEADER:
                    raise ValueError("the header is too long")
                header = json.loads(opened.read(size))
            ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
            if file.stat().st_size != 8 + size + max(ends):
                raise ValueError("weights are missing")
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise AdapterError(f"The adapter in {str(adapter)!r} is damaged ({error}).") from error
