"""Prepares a training: encodes texts, decides how it begins, makes schedules and plans the memory. Imports no torch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from sebp_edge.ask.general_texts import CHAT_TOKENS, chat_examples, chat_questions, general_examples
from sebp_edge.ask.make_quiz import make_quiz
from sebp_edge.ask.practice_examples import encode_practice
from sebp_edge.engine.memory.choosing import make_plan
from sebp_edge.engine.memory.memory_plan import Plan
from sebp_edge.engine.sparse.rows.schedule import Schedule, make_schedules
from sebp_edge.events import Notice
from sebp_edge.lessons.examples import encode
from sebp_edge.lessons.learnable import refuse_unlearnable
from sebp_edge.lessons.make_dataset import Drawing, make_dataset
from sebp_edge.lessons.split_history import take_fingerprints
from sebp_edge.run.call import Call
from sebp_edge.run.conditions import Conditions
from sebp_edge.run.start import NEEDED_FOR_TESTS, StartingPoint, latest_history
from sebp_edge.run.texts_comparison import TextsComparison, compare_with_active
from sebp_edge.run.work_ahead import Pace, most_tokens_in_folds, with_all_phases
from sebp_edge.values.dataset import Dataset
from sebp_edge.values.draw import Draw
from sebp_edge.values.reading import Reading
from sebp_edge.values.remembered import TEST, SplitHistory

LEARNT_TOGETHER = "reads other practice notes, and all are learnt together"
# With more documents, one split tests enough of them (kernels/bench/how-the-gate-decides.md, "Small gains").
MOST_IN_FOLDS = 100


@dataclass(frozen=True)
class Prepared:
    """A dataset, and how the training on it begins."""

    dataset: Dataset
    starting_point: StartingPoint


@dataclass(frozen=True)
class PlannedTraining:
    """A plan, with what it is for, and its pace; None if that is unknown."""

    prepared: Prepared
    schedules: list[Schedule]
    plan: Plan
    pace: Pace | None


class Preparation:
    """Prepares the texts of one call for a training.

    Args:
        earlier: the splits of earlier versions, which stay, and the salt of what is remembered of documents.
        keeps_splits: whether all documents have splits already.
        keeps_kind: whether documents that were in one split are not put into folds.

    Attributes:
        recipe: the recipe; with the values of the version that is learnt on from where it leaves them open.
        call: what it works with, with the recipe for the texts.
        active: the active version beside the texts, if it was to be learnt on from.
    """

    def __init__(
        self,
        call: Call,
        reading: Reading,
        earlier: SplitHistory | None = None,
        *,
        keeps_splits: bool = False,
        keeps_kind: bool = False,
    ):
        self.call, self.reading, self.recipe = call, reading, call.recipe
        self._earlier, self._keeps_splits, self._keeps_kind = earlier or SplitHistory(), keeps_splits, keeps_kind
        self.active: TextsComparison | None = None
        self._starting_point, self._sync = StartingPoint(), False

    @classmethod
    def under(cls, call: Call, texts, name: str | None) -> Self:
        """Reads texts; prepares what `adapt` would do with them under a name."""
        adapter = call.store.adapter(name or call.recipe.default_name)
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
        self.active, self._starting_point, self._sync = active, self._point_at(active), sync
        start = self._starting_point.start
        if start is not None:
            self.recipe = start.fill_in(self.recipe)
            if self.recipe.questions:
                self._starting_point = StartingPoint(active, obstacle=LEARNT_TOGETHER)
            elif len(start.states) > 1 and self._draw_without_model().num_folds != len(start.states):
                self._starting_point = StartingPoint(active, obstacle=NEEDED_FOR_TESTS)

    def _point_at(self, active: TextsComparison | None) -> StartingPoint:
        return StartingPoint.at(active, self.call.store)

    @property
    def starts_over(self) -> str:
        """Says why the training does not begin at the active version; empty if that is not known yet."""
        return self._starting_point.summary

    def _draw_without_model(self) -> Draw:
        """Draws the splits without the model's tokenizer, which tells what is empty, and how long folds would take."""
        texts = dict(enumerate(each.own_text for each in self.reading.documents))
        return self._drawing().draw(take_fingerprints(texts, self._earlier.salt, self.call.progress))

    def _drawing(self, most_tokens: float = math.inf) -> Drawing:
        recipe, start = self.recipe, self._starting_point.start
        stays = self._keeps_kind or (start is not None and len(start.states) == 1)
        is_split = stays and any(document.split == TEST for document in self._earlier.known)
        # A quiz is about test documents, and the judged states of all folds would be whole models.
        most = 0 if is_split or recipe.questions or recipe.method != "lora" else MOST_IN_FOLDS
        return Drawing(self.call.seed, self._earlier, self._keeps_splits, most, most_tokens)

    def read_dataset(self, conditions: Conditions) -> Prepared:
        """Returns the dataset for a model that is not loaded."""
        shape = conditions.shape
        return self._prepare(conditions.tokenizer, shape.longest, shape.parameters, on_gpu=conditions.target.on_gpu)

    def plan(self, conditions: Conditions, prepared: Prepared | None = None) -> PlannedTraining:
        """Plans a training within the budget, or else within the free memory; loads no model.

        Args:
            prepared: the dataset, if it is made already.
        """
        prepared = prepared or self.read_dataset(conditions)
        dataset = prepared.dataset
        refuse_unlearnable(dataset, len(self.reading.documents), conditions.tokenizer)
        schedules = self.schedule(prepared)
        shape, target, budget = conditions.shape, conditions.target, conditions.budget
        plan = make_plan(shape, dataset, schedules, self.recipe, target, budget, self.call.progress)
        pace = None if plan.chosen.seconds is None else Pace.planned(plan.chosen, schedules)
        plan = with_all_phases(plan, dataset, schedules, num_earlier=int(self.active is not None))
        return PlannedTraining(prepared, schedules, plan, pace)

    def plan_for_owner(self, conditions: Conditions) -> Plan:
        """Plans what `adapt` would do, and says how it would begin; see `Personalizer.plan`."""
        prepared, active = self.read_dataset(conditions), self.active
        event = prepared.starting_point.event
        if prepared.starting_point.has_nothing_new:
            event = Notice(f"{prepared.starting_point.summary} This plan is for learning all of them again.")
            self.learn_on_from(None, sync=False)
            prepared = self.read_dataset(conditions)
        for notice in filter(None, (active and active.name_in_use, event)):
            self.call.notify(notice)
        return self.plan(conditions, prepared).plan

    def schedule(self, prepared: Prepared, planned: PlannedTraining | None = None) -> list[Schedule]:
        """Returns the schedules of a dataset: the plan's, if the dataset is the plan's."""
        if planned is not None and prepared is planned.prepared:
            return planned.schedules
        lessons = prepared.starting_point.lessons
        return self.call.progress.run(lambda: make_schedules(prepared.dataset, self.recipe, self.call.seed, lessons))

    def _prepare(self, tokenizer, longest: int | None, parameters: int, *, on_gpu: bool) -> Prepared:
        recipe, seed = self.recipe, self.call.seed
        encoder = partial(encode_practice, seed=seed) if recipe.questions else encode
        drawing = self._drawing(most_tokens_in_folds(recipe, parameters, on_gpu=on_gpu))
        dataset = make_dataset(self.reading, tokenizer, recipe, longest, drawing, self.call.progress, encoder)
        if recipe.questions:
            dataset = self._with_quiz(dataset, tokenizer)
        start = self._starting_point.with_lessons(dataset.draw, self.recipe, seed, sync=self._sync)
        return self._with_general(Prepared(dataset, start), tokenizer, _longest_replies)

    def _with_quiz(self, dataset: Dataset, tokenizer) -> Dataset:
        """Adds the quiz about test documents."""
        tested = {number for number, split in dataset.draw.split_of.items() if split == TEST}
        return replace(dataset, quiz=make_quiz(self.reading.documents, tested, tokenizer, dataset.context_length))

    def _with_general(
        self, prepared: Prepared, tokenizer, reply_to: Callable[[Sequence[str]], Sequence[str]]
    ) -> Prepared:
        """Adds general text and replies to general questions, each the recipe's share of what is trained on."""
        if not self.recipe.general:
            return prepared
        dataset, lessons = prepared.dataset, prepared.starting_point.lessons
        learnt = lessons and lessons.new | lessons.changed | lessons.replayed
        own = sum(each.num_tokens for each in dataset.examples if learnt is None or each.document in learnt)
        length, num_tokens = dataset.context_length, round(self.recipe.general * own)
        texts = general_examples(tokenizer, length, num_tokens, self.call.seed)
        questions = chat_questions(num_tokens)
        if not chat_examples(questions, _longest_replies(questions), tokenizer, length):
            questions = []  # the chat template refuses them, or they leave no room
        chat = chat_examples(questions, reply_to(questions), tokenizer, length)
        return replace(prepared, dataset=replace(dataset, general=texts + chat))


def _longest_replies(questions: Sequence[str]) -> list[str]:
    """Stands for replies that the base model has not given yet, of as many tokens as it may give."""
    return len(questions) * [CHAT_TOKENS * " and"]
