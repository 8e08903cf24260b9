"""Recovers when memory runs out.

If a micro-batch does not fit into memory, the step or evaluation continues with smaller micro-batches, and all later
ones are smaller too. The training ends only if a single example does not fit. A dry run of the largest micro-batch
precedes the first step; during the training, free memory is checked every few steps.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import NamedTuple

from torch import Tensor

from sebp_edge.basics.out_of_memory import Attempt, ran_out_of_memory
from sebp_edge.basics.stopping import Check
from sebp_edge.engine.memory.guard import MemoryGuard
from sebp_edge.engine.memory.memory_options import FASTEST, MemoryOptions
from sebp_edge.engine.models.adaptation import Adaptation
from sebp_edge.engine.sparse.rows.batches import Collator
from sebp_edge.engine.sparse.rows.schedule import Group, MicroBatch, Schedule
from sebp_edge.engine.training.learner import Learner, Outcome
from sebp_edge.engine.training.words import WordReader
from sebp_edge.errors import BudgetExceeded
from sebp_edge.events import ExamplesEvaluated, MemoryPressure, MemoryProbed, MemoryRanOut, Notice, Sink
from sebp_edge.machine.devices import clear_frames, release_memory
from sebp_edge.recipe import Recipe
from sebp_edge.values.example import Example, Outline


class LearnerState(NamedTuple):
    """What a learner goes on from after a step."""

    tensors: list[Tensor]  # the weights and the optimizer's state
    prepared_rows: int  # the maximum number of rows of a micro-batch that the schedule was laid out within
    max_rows: int  # the maximum number after memory has run out


@dataclass
class Breaks:
    """What is done where a training may be left, and where it may rest."""

    # Called within evaluations, and within steps that change nothing before their end; may raise to end them.
    check: Check = lambda: None
    rest: Callable[[], None] = lambda: None  # called between the micro-batches of other steps, which cannot be left
    # Tells whether the outcome of all steps is to be read before the next one, for a checkpoint.
    is_due: Callable[[], bool] = lambda: False
    cannot_be_left: bool = False  # whether one of the other steps is running

    def check_within(self) -> None:
        """Checks, unless the step cannot be left."""
        if not self.cannot_be_left:
            self.check()


class RecoveringLearner:
    """Runs a schedule's steps and evaluations; a context manager that restores the model's original code.

    Attributes:
        plain: computes what fits into memory.
        limit: the current maximum number of rows of a micro-batch.
        steps_ahead: the number of steps whose outcome may be unread when the next one starts.
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
        breaks: Breaks | None = None,
        words: Callable[[], WordReader | None] = lambda: None,
    ):
        self.breaks, self._on_event = breaks or Breaks(), on_event
        within = self.breaks.check_within  # no method of this learner, which the model's parts would keep alive
        self.plain = Learner(adaptation, recipe, examples, collator, on_event, options, guard, within, words)
        self.adaptation, self.row_losses = adaptation, self.plain.row_losses
        self.limit = self.row_losses.limit
        self._prepared_rows = self.limit.max_rows
        self.schedule = Schedule([])
        self._later: Sequence[Schedule] = ()
        self.steps_ahead = 1 if self.plain.device.type == "cuda" else 0
        self._largest_dry_run = (0, 0)  # size of the largest micro-batch of a dry run
        self._notified_smaller_steps = False

    @property
    def state(self) -> LearnerState:
        """What `prepare` goes on from; valid after a step, until the next one begins."""
        return LearnerState(self.plain.tensors, self._prepared_rows, self.limit.max_rows)

    def prepare(self, schedule: Schedule, later: Sequence[Schedule] = (), state: LearnerState | None = None) -> None:
        """Lays out a schedule with micro-batches that fit into memory.

        Args:
            later: the schedules that follow. Their micro-batches must fit too, and share the graphs of this one: a
                graph that is warmed up after the first capture takes memory in addition.
            state: what the learner goes on from within this schedule; None at its beginning.
        """
        self._later = later
        if state is not None:
            self.limit = replace(self.limit, max_rows=state.prepared_rows)
        self.lay_out(schedule)
        while not self.fits():
            self.lay_out(schedule)
        self._prepared_rows = self.limit.max_rows
        if state is not None:
            if state.max_rows < self.limit.max_rows:
                self.limit = replace(self.limit, max_rows=state.max_rows)
                self._cut_schedule()
            for own, saved in zip(self.plain.tensors, state.tensors, strict=True):
                own.copy_(saved)

    def lay_out(self, schedule: Schedule) -> None:
        """Lays out a schedule, and those that follow, within the limit, and plans their graphs."""
        self.schedule, schedules = schedule, (schedule, *self._later)
        for each in schedules:
            each.lay_out(self.limit, one_micro_batch_each=not self.plain.update.can_accumulate)
        self.limit = self.limit.evaluating_like(schedules)
        for each in schedules:
            each.cut_evaluations(self.limit)
        self._notify_smaller_steps()
        self._prepare_learner()

    def fits(self) -> bool:
        """Tests with a dry run whether the largest micro-batch and an update fit; lowers the limit if they do not.

        Returns True without a dry run if the guard has no limit, or if an equally large micro-batch fitted before.
        Weights, moments, gradients and random states stay unchanged, bit for bit.
        """
        largest = self._largest_micro_batch(self.schedule, *self._later)
        guard = self.plain.guard
        if not guard.has_limit or largest is None:
            return True
        size = self.plain.size(largest)
        if size <= self._largest_dry_run:
            return True
        guard.begin()
        with Attempt(partial(self.can_reduce_memory, largest)) as attempt:
            try:
                self.plain.dry_run(largest)
                guard.record_transient()
            except BudgetExceeded as error:
                raise MemoryError(str(error)) from None
        if attempt.did_not_fit:
            self._reduce_memory(largest)
            return False
        self._largest_dry_run = size
        self._on_event(MemoryProbed(size[0], guard.peak, guard.allocator_peak, guard.predicted))
        return True

    def losses(self, group: Group, *, reads_words: bool = False) -> Iterator[tuple[list[Outline], Tensor, Tensor]]:
        """Evaluates a group, one micro-batch at a time.

        Yields:
            The micro-batch's examples, the losses of its loss rows in nats, fp32 [C], and the example of each loss row,
            int64 [C]; both tensors are on the host. If it reads words, instead of the losses what it has read, [C, F].
        """
        remaining, done = list(group.micro_batches), 0
        while remaining:
            with Attempt(partial(self.can_reduce_memory, remaining[0])) as attempt:
                losses, sequences = self.plain.losses_of(remaining[0], reads_words=reads_words)
            if attempt.did_not_fit:
                self._reduce_memory(remaining[0])
                self._cut_schedule()
                remaining = self.limit.cut(chain.from_iterable(each.examples for each in remaining), is_evaluated=True)
            else:
                done += len(remaining[0].examples)
                self._on_event(ExamplesEvaluated(done, len(group.examples)))
                yield remaining.pop(0).examples, losses, sequences

    @property
    def can_be_left(self) -> bool:
        """Whether the state within a step is that before it: no update has begun, and no earlier step is unread."""
        return self.plain.update.can_accumulate and self.steps_ahead == 0

    def step(self, step: Group, learning_rate: float) -> Outcome:
        """Runs one optimizer update on the mean loss of a step's loss tokens, in as many micro-batches as needed.

        If memory runs out, the step starts again with smaller micro-batches.
        """
        self._check_memory()
        plain, can_be_left = self.plain, self.can_be_left
        self.breaks.cannot_be_left = not can_be_left
        try:
            plain.begin_step(learning_rate)
            done, loss_tokens = 0, step.num_loss_tokens
            while done < len(step.micro_batches):
                micro_batch = step.micro_batches[done]
                with Attempt(partial(self._can_start_again, micro_batch)) as attempt:
                    plain.accumulate(micro_batch, loss_tokens)
                done += 1
                if attempt.did_not_fit:
                    self._reduce_memory(micro_batch)
                    self._cut_schedule()
                    # The failed backward pass may have added some gradients.
                    plain.discard_step()
                    step.cut(self.limit)
                    done = 0
                if can_be_left:
                    self.breaks.check()
                else:
                    self.breaks.rest()
            return plain.finish_step()
        finally:
            self.breaks.cannot_be_left = False

    def __enter__(self) -> "RecoveringLearner":
        self._handled = sys.exception()
        return self

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        self.plain.release()
        if isinstance(error, KeyboardInterrupt | BudgetExceeded) or ran_out_of_memory(error):
            # Restoring the model's original weights takes memory.
            clear_frames(error, self._handled)
            release_memory(self.plain.device)
        self.plain.remove()
        release_memory(self.plain.device)

    def can_reduce_memory(self, micro_batch: MicroBatch) -> bool:
        """Whether a micro-batch can take less memory; a single example cannot be cut."""
        return len(micro_batch.examples) > 1 or self.plain.graphs is not None or self.plain.num_dequantised > 0

    def _can_start_again(self, micro_batch: MicroBatch) -> bool:
        """Whether a step may begin again with less memory; updates in the backward pass may not be repeated."""
        return self.plain.update.can_accumulate and self.can_reduce_memory(micro_batch)

    def _reduce_memory(self, micro_batch: MicroBatch) -> None:
        """Frees dequantised weights, else halves micro-batches, or drops the graphs if this has a single example."""
        if self.plain.free_dequantised():
            return
        if len(micro_batch.examples) > 1:
            before = self.limit.max_rows
            self._cut_smaller(micro_batch)
            self._on_event(MemoryRanOut(before, self.limit.max_rows))
        else:
            self.plain.release_graphs()
            self._on_event(Notice("Training runs without CUDA graphs, which is slower: memory ran out with them."))

    def _cut_smaller(self, micro_batch: MicroBatch) -> None:
        """Limits micro-batches to half of this one's rows, and starts new graphs for them."""
        self.limit = self.limit.halved(micro_batch)
        self.plain.replace_graphs()

    def _cut_schedule(self) -> None:
        """Cuts the schedule's micro-batches to the limit."""
        for each in (self.schedule, *self._later):
            each.cut(self.limit)
        self._prepare_learner()

    def _check_memory(self) -> None:
        """Reduces memory if it has become short, for example because other programs took it."""
        shortfall = self.plain.guard.shortfall()
        if not shortfall:
            return
        if self.plain.free_dequantised():
            self._cut_schedule()
            return
        before, largest = self.limit.max_rows, self._largest_micro_batch(self.schedule)
        if largest is not None and len(largest.examples) > 1 and self.plain.update.can_accumulate:
            self._cut_smaller(largest)
            self._cut_schedule()
            self.plain.guard.halve_transient()
        else:
            self.plain.guard.accept_shortfall(shortfall)
        self._on_event(MemoryPressure(shortfall, before, self.limit.max_rows))

    def _largest_micro_batch(self, *schedules: Schedule) -> MicroBatch | None:
        """Returns the largest micro-batch with gradients; None if there is none."""
        return max(chain.from_iterable(each.trained for each in schedules), key=self.plain.size, default=None)

    def _prepare_learner(self) -> None:
        schedules = (self.schedule, *self._later)
        trained = chain.from_iterable(each.trained for each in schedules)
        validation, test = [], []
        for each in schedules:
            validation += each.num_validations * each.validation.micro_batches
            # After a training on all documents, words are not read.
            (validation if each.trains_on_all else test).extend(each.num_tests * each.test.micro_batches)
        self.plain.plan_graphs(trained, validation, test)

    def _notify_smaller_steps(self) -> None:
        if self.schedule.has_smaller_steps and not self._notified_smaller_steps:
            self._notified_smaller_steps = True
            self._on_event(
                Notice(
                    f"Each step has at most {self.limit.max_rows} rows, fewer than batch_tokens asks for, "
                    "since full fine-tuning in bf16 does not accumulate gradients over micro-batches."
                )
            )
