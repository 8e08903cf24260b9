"""What one call of a Personalizer works with, and how it is stopped."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sebp_edge.adapters.adapter import Adapter
from sebp_edge.adapters.record import AdapterRecord
from sebp_edge.adapters.saved import SavedAdapter
from sebp_edge.adapters.store import AdapterStore
from sebp_edge.basics.interruptions import Interruptions
from sebp_edge.basics.stopping import StopSignal
from sebp_edge.basics.units import sizes_apart
from sebp_edge.errors import MachineError, OptionError, StorageError
from sebp_edge.events import Event, Notice
from sebp_edge.machine import devices
from sebp_edge.machine.process import memory_of
from sebp_edge.memory.budget import MemoryBudget
from sebp_edge.memory.guard import MemoryGuard
from sebp_edge.memory.plan import Plan
from sebp_edge.models.catalog import ModelReference
from sebp_edge.models.decoding import Decoder
from sebp_edge.models.loading import BaseModel
from sebp_edge.recipe import Recipe
from sebp_edge.run.fitting_recipe import choose_recipe, read_for
from sebp_edge.run.giving_way import GivingWay
from sebp_edge.run.job import Job
from sebp_edge.run.model_in_use import AdapterChoice, ModelInUse
from sebp_edge.texts.progress import Progress
from sebp_edge.texts.readers import Reading

# Bytes that texts may always take: if few texts exceed the budget, the plan's error says better what would fit.
MIN_TEXT_BYTES = 30_000_000


@dataclass(frozen=True)
class Call:
    """What a call works with.

    Attributes:
        recipe: the Personalizer's; after `with_texts`, that of the texts.
        seed, store: those of the Personalizer.
        me: the owner's names in chats.
        budget: how much memory this process may use; None sets no limit.
        in_use: the model, and the adapter in use.
        signal: stops the call.
        interruptions: the process's signals.
        job: receives the events, and tells how far the call is.
        giving_way: lets other programs go first, if the call is a training.
    """

    recipe: Recipe
    seed: int
    store: AdapterStore
    me: tuple[str, ...]
    budget: MemoryBudget | None
    in_use: ModelInUse
    signal: StopSignal
    interruptions: Interruptions
    job: Job
    giving_way: GivingWay

    @property
    def reference(self) -> ModelReference:
        """The base model's name."""
        return self.in_use.reference

    @property
    def device(self) -> torch.device:
        """The device that the model runs on."""
        return self.in_use.device

    def notify(self, event: Event) -> None:
        """Sends an event; ends the call if it was stopped."""
        self.job(event)
        self.check()

    def check(self) -> None:
        """Ends the call if it was stopped; waits for other programs; tells the progress if that is due."""
        self.signal.check()
        self.giving_way.wait()
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
        if self.budget is not None and self.device.type != "cuda":
            limit = max(self.budget.size - memory_of(self.device).used, MIN_TEXT_BYTES)
        reading = read_for(self.recipe, texts, limit, self.progress, self.me)
        if reading.exports:
            self.notify(Notice(f"Found {' and '.join(reading.exports)}."))
        return reading

    def with_texts(self, texts, adapter: Adapter | None = None) -> tuple["Call", Reading]:
        """Reads texts; returns the call with the recipe for them, and what was read.

        Args:
            adapter: the adapter that is learnt on from.
        """
        reading = self.read(texts)
        recipe = choose_recipe(self.recipe, reading, adapter)
        if recipe is not self.recipe and recipe.name != "notes":
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

    def load(self, recipe: Recipe | None = None) -> BaseModel:
        """Loads the base model; see `ModelInUse.load`."""
        self.signal.check()
        return self.in_use.load(self.notify, recipe, lambda load: self.job.watch(load, self.check))

    def load_adapter(self, adapter: str | Path, version: int | None) -> AdapterRecord:
        """Puts a saved adapter on the base model; see `Personalizer.load_adapter`."""
        found = self.store.find(adapter, version)
        self.load()
        self.in_use.load_adapter(found.path, found.record, self.job)
        self.remember_model_of(found)
        return found.record

    @contextmanager
    def generating(self, choice: AdapterChoice) -> Iterator[tuple[BaseModel, Decoder, str]]:
        """Context in which the model has the chosen adapter; see `ModelInUse.generating`."""
        if choice.is_named:
            self.load_adapter(choice.adapter, choice.version)
        base = self.load()
        with self.in_use.generating(with_adapter=choice.adapter is not None) as (decoder, rendered_as):
            yield base, decoder, rendered_as

    def remember_model_of(self, found: SavedAdapter) -> None:
        """Remembers where the base model of a saved adapter is, if there is a store."""
        if self.store.folder.is_dir():
            self.remember_model(found.record)

    def remember_model(self, record: AdapterRecord) -> None:
        """Remembers where the base model of an adapter is, if it was given as a folder or a file."""
        if not self.reference.has_path:
            return
        try:
            self.store.remember_model(record.fingerprint, Path(self.reference.location))
        except StorageError as error:
            self.job(Notice(f"{error} The path of the base model is not remembered."))

    def make_guard(self, plan: Plan | None = None, predicted: int | None = None) -> MemoryGuard:
        """Returns a guard for the budget of a plan, else for the memory budget, else for all free memory.

        Args:
            predicted: the peak that an earlier plan predicted, without one.
        """
        if plan is not None:
            return MemoryGuard(self.device, plan.budget, plan.chosen.peak)
        return MemoryGuard(self.device, self.budget.size if self.budget else None, predicted)

    @contextmanager
    def base_model_alone(self, when: str) -> Iterator[None]:
        """Context without the adapter in use. If memory runs out, frees it and says `when`."""
        handled = sys.exception()
        self.in_use.detach_adapter()
        try:
            yield
        except BaseException as error:
            if not devices.ran_out_of_memory(error):
                raise
            devices.clear_frames(error, handled)
            devices.release_memory(self.device)
            raise MachineError(
                f"Out of {self.device.type.upper()} memory {when}; choose a smaller model or a shorter context."
            ) from error
        finally:
            self.in_use.restore_adapter(self.job)
