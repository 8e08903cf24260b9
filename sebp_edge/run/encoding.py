"""Prepares a training here: plans it, and encodes its texts for the loaded model, which may also be the teacher."""

from dataclasses import asdict, replace
from functools import partial
from itertools import chain

from sebp_edge.ask.general_texts import CHAT_TOKENS
from sebp_edge.basics.units import sizes_apart
from sebp_edge.engine.memory.budget import MemoryBudget
from sebp_edge.engine.memory.choosing import fill_free_memory
from sebp_edge.engine.memory.memory_options import FASTEST, MemoryOptions
from sebp_edge.engine.memory.memory_plan import Plan
from sebp_edge.engine.memory.shape_reader import read_shape
from sebp_edge.engine.models.architecture import longest_sequence
from sebp_edge.engine.models.hub_cache import has_own_tokenizer
from sebp_edge.engine.models.loading import BaseModel, refuse_unknown_tokens
from sebp_edge.engine.models.lora import read_factors
from sebp_edge.engine.sparse.rows.batches import Collator
from sebp_edge.engine.sparse.rows.schedule import Schedule
from sebp_edge.engine.training.teacher import with_teacher
from sebp_edge.errors import AdapterError, MachineError
from sebp_edge.events import MemoryPlanned, Notice, TextsRead
from sebp_edge.lessons.learnable import refuse_unlearnable
from sebp_edge.recipe import Recipe
from sebp_edge.run.model_call import ModelCall
from sebp_edge.run.preparation import PlannedTraining, Preparation, Prepared
from sebp_edge.run.replies import reply_to
from sebp_edge.run.start import DAMAGED, StartingPoint
from sebp_edge.run.texts_comparison import TextsComparison
from sebp_edge.run.work_ahead import REPLIES, TEACHER

SAVED_INACTIVE = (
    "The adapter will be saved, but not activated unless activate_anyway is set; `sebp-edge adapters activate` "
    "activates it afterwards."
)


class TrainingPreparation(Preparation):
    """Prepares the texts of one call for a training here, with the model."""

    call: ModelCall

    def plan_within_budget(self) -> PlannedTraining | None:
        """Plans a training, and says what it will do; returns None without a memory budget."""
        if self.call.budget is None:
            return None
        planned = self.plan(self.call.conditions())
        self._announce(planned.plan)
        return planned

    def refuse_less_memory(self, peak: int) -> None:
        """Raises a MachineError if the budget, or the free memory within it, is less than a training takes."""
        budget = self.call.current_budget()
        if self.call.budget is not None and peak > budget.size:
            needed, size = sizes_apart(peak, budget.size)
            raise MachineError(
                f"The training began with a plan for {needed}, and the memory budget is {size} now; close other "
                "programs, raise the budget, or start over with --changed again (changed='again')."
            )

    def chosen(self, planned: PlannedTraining | None) -> tuple[Recipe, MemoryOptions]:
        """Returns the recipe and the options to train with."""
        if planned is None:
            return self.recipe.with_defaults().for_size(read_shape(self.call.reference).parameters), FASTEST
        return planned.plan.chosen.recipe, planned.plan.chosen.options

    def fill_free_memory(
        self, recipe: Recipe, options: MemoryOptions, prepared: Prepared, schedules: list[Schedule]
    ) -> MemoryOptions:
        """Returns the options without a plan, on a GPU with dequantised 4-bit weights in a part of its free memory."""
        call = self.call
        if not (recipe.load_in_4bit and call.on_gpu) or call.budget is not None:
            return options
        here = call.conditions()
        choice = fill_free_memory(here.shape, prepared.dataset, schedules, recipe, here.target, here.budget.size)
        call.notify(Notice(f"Without a memory budget, the free GPU memory decides: {choice.kept}."))
        return replace(options, dequantised_blocks=choice.options.dequantised_blocks)

    def encode(self, base: BaseModel, planned: PlannedTraining | None = None) -> Prepared:
        """Returns the dataset for a loaded model: the plan's, if that was made with the model's own tokenizer."""
        if planned is not None and has_own_tokenizer(self.call.reference):
            prepared = planned.prepared
        else:
            prepared = self._prepare(
                base.tokenizer, longest_sequence(base.model), base.num_parameters, on_gpu=self.call.on_gpu
            )
        data = prepared.dataset
        refuse_unlearnable(data, len(self.reading.documents), base.tokenizer)
        refuse_unknown_tokens(base.model, chain.from_iterable(example.input_ids for example in data.all_examples))
        if data.unjudged_because:  # said before the training
            self.call.notify(Notice(" ".join([*data.unjudged_because, SAVED_INACTIVE])))
        left_out = tuple(asdict(item) for item in data.left_out)
        read = TextsRead(data.num_documents, len(data.examples), data.num_tokens, data.padding_share, left_out)
        self.call.notify(read)
        return prepared

    def teach(self, prepared: Prepared, base: BaseModel, options: MemoryOptions) -> Prepared:
        """Returns the dataset in which the base model, as it is now, is the teacher on general text and chat."""
        call = self.call
        call.job.enter(REPLIES)
        prepared = self._with_general(prepared, base.tokenizer, partial(reply_to, base, CHAT_TOKENS, call.check))
        call.job.enter(TEACHER)
        data = prepared.dataset
        collator = Collator(data.context_length, base.pad_token_id)
        general = with_teacher(
            base.model, data.general, collator, base.device, call.notify, call.signal.check, options=options
        )
        return replace(prepared, dataset=replace(data, general=general))

    def _point_at(self, active: TextsComparison | None) -> StartingPoint:
        """Begins at the active version if its weights can be read, too."""
        point = super()._point_at(active)
        try:
            for folder in set(point.folders):
                read_factors(folder)
        except AdapterError:
            return StartingPoint(active, obstacle=DAMAGED)
        return point

    def _announce(self, plan: Plan) -> None:
        """Emits the MemoryPlanned event of the plan that is carried out, and the budget as a notice."""
        notify = self.call.notify
        if plan.requested_budget is not None:
            budget = MemoryBudget(plan.budget, plan.requested_budget)
            notify(Notice(f"The memory budget is {budget}; the training stays within that."))
        chosen, footprint = plan.chosen, asdict(plan.chosen.footprint)
        method, max_rows = chosen.recipe.method, chosen.options.max_rows
        notify(MemoryPlanned(method, chosen.description, max_rows, plan.budget, chosen.peak, chosen.seconds, footprint))
