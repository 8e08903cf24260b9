"""Prepares a training: encodes texts, decides how it begins, makes schedules and plans the memory. Imports no torch."""

from dataclasses import asdict, dataclass, replace
from functools import partial

from sebp_edge.ask.general_texts import general_examples
from sebp_edge.ask.make_quiz import make_quiz
from sebp_edge.ask.practice_examples import encode_practice
from sebp_edge.basics.units import sizes_apart
from sebp_edge.engine.memory.budget import MemoryBudget
from sebp_edge.engine.memory.choosing import fill_free_memory, make_plan
from sebp_edge.engine.memory.memory_options import FASTEST, MemoryOptions
from sebp_edge.engine.memory.memory_plan import Plan
from sebp_edge.engine.memory.target import Target
from sebp_edge.engine.models.libraries import quiet_libraries
from sebp_edge.engine.sparse.rows.schedule import Schedule, make_schedules
from sebp_edge.errors import MachineError
from sebp_edge.events import MemoryPlanned, Notice
from sebp_edge.lessons.examples import encode
from sebp_edge.lessons.general_probe import encode_probe
from sebp_edge.lessons.learnable import refuse_unlearnable
from sebp_edge.lessons.make_dataset import Drawing, make_dataset
from sebp_edge.lessons.split_history import take_fingerprints
from sebp_edge.lessons.splits import FOLDS_BELOW, draw_splits
from sebp_edge.recipe import Recipe
from sebp_edge.run.start import StartingPoint, latest_history
from sebp_edge.run.texts_call import TextsCall
from sebp_edge.run.texts_comparison import TextsComparison, compare_with_active
from sebp_edge.run.work_ahead import planned_seconds_of_a_token, with_all_phases
from sebp_edge.store.adapter import Adapter
from sebp_edge.values.dataset import Dataset
from sebp_edge.values.reading import Reading
from sebp_edge.values.remembered import TEST, SplitHistory

LEARNT_TOGETHER = "reads other practice notes, and all are learnt together"
TESTED_IN_TURN = f"has learnt from each of its documents, and from {FOLDS_BELOW} on some are kept for tests alone"


@dataclass(frozen=True)
class Prepared:
    """A dataset, and how the training on it begins."""

    dataset: Dataset
    starting_point: StartingPoint


@dataclass(frozen=True)
class PlannedTraining:
    """A plan, with what it is for, and the seconds of a token's forward pass; None if they are unknown."""

    prepared: Prepared
    schedules: list[Schedule]
    plan: Plan
    token: float | None


