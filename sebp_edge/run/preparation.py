"""Prepares a training: reads and encodes texts, makes schedules and plans the memory."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import chain

import torch

from sebp_edge.adapters.store import AdapterStore
from sebp_edge.errors import OptionError
from sebp_edge.events import LearningOn, MemoryPlanned, Notice, Sink, TextsRead
from sebp_edge.machine import devices
from sebp_edge.machine.process import memory_of
from sebp_edge.memory.budget import MemoryBudget
from sebp_edge.memory.options import MemoryOptions
from sebp_edge.memory.plan import Plan, make_plan
from sebp_edge.memory.shape_reader import read_shape
from sebp_edge.memory.target import Target
from sebp_edge.models.architecture import longest_sequence
from sebp_edge.models.catalog import ModelReference
from sebp_edge.models.loading import BaseModel, has_own_tokenizer, local_tokenizer, refuse_unknown_tokens
from sebp_edge.questions.examples import add_questions
from sebp_edge.questions.interview import Interviewed
from sebp_edge.questions.interviews import summary, to_train
from sebp_edge.recipe import Recipe
from sebp_edge.run.start import Beginning, Start
from sebp_edge.run.texts_comparison import TextsComparison
from sebp_edge.run.unchanged import UnchangedResult
from sebp_edge.stopping import StopSignal
from sebp_edge.texts.batches import Collator
from sebp_edge.texts.dataset import Dataset, Drawing, make_dataset
from sebp_edge.texts.learnable import refuse_endless_answers, refuse_unlearnable
from sebp_edge.texts.progress import Progress
from sebp_edge.texts.readers import Reading, read_texts
from sebp_edge.texts.schedule import Schedule, make_schedules
from sebp_edge.texts.split_history import SplitHistory
from sebp_edge.training.teacher import with_teacher
from sebp_edge.units import sizes_apart

# Bytes that texts may always take: if few texts exceed the budget, the plan's error says better what would fit.
MIN_TEXT_BYTES = 30_000_000

ASKED_TOGETHER = "answers questions, and those about all documents are learnt together"
SAVED_INACTIVE = (
    "The adapter will be saved, but not activated unless keep_anyway is set; `sebp-edge adapters activate` activates "
    "it afterwards."
)


@dataclass(frozen=True)
class PlannedTraining:
    """A plan, with its dataset and schedules."""

    dataset: Dataset
    schedules: list[Schedule]
    plan: Plan


@dataclass(frozen=True)
class Preparation:
    """Prepares the texts of one call.

    Attributes:
        reference: the model.
        device: the device that the model will run on.
        budget: how much memory this process may use; None sets no limit.
        signal: stops the preparation.
        earlier: the splits of earlier versions, which stay, and the salt of what is remembered of documents.
        active: the active version beside the texts, if it is to be learnt on from.
        start: the version to learn on from; or why there is none, as a sentence's predicate.
        sync: whether to forget documents that are gone.
        interviewed: what the model itself wrote about the documents, by their numbers.
        on_event: receives the events.
    """

    reference: ModelReference
    recipe: Recipe
    seed: int
    device: torch.device
    budget: MemoryBudget | None
    signal: StopSignal
    on_event: Sink
    earlier: SplitHistory = field(default_factory=SplitHistory)
    active: TextsComparison | None = None
    start: Start | str = ""
    sync: bool = False
    interviewed: Mapping[int, Interviewed] = field(default_factory=dict)

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

    def read(self, texts) -> Reading:
        """Reads `texts`; on the CPU with a budget, refuses texts that would exceed it by themselves."""
        if self.budget is None or self.device.type == "cuda":
            return read_texts(texts, progress=self.progress)
        left = self.budget.size - memory_of(self.device).used
        return read_texts(texts, max(left, MIN_TEXT_BYTES), self.progress)

    def make_dataset(self, reading: Reading) -> Dataset:
        """Returns the dataset for a model that is not loaded, without questions."""
        return self._read_dataset(reading, local_tokenizer(self.reference), read_shape(self.reference).longest)

    def ask(self, dataset: Dataset, reading: Reading) -> Dataset:
        """Returns a dataset of `make_dataset` with questions, if the recipe asks any.

        Raises:
            TextsError: there are too few questions.
        """
        return self._ask(dataset, reading, local_tokenizer(self.reference))

    def plan(
        self, reading: Reading, *, dataset: Dataset | None = None, loaded_bytes: int = 0, gpu: int | None = None
    ) -> PlannedTraining:
        """Plans a training within the budget, or else within the free memory; loads no model.

        Args:
            dataset: the dataset with its questions, if it is made already.
            loaded_bytes: bytes of the model's weights, if the model is loaded already.
            gpu: memory of an absent GPU to plan for, in bytes.
        """
        shape = read_shape(self.reference)
        dataset = dataset or self.ask(self.make_dataset(reading), reading)
        self._refuse_unlearnable(dataset, reading, local_tokenizer(self.reference))
        schedules = self.schedule(dataset)
        if gpu is None:
            target, budget = self._target_and_budget(loaded_bytes)
        else:
            target, budget = Target.absent_gpu(gpu), self.budget or MemoryBudget(gpu)
        plan = make_plan(shape, dataset, schedules, self.recipe, target, budget, self.progress)
        return PlannedTraining(dataset, schedules, plan)

    def announce(self, plan: Plan) -> None:
        """Emits the MemoryPlanned event of the plan that is carried out, and the budget as a notice."""
        if plan.requested_budget is not None:
            budget = MemoryBudget(plan.budget, plan.requested_budget)
            self.on_event(Notice(f"The memory budget is {budget}; the training stays within that."))
        chosen, footprint = plan.chosen, asdict(plan.chosen.footprint)
        method, max_rows = chosen.recipe.method, chosen.options.max_rows
        self.on_event(
            MemoryPlanned(method, chosen.description, max_rows, plan.budget, chosen.peak, chosen.seconds, footprint)
        )

    def encode(self, reading: Reading, base: BaseModel, planned: PlannedTraining | None = None) -> Dataset:
        """Returns the dataset for a loaded model: the plan's, if that was made with the model's own tokenizer.

        Raises:
            ModelError: the tokenizer produces tokens that the model does not know.
        """
        if planned is not None and has_own_tokenizer(self.reference):
            data = planned.dataset
        else:
            data = self._read_dataset(reading, base.tokenizer, longest_sequence(base.model))
            data = self._ask(data, reading, base.tokenizer)
        self._refuse_unlearnable(data, reading, base.tokenizer)
        refuse_unknown_tokens(base.model, chain.from_iterable(example.input_ids for example in data.trained))
        self._notify_concerns(data)
        left_out = tuple(asdict(item) for item in data.left_out)
        self.on_event(TextsRead(data.num_documents, len(data.examples), data.num_tokens, data.padding_share, left_out))
        return data

    def teach(self, dataset: Dataset, base: BaseModel, options: MemoryOptions) -> Dataset:
        """Returns the dataset in which the base model, as it is now, is the teacher on general text."""
        collator = Collator(dataset.context_length, base.pad_token_id)
        general = with_teacher(
            base.model, dataset.asked.general, collator, base.device, self.on_event, self.signal.check, options=options
        )
        return replace(dataset, asked=replace(dataset.asked, general=general))

    @property
    def progress(self) -> Progress:
        """Reports the progress, and lets the preparation be stopped."""
        return Progress(self.on_event, self.signal.check)

    def _read_dataset(self, reading: Reading, tokenizer, longest: int | None) -> Dataset:
        drawing = Drawing(self.seed, self.earlier)
        return make_dataset(reading, tokenizer, self.recipe, longest, drawing, self.progress)

    def _ask(self, dataset: Dataset, reading: Reading, tokenizer) -> Dataset:
        if not (self.recipe.questions and dataset.examples):
            return dataset
        others = to_train(self.interviewed, self.seed)
        return add_questions(dataset, reading, tokenizer, self.recipe, self.seed, self.progress, others)

    def _refuse_unlearnable(self, dataset: Dataset, reading: Reading, tokenizer) -> None:
        refuse_unlearnable(
            dataset.examples,
            reading.documents,
            tokenizer,
            chat_template=self.recipe.chat_template,
            left_out=dataset.left_out,
        )
        if dataset.asked is not None:
            refuse_endless_answers(dataset.asked.trained, tokenizer)

    def _notify_concerns(self, dataset: Dataset) -> None:
        """Says before the training why the gate will judge nothing, if so."""
        if dataset.unjudged_because:
            self.on_event(Notice(" ".join([*dataset.unjudged_because, SAVED_INACTIVE])))
        if dataset.asked is not None:
            self.on_event(Notice(dataset.asked.summary))
            if self.interviewed:
                self.on_event(Notice(summary(self.interviewed, self.seed)))

    def schedule(self, dataset: Dataset, planned: PlannedTraining | None = None) -> list[Schedule]:
        """Returns the schedules of a dataset: the plan's, if the dataset is the plan's.

        Raises:
            TextsError: there is too little text.
        """
        if planned is not None and dataset is planned.dataset:
            return planned.schedules
        return make_schedules(dataset, self.recipe, self.seed, self.begin(dataset).lessons)

    def starting_at(self, active: TextsComparison | None, store: AdapterStore, *, sync: bool) -> "Preparation":
        """Returns the preparation of a training that learns on from the active version, if it can."""
        if active is None:
            return replace(self, sync=sync)
        start = Start.at(active, store)
        recipe = self.recipe if isinstance(start, str) else start.fill_in(self.recipe)
        if self.recipe.questions and not isinstance(start, str):
            start = ASKED_TOGETHER
        return replace(self, recipe=recipe, active=active, start=start, sync=sync)

    def describe_beginning(self, beginning: Beginning) -> str:
        """Returns what is trained on, or why the training starts over, in words; empty if no version is active."""
        if beginning.has_nothing_new:
            return UnchangedResult.of(self.active).summary
        if beginning.obstacle:
            return f"All documents are learnt again, since version {self.active.version} {beginning.obstacle}."
        return self._learning_on(beginning).summary if beginning.lessons else ""

    def announce_beginning(self, beginning: Beginning) -> None:
        """Emits the event that says what is trained on, or why the training starts over."""
        if beginning.lessons is not None:
            self.on_event(self._learning_on(beginning))
        elif beginning.obstacle:
            self.on_event(Notice(self.describe_beginning(beginning)))

    def _learning_on(self, beginning: Beginning) -> LearningOn:
        lessons = beginning.lessons
        numbers = (len(each) for each in (lessons.new, lessons.changed, lessons.unchanged, lessons.replayed))
        return LearningOn(beginning.version, *numbers, len(lessons.gone))

    def begin(self, dataset: Dataset) -> Beginning:
        """Decides whether the trainings learn on from an earlier version, and what they train on then."""
        return Beginning.of(self.start, dataset, self.recipe, self.seed, sync=self.sync)

    def _target_and_budget(self, loaded_bytes: int) -> tuple[Target, MemoryBudget]:
        """Returns this machine and its current budget, without the loaded weights, which the plan includes."""
        memory = memory_of(self.device)
        free = devices.free_memory(self.device) + memory.used
        budget = MemoryBudget(free) if self.budget is None else self.budget.within(free)
        return Target.this_machine(self.device, memory.planned_overhead(loaded_bytes)), budget
