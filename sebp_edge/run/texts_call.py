"""A call of a Personalizer as far as it reads texts and plans a training: what it works with. Imports no torch."""

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from sebp_edge.basics.stopping import StopSignal
from sebp_edge.basics.units import plural, sizes_apart
from sebp_edge.engine.memory.budget import MemoryBudget
from sebp_edge.engine.memory.known_machine import recall_machine
from sebp_edge.engine.memory.target import Target
from sebp_edge.engine.models.known_models import KnownModel, recall_model
from sebp_edge.engine.models.known_tokenizer import KnownTokenizer
from sebp_edge.engine.models.shape import DecoderShape
from sebp_edge.errors import AdapterError, OptionError
from sebp_edge.events import Event, Notice
from sebp_edge.machine.host import resident
from sebp_edge.recipe import Recipe
from sebp_edge.run.fitting_recipe import choose_recipe, notes_recipe, read_for
from sebp_edge.run.job import JobSink
from sebp_edge.store.adapter import Adapter
from sebp_edge.store.adapter_store import AdapterStore
from sebp_edge.values.model_reference import ModelReference
from sebp_edge.values.preparation_progress import Progress
from sebp_edge.values.reading import Reading

# Bytes that texts may always take: if few texts exceed the budget, the plan's error says better what would fit.
MIN_TEXT_BYTES = 30_000_000
_MAX_HEADER = 2**26


@dataclass(frozen=True)
class TextsCall(ABC):
    """What a call works with.

    Attributes:
        recipe: the Personalizer's; after `with_texts`, that of the texts.
        budget: how much memory this process may use; None sets no limit.
        job: receives the events, and tells how far the call is.
    """

    recipe: Recipe
    seed: int
    store: AdapterStore
    me: tuple[str, ...]
    budget: MemoryBudget | None
    job: JobSink
    signal: StopSignal

    @property
    @abstractmethod
    def reference(self) -> ModelReference:
        """The base model's name."""

    @property
    @abstractmethod
    def on_gpu(self) -> bool:
        """Whether the model runs on an NVIDIA GPU."""

    @property
    @abstractmethod
    def shape(self) -> DecoderShape:
        """The sizes of the base model, which need not be on this machine."""

    @abstractmethod
    def tokenizer(self):
        """Returns the model's tokenizer, or if it is not on this machine, the bundled model's."""

    @abstractmethod
    def target_and_budget(self) -> tuple[Target, MemoryBudget]:
        """Returns this machine and its current budget, without the loaded weights, which the plan includes."""

    @abstractmethod
    def refuse_damaged(self, adapter: Path) -> None:
        """Raises an AdapterError if the weights of a saved adapter are damaged."""

    def notify(self, event: Event) -> None:
        """Sends an event; ends the call if it was stopped."""
        self.job(event)
        self.check()

    def check(self) -> None:
        """Ends the call if it was stopped; tells the progress if that is due."""
        self.signal.check()
        self.job.tick()

    @property
    def progress(self) -> Progress:
        """Reports the progress of work on texts, and lets it be stopped."""
        return Progress(self.notify, self.signal.check)

    def read(self, texts) -> Reading:
        """Reads `texts`, or practice notes if the recipe trains on these.

        On the CPU with a budget, refuses texts that would exceed it by themselves.
        """
        if self.recipe.questions and texts is not None:
            self.notify(Notice(f"The recipe {self.recipe.name!r} trains on bundled notes; yours are not learnt."))
        limit = None
        if self.budget is not None and not self.on_gpu:
            limit = max(self.budget.size - resident(), MIN_TEXT_BYTES)
        reading = read_for(self.recipe, texts, limit, self.progress, self.me)
        if reading.exports:
            self.notify(Notice(f"Found {' and '.join(reading.exports)}."))
        for sentence in reading.styles:
            self.notify(Notice(sentence))
        if number := sum(bool(document.front_matter) for document in reading.documents):
            self.notify(Notice(f"The properties of {plural(number, 'note')} are not learnt; only `ask` reads them."))
        return reading

    def with_texts(self, texts, adapter: Adapter | None = None) -> tuple[Self, Reading]:
        """Reads texts; returns the call with the recipe for them, and what was read."""
        reading = self.read(texts)
        recipe = choose_recipe(self.recipe, reading, self.reference, adapter)
        if recipe is not self.recipe and recipe.name != notes_recipe(self.reference):
            self.notify(Notice(f"The recipe is {recipe.name!r}; --recipe NAME (recipe=) chooses another."))
        return replace(self, recipe=recipe), reading

    def parse_gpu_memory(self, gpu: str | int) -> int:
        """Returns the memory of an absent GPU in bytes.

        Raises:
            OptionError: `gpu` is not a size, or the budget exceeds it.
        """
        size = MemoryBudget.parse(gpu, "GPU memory").size
        if self.budget is not None and self.budget.size > size:
            budget, memory = sizes_apart(self.budget.size, size)
            raise OptionError(f"The memory budget is {budget}, but the GPU has {memory}; lower the budget or omit it.")
        return size


class NotKnown(Exception):
    """The model or this machine is not known without torch."""


@dataclass(frozen=True)
class KnownCall(TextsCall):
    """What a call works with that plans for another process, by what is known of the model and of this machine.

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