class Preparation:
    """Prepares the texts of one call for a training.

    Args:
        earlier: the splits of earlier versions, which stay, and the salt of what is remembered of documents.
        keeps_splits: whether all documents have splits already.

    Attributes:
        recipe: the recipe; with the values of the version that is learnt on from where it leaves them open.
        active: the active version beside the texts, if it was to be learnt on from.
    """

    def __init__(
        self, call: TextsCall, reading: Reading, earlier: SplitHistory | None = None, *, keeps_splits: bool = False
    ):
        self._call, self.reading, self.recipe = call, reading, call.recipe
        self._drawing = Drawing(call.seed, earlier or SplitHistory(), keeps_splits)
        self.active: TextsComparison | None = None
        self._starting_point, self._sync = StartingPoint(), False

    @classmethod
    def under(cls, call: TextsCall, texts, adapter: Adapter) -> "Preparation":
        """Reads texts; prepares what `adapt` would do with them under the name of an adapter."""
        call, reading = call.with_texts(texts, adapter)
        preparation = cls(call, reading, latest_history(adapter))
        active = compare_with_active(call.store, adapter.name, call.reference, call.recipe, call.seed, reading)
        preparation.learn_on_from(active, sync=False)
        return preparation

    def learn_on_from(self, active: TextsComparison | None, *, sync: bool) -> None:
        """Lets the training begin at the active version, if it can.

        Args:
            sync: whether documents that are gone are to be forgotten.
        """
        self.active, self._starting_point, self._sync = active, StartingPoint.at(active, self._call), sync
        start = self._starting_point.start
        if start is not None:
            self.recipe = start.fill_in(self.recipe)
            if self.recipe.questions:
                self._starting_point = StartingPoint(active, obstacle=LEARNT_TOGETHER)
            elif len(start.states) > 1 and self._has_enough_for_tests():
                self._starting_point = StartingPoint(active, obstacle=TESTED_IN_TURN)

    @property
    def starts_over(self) -> str:
        """Says why the training does not begin at the active version; empty if that is not known yet."""
        return self._starting_point.summary

    def _has_enough_for_tests(self) -> bool:
        """Whether the documents get one split instead of folds, told without the model's tokenizer."""
        texts, drawing = dict(enumerate(each.own_text for each in self.reading.documents)), self._drawing
        fingerprints = take_fingerprints(texts, drawing.earlier.salt, self._call.progress)
        return draw_splits(fingerprints, drawing.seed, drawing.earlier, keeps=drawing.keeps).kind == "split"

    def read_dataset(self) -> Prepared:
        """Returns the dataset for a model that is not loaded."""
        return self._prepare(self._call.tokenizer(), self._call.shape.longest)

    def plan(self, prepared: Prepared | None = None, *, gpu: int | None = None) -> PlannedTraining:
        """Plans a training within the budget, or else within the free memory; loads no model.

        Args:
            prepared: the dataset, if it is made already.
            gpu: memory of an absent GPU to plan for, in bytes.
        """
        call = self._call
        shape = call.shape
        prepared = prepared or self.read_dataset()
        refuse_unlearnable(prepared.dataset, len(self.reading.documents), call.tokenizer())
        schedules = self.schedule(prepared)
        if gpu is None:
            target, budget = call.target_and_budget()
        else:
            target, budget = Target.absent_gpu(gpu), call.budget or MemoryBudget(gpu)
        plan = make_plan(shape, prepared.dataset, schedules, self.recipe, target, budget, call.progress)
        token = None if plan.chosen.seconds is None else planned_seconds_of_a_token(plan.chosen, schedules)
        plan = with_all_phases(plan, prepared.dataset, schedules, num_earlier=int(self.active is not None))
        return PlannedTraining(prepared, schedules, plan, token)

    def plan_within_budget(self) -> PlannedTraining | None:
        """Plans a training, and says what it will do; returns None without a memory budget."""
        if self._call.budget is None:
            return None
        planned = self.plan()
        self._announce(planned.plan)
        return planned

    def refuse_less_memory(self, peak: int) -> None:
        """Raises a MachineError if the budget, or the free memory within it, is less than a training takes."""
        _, budget = self._call.target_and_budget()
        if self._call.budget is not None and peak > budget.size:
            needed, size = sizes_apart(peak, budget.size)
            raise MachineError(
                f"The training began with a plan for {needed}, and the memory budget is {size} now; close other "
                "programs, raise the budget, or start over with --changed again (changed='again')."
            )

    def chosen(self, planned: PlannedTraining | None) -> tuple[Recipe, MemoryOptions]:
        """Returns the recipe and the options to train with."""
        if planned is None:
            return self.recipe.with_defaults(), FASTEST
        return planned.plan.chosen.recipe, planned.plan.chosen.options

    def fill_free_memory(
        self, recipe: Recipe, options: MemoryOptions, prepared: Prepared, schedules: list[Schedule]
    ) -> MemoryOptions:
        """Returns the options without a plan, on a GPU with dequantised 4-bit weights in a part of its free memory."""
        call = self._call
        if not (recipe.load_in_4bit and call.on_gpu) or call.budget is not None:
            return options
        target, budget = call.target_and_budget()
        choice = fill_free_memory(call.shape, prepared.dataset, schedules, recipe, target, budget.size)
        call.notify(Notice(f"Without a memory budget, the free GPU memory decides: {choice.kept}."))
        return replace(options, dequantised_blocks=choice.options.dequantised_blocks)

    def _announce(self, plan: Plan) -> None:
        """Emits the MemoryPlanned event of the plan that is carried out, and the budget as a notice."""
        notify = self._call.notify
        if plan.requested_budget is not None:
            budget = MemoryBudget(plan.budget, plan.requested_budget)
            notify(Notice(f"The memory budget is {budget}; the training stays within that."))
        chosen, footprint = plan.chosen, asdict(plan.chosen.footprint)
        method, max_rows = chosen.recipe.method, chosen.options.max_rows
        notify(MemoryPlanned(method, chosen.description, max_rows, plan.budget, chosen.peak, chosen.seconds, footprint))

    def schedule(self, prepared: Prepared, planned: PlannedTraining | None = None) -> list[Schedule]:
        """Returns the schedules of a dataset: the plan's, if the dataset is the plan's.

        Raises:
            TextsError: there is too little text.
        """
        if planned is not None and prepared is planned.prepared:
            return planned.schedules
        lessons = prepared.starting_point.lessons
        return self._call.progress.run(lambda: make_schedules(prepared.dataset, self.recipe, self._call.seed, lessons))

    def _prepare(self, tokenizer, longest: int | None) -> Prepared:
        recipe, seed = self.recipe, self._call.seed
        encoder = partial(encode_practice, seed=seed) if recipe.questions else encode
        dataset = make_dataset(self.reading, tokenizer, recipe, longest, self._drawing, self._call.progress, encoder)
        if recipe.questions:
            dataset = self._with_quiz(dataset, tokenizer)
        return Prepared(dataset, self._starting_point.with_lessons(dataset.draw, self.recipe, seed, sync=self._sync))

    def _with_quiz(self, dataset: Dataset, tokenizer) -> Dataset:
        """Adds the quiz about test documents, and general text that keeps what the model could do."""
        length, general = dataset.context_length, self.recipe.general
        tested = {number for number, split in dataset.draw.split_of.items() if split == TEST}
        return replace(
            dataset,
            general=general_examples(tokenizer, length, round(general * dataset.num_tokens), self._call.seed),
            probe=encode_probe(tokenizer, length) if general else [],
            quiz=make_quiz(self.reading.documents, tested, tokenizer, length),
        )


def plan_for(call: TextsCall, texts, name: str | None, gpu: str | int | None) -> Plan:
    """See `Personalizer.plan`."""
    size = None if gpu is None else call.parse_gpu_memory(gpu)
    with quiet_libraries():
        preparation = Preparation.under(call, texts, call.store.adapter(name or call.recipe.default_name))
        prepared, active = preparation.read_dataset(), preparation.active
        event = prepared.starting_point.event
        if prepared.starting_point.has_nothing_new:
            event = Notice(f"{prepared.starting_point.summary} This plan is for learning all of them again.")
            preparation.learn_on_from(None, sync=False)
            prepared = preparation.read_dataset()
        for each in filter(None, (active and active.name_in_use, event)):
            call.notify(each)
        return preparation.plan(prepared, gpu=size).plan
