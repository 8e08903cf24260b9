"""A learner that recovers when memory runs out.

A micro-batch that memory does not hold is not the end: from then on micro-batches are cut smaller, and the step or the
evaluation goes on with those. Only a single example that does not fit ends it. Before the first step the fullest
micro-batch is tried out, and later on what other programs leave is looked at.
"""

import sys
from collections.abc import Callable, Iterator
from itertools import chain

from torch import Tensor

from sebp_edge.errors import BudgetExceeded
from sebp_edge.events import ExamplesEvaluated, MemoryProbed, MemoryRanOut, MemorySqueezed, Notice, Sink
from sebp_edge.machine.devices import give_memory_back, let_go, ran_out_of_memory, synchronize
from sebp_edge.memory.guard import MemoryGuard
from sebp_edge.memory.options import FASTEST, MemoryOptions
from sebp_edge.models.adaptation import Adaptation, trainable
from sebp_edge.recipe import Recipe
from sebp_edge.texts.batches import Collator
from sebp_edge.texts.examples import Example
from sebp_edge.texts.schedule import Group, MicroBatch, Schedule
from sebp_edge.training.learner import Learner, Outcome
from sebp_edge.training.leftovers import Leftovers


class _CutSmaller(Exception):
    """A micro-batch did not fit into memory. What it took is free again, and micro-batches are to be cut anew."""


