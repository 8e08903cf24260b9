"""A call of a Personalizer as far as it reads texts: what it works with. Imports no torch."""

from dataclasses import dataclass, replace
from typing import Self

from sebp_edge.basics.stopping import StopSignal
from sebp_edge.basics.units import plural
from sebp_edge.engine.memory.budget import MemoryBudget
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


@dataclass(frozen=True)
class Call:
    """What a call works with.

    Attributes:
        reference: the base model's name.
        on_gpu: whether the model runs on an NVIDIA GPU.
        recipe: the Personalizer's; after `with_texts`, that of the texts.
        budget: how much memory this process may use; None sets no limit.
        job: receives the events, and tells how far the call is.
    """

    reference: ModelReference
    on_gpu: bool
    recipe: Recipe
    seed: int
    store: AdapterStore
    me: tuple[str, ...]
    budget: MemoryBudget | None
    job: JobSink
    signal: StopSignal

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