class RecoveringLearner:
    """Carries out a schedule; a context manager that leaves the model's own code as it was.

    Args:
        examples, options: see `Learner`.
        guard: what may be held; by default all that is free.

    Attributes:
        adaptation: whose parameters are trained.
        learner: computes.
        schedule: is carried out.
        limit: how many rows a micro-batch may have by now.
        steps_ahead: how many steps may be under way before the oldest one's outcome is looked at.
    """

    def __init__(
        self,
        adaptation: Adaptation,
        recipe: Recipe,
        examples: list[Example],
        collator: Collator,
        on_event: Sink,
        options: MemoryOptions = FASTEST,
        guard: MemoryGuard | None = None,
    ):
        self.adaptation, self._on_event = adaptation, on_event
        self._device = device = trainable(adaptation)[0].device
        # Older than all that may fail.
        self._leftovers = Leftovers(device)
        self._guard = guard or MemoryGuard(device)
        self._guard.begin()
        self.learner = Learner(adaptation, recipe, examples, collator, on_event, options, self._guard)
        self.limit = self.learner.rows.limit
        self.schedule = Schedule([])
        self.steps_ahead = 1 if device.type == "cuda" else 0
        self._largest_tried = (0, 0)  # the size of the largest micro-batch that was tried out
        self._told_of_steps = False

    def prepare(self, schedule: Schedule) -> None:
        """Lays a schedule out, and shows that its steps fit into memory.

        Raises:
            RuntimeError, MemoryError: a single example does not fit.
        """
        self.lay_out(schedule)
        while not self.fits():
            self.lay_out(schedule)

    def lay_out(self, schedule: Schedule) -> None:
        """Lays a schedule out within the limit, and has its graphs planned."""
        self.schedule = schedule
        schedule.lay_out(self.limit, one_micro_batch_each=not self.learner.adds_up)
        self._tell_of_smaller_steps()
        self._prepare_learner()

    def fits(self) -> bool:
        """Whether the fullest micro-batch to come, and an update, fit into memory; if not, the limit is lower now.

        They are tried out. Weights, moments, gradients and random states stay what they are, bit for bit.

        Raises:
            RuntimeError, MemoryError: a single example does not fit.
        """
        fullest = self._fullest()
        if not self._guard.is_set or fullest is None:
            return True
        size = self.learner.size(fullest)
        if size <= self._largest_tried:
            return True
        self._guard.begin()
        try:
            self._attempt(self._try_out, fullest)
        except _CutSmaller:
            return False
        self._largest_tried = size
        self._on_event(MemoryProbed(size[0], self._guard.peak, self._guard.allocator_peak, self._guard.predicted))
        return True

    def losses(self, group: Group) -> Iterator[tuple[list[Example], Tensor, Tensor]]:
        """The losses of a group that is evaluated, a micro-batch at a time.

        Yields:
            The examples of one; the losses of its loss rows, in nats: fp32 [C]; the example of each: int64 [C]; both on
            the host.
        """
        waiting, done = list(group.micro_batches), 0
        while waiting:
            try:
                losses, sequences = self._attempt(self.learner.losses, waiting[0])
            except _CutSmaller:
                self._cut_schedule()
                waiting = self.limit.cut(chain.from_iterable(one.examples for one in waiting), is_evaluated=True)
            else:
                done += len(waiting[0].examples)
                self._on_event(ExamplesEvaluated(done, len(group.examples)))
                yield waiting.pop(0).examples, losses, sequences

    def step(self, step: Group, learning_rate: float) -> Outcome:
        """One optimizer update on the mean loss of all loss tokens of a step, in as many micro-batches as it takes.

        If memory runs out, it is what it would have been with smaller micro-batches from its beginning.
        """
        self._look_around()
        self.learner.begin_step(learning_rate)
        while not self._accumulated(step):
            # A backward pass that failed may have added some of its gradients.
            self.learner.begin_again()
            step.cut(self.limit)
        return self.learner.finish_step()

    def start_again(self, state: list[Tensor]) -> None:
        """See `Learner.start_again`."""
        self.learner.start_again(state)

    def __enter__(self) -> "RecoveringLearner":
        self._handled = sys.exception()
        return self

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        self.learner.release()
        if isinstance(error, KeyboardInterrupt | BudgetExceeded) or ran_out_of_memory(error):
            # To get its own weights back a model takes memory.
            let_go(error, self._handled)
            give_memory_back(self._device)
        self.learner.rows.__exit__(kind, error, trace)
        self._leftovers.clear()
        give_memory_back(self._device)

    def _accumulated(self, step: Group) -> bool:
        """Adds up the gradients and the loss of a step; False if memory ran out, which leaves a part of them."""
        try:
            for micro_batch in step.micro_batches:
                self._attempt(self.learner.accumulate, micro_batch, step.num_loss_tokens)
        except _CutSmaller:
            self._cut_schedule()
            return False
        return True

    def _try_out(self, micro_batch: MicroBatch) -> None:
        try:
            self.learner.try_out(micro_batch)
            self._guard.settle()
        except BudgetExceeded as error:
            raise MemoryError(str(error)) from None

    def _attempt(self, run: Callable, micro_batch: MicroBatch, *arguments):
        """What `run` gives for a micro-batch.

        Raises:
            _CutSmaller: memory ran out.
            RuntimeError, MemoryError: it ran out where there is nothing to cut, or something else failed.
        """
        try:
            return run(micro_batch, *arguments)
        except (RuntimeError, MemoryError) as error:
            # One example without graphs is the least that there is, and an update is not taken back.
            is_least = len(micro_batch.examples) == 1 and self.learner.graphs is None
            is_update = run == self.learner.accumulate and not self.learner.adds_up
            if not ran_out_of_memory(error) or is_least or is_update:
                raise
        # Not while the error is handled: its traceback holds what had been computed.
        self._make_room(micro_batch)
        raise _CutSmaller

    def _make_room(self, micro_batch: MicroBatch) -> None:
        """Sees to it that what did not fit into memory is cut smaller, or is not captured any more."""
        if len(micro_batch.examples) > 1:
            before = self.limit.max_rows
            self._cut_smaller(micro_batch)
            self._on_event(MemoryRanOut(before, self.limit.max_rows))
        else:
            self._let_go()
            self._on_event(Notice("Training runs without CUDA graphs, which is slower: memory ran out with them."))

    def _cut_smaller(self, micro_batch: MicroBatch) -> None:
        """Limits micro-batches to half of this one's rows, with graphs of their own."""
        had_graphs = self.learner.graphs is not None
        # All of them: they hold memory, and those for larger micro-batches will not be asked for.
        self._let_go()
        self.limit = self.limit.halved(micro_batch)
        if had_graphs:
            self.learner.begin_graphs()

    def _cut_schedule(self) -> None:
        """Cuts the micro-batches to come."""
        self.schedule.cut(self.limit)
        self._prepare_learner()

    def _let_go(self) -> None:
        """Gives back what graphs and failed backward passes hold."""
        synchronize(self._device)  # graphs may be running
        self.learner.graphs = None
        self._leftovers.clear()
        give_memory_back(self._device)

    def _look_around(self) -> None:
        """Cuts micro-batches smaller if memory has become short, for example since other programs took it."""
        missing = self._guard.missing()
        if not missing:
            return
        before, fullest = self.limit.max_rows, self._fullest()
        if fullest is not None and len(fullest.examples) > 1 and self.learner.adds_up:
            self._cut_smaller(fullest)
            self._cut_schedule()
            self._guard.cut()
        else:
            self._guard.accept(missing)
        self._on_event(MemorySqueezed(missing, before, self.limit.max_rows))

    def _fullest(self) -> MicroBatch | None:
        """The largest micro-batch of the steps to come."""
        return max(self.schedule.trained, key=self.learner.size, default=None)

    def _prepare_learner(self) -> None:
        self.learner.prepare(self.schedule.trained, [micro_batch for _, micro_batch in self.schedule.evaluated])

    def _tell_of_smaller_steps(self) -> None:
        if self.schedule.has_smaller_steps and not self._told_of_steps:
            self._told_of_steps = True
            self._on_event(
                Notice(
                    f"A step has at most {self.limit.max_rows} rows, fewer than batch_tokens asks for: "
                    "all weights are trained, and their gradients are not kept from one micro-batch to the next."
                )
            )
