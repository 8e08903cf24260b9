"""A model that learns from examples: losses, gradients and updates, each in the fastest way that this machine has.

On a GPU with hoisted rows, micro-batches and updates are replays of captured graphs (level 3); what cannot be captured
runs as it is, after a notice. Everywhere else all of it does. The numbers are the same to rounding.

A micro-batch that memory does not hold is not the end: from then on micro-batches are cut smaller, and the step or the
evaluation goes on with those. Only a single example that does not fit ends it. Before the first step the fullest
micro-batch is tried out, and later on what other programs leave is looked at.
"""

import sys
from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from sebp_edge.errors import BudgetExceeded
from sebp_edge.events import ExamplesEvaluated, MemoryProbed, MemoryRanOut, MemorySqueezed, Notice, Sink
from sebp_edge.machine.devices import give_memory_back, let_go, ran_out_of_memory, synchronize
from sebp_edge.memory.guard import MemoryGuard
from sebp_edge.memory.options import FASTEST, MemoryOptions
from sebp_edge.models.adaptation import Adaptation, restore, trainable
from sebp_edge.recipe import Recipe
from sebp_edge.texts.batches import Collator, bucket_for
from sebp_edge.texts.examples import Example
from sebp_edge.training.graphs import GRADIENTS, CannotCapture, Graphs, MicroBatchGraphs
from sebp_edge.training.leftovers import Leftovers
from sebp_edge.training.losses import RowLosses
from sebp_edge.training.update import Update
from sebp_edge.training.update_in_backward import UpdateInBackward

# Most rows of a micro-batch whose losses alone are asked for: larger ones are not faster on a CPU, and later to stop.
EVALUATED_ON_A_CPU = 1024


class Outcome(NamedTuple):
    """What one step was; on the device, so that reading it waits for the step.

    Attributes:
        loss: nats per token.
        grad_norm: of the gradients of all parameters, before clipping.
    """

    loss: Tensor
    grad_norm: Tensor


class _CutSmaller(Exception):
    """A micro-batch did not fit into memory. What it took is free again, and micro-batches are to be cut anew."""


class Learner:
    """Trains an adaptation; a context manager that leaves the model's own code as it was.

    Args:
        options: what is held in memory at once.

    Attributes:
        adaptation: whose parameters are trained.
        rows: gives the losses where no graph does.
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
        limit: MemoryGuard | None = None,
    ):
        self.adaptation, self._on_event = adaptation, on_event
        self._parameters = trainable(adaptation)
        self._device = device = self._parameters[0].device
        self._steps: list[list[Example]] = []
        self._held_out: tuple[list[Example], ...] = ()
        self._leftovers = Leftovers(device)
        self._limit = limit or MemoryGuard(device)
        self._limit.begin()
        self._proven = (0, 0)  # the size of the largest micro-batch that was tried out
        self.rows = RowLosses(adaptation.model, examples, collator, device, on_event, options)
        self.steps_ahead = 1 if device.type == "cuda" else 0
        self._graphs: MicroBatchGraphs | None = None
        self._told_of_steps = False
        try:
            self._loss = torch.zeros((), device=device)
            self._update = _update_for(self._parameters, recipe, options)
            if device.type == "cuda" and self.rows.hoisted is not None:
                self._graphs = self._no_graphs_yet()
                # In a pool of its own: micro-batches' graphs may have to go, this one never does.
                self._captured(lambda: self._update.capture(Graphs(device, on_event)))
        except BaseException:
            self.rows.__exit__()
            raise

    def steps(self, examples: list[Example]) -> list[list[Example]]:
        """The steps that one batch of examples makes: one, if gradients can be added up, else one a micro-batch."""
        micro_batches = self.rows.micro_batches(examples)
        if self._update.adds_up or len(micro_batches) == 1:
            return [examples]
        if not self._told_of_steps:
            self._told_of_steps = True
            self._on_event(
                Notice(
                    f"A step has at most {self.rows.max_rows} rows, fewer than batch_tokens asks for: "
                    "all weights are trained, and their gradients are not kept from one micro-batch to the next."
                )
            )
        return micro_batches

    def prepare(self, steps: list[list[Example]], *held_out: list[Example]) -> None:
        """Is told which steps are to come, and what losses are to be asked for, so that few graphs serve them all."""
        self._steps, self._held_out = steps, held_out
        if self._graphs is not None:
            needed, evaluated = (
                map(bucket_for, chain.from_iterable(map(self.rows.micro_batches, groups)))
                for groups in (steps, held_out)
            )
            self._graphs.prepare(needed, evaluated)

    def prove(self) -> bool:
        """Tries out the fullest micro-batch to come, and an update; weights, moments, gradients and random states stay
        what they are, bit for bit. To be called before the first step.

        Returns:
            False if it did not fit, and steps are to be cut anew.

        Raises:
            RuntimeError, MemoryError: a single example does not fit.
        """
        if not self._limit.is_set:
            return True
        fullest = self._fullest()
        size = self._size(fullest)
        if size <= self._proven:
            return True
        self._limit.begin()
        try:
            self._attempt(self._rehearse, fullest)
        except _CutSmaller:
            return False
        self._proven = size
        self._on_event(MemoryProbed(size[0], self._limit.peak, self._limit.allocator_peak, self._limit.predicted))
        return True

    def losses(self, examples: list[Example]) -> Iterator[tuple[list[Example], Tensor, Tensor]]:
        """Micro-batches of `examples`, with their losses.

        Yields:
            The examples of one; the losses of its loss rows, in nats: fp32 [C]; the example of each: int64 [C]; both on
            the host.
        """
        most = EVALUATED_ON_A_CPU if self._device.type == "cpu" else None
        waiting, done = self.rows.micro_batches(examples, most), 0
        while waiting:
            try:
                losses, sequences = self._attempt(self._losses, waiting[0])
            except _CutSmaller:
                waiting = self.rows.micro_batches(chain.from_iterable(waiting), most)
            else:
                done += len(waiting[0])
                self._on_event(ExamplesEvaluated(done, len(examples)))
                yield waiting.pop(0), losses, sequences

    def step(self, examples: list[Example], learning_rate: float) -> Outcome:
        """One optimizer update on the mean loss of all loss tokens of `examples`, in as many micro-batches as it takes.

        If memory runs out, it is what it would have been with smaller micro-batches from its beginning.
        """
        self._look_around()
        self._update.begin(learning_rate)
        while not self._accumulated(examples):
            # A backward pass that failed may have added some of its gradients.
            self._update.zero_gradients()
        return Outcome(self._loss.clone(), self._update.finish())

    def start_again(self, state: list[Tensor]) -> None:
        """Forgets all that was learnt since `state`, a snapshot of the adaptation before its first step."""
        restore(self.adaptation, state)
        self._update.reset()

    def __enter__(self) -> "Learner":
        self._handled = sys.exception()
        return self

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        self._graphs = None
        self._update.release()
        if isinstance(error, KeyboardInterrupt | BudgetExceeded) or ran_out_of_memory(error):
            # To get its own weights back a model takes memory.
            let_go(error, self._handled)
            give_memory_back(self._device)
        self.rows.__exit__(kind, error, trace)
        self._leftovers.clear()
        give_memory_back(self._device)

    def _no_graphs_yet(self) -> MicroBatchGraphs:
        return MicroBatchGraphs(
            Graphs(self._device, self._on_event), self.rows.hoisted, {GRADIENTS: self._update}, self._loss
        )

    def _accumulated(self, examples: list[Example]) -> bool:
        """Adds up the gradients and the loss of a step; False if memory ran out, which leaves a part of them."""
        loss_tokens = sum(example.num_loss_tokens for example in examples)
        self._loss.zero_()
        try:
            for micro_batch in self.rows.micro_batches(examples) if self._update.adds_up else [examples]:
                self._attempt(self._accumulate, micro_batch, loss_tokens)
        except _CutSmaller:
            return False
        return True

    def _attempt(self, run: Callable, micro_batch: list[Example], *arguments):
        """What `run` gives for a micro-batch.

        Raises:
            _CutSmaller: memory ran out.
            RuntimeError, MemoryError: it ran out where there is nothing to cut, or something else failed.
        """
        try:
            return run(micro_batch, *arguments)
        except (RuntimeError, MemoryError) as error:
            # One example without graphs is the least that there is, and an update is not taken back.
            is_least = len(micro_batch) == 1 and self._graphs is None
            is_update = run == self._accumulate and not self._update.adds_up
            if not ran_out_of_memory(error) or is_least or is_update:
                raise
        # Not while the error is handled: its traceback holds what had been computed.
        self._make_room(micro_batch)
        raise _CutSmaller

    def _make_room(self, micro_batch: list[Example]) -> None:
        """Sees to it that what did not fit into memory is cut smaller, or is not captured any more."""
        if len(micro_batch) > 1:
            before = self.rows.max_rows
            self._cut_smaller(micro_batch)
            self._on_event(MemoryRanOut(before, self.rows.max_rows))
        else:
            self._let_go()
            self._on_event(Notice("Training runs without CUDA graphs, which is slower: memory ran out with them."))

    def _cut_smaller(self, micro_batch: list[Example]) -> None:
        """Has micro-batches half as large as this one at most, with graphs of their own."""
        had_graphs = self._graphs is not None
        # All of them: they hold memory, and those for larger micro-batches will not be asked for.
        self._let_go()
        self.rows.cut_smaller(micro_batch)
        if had_graphs:
            self._graphs = self._no_graphs_yet()
            self.prepare(self._steps, *self._held_out)

    def _let_go(self) -> None:
        """Gives back what graphs and failed backward passes hold."""
        synchronize(self._device)  # graphs may be running
        self._graphs = None
        self._leftovers.clear()
        give_memory_back(self._device)

    def _look_around(self) -> None:
        """Cuts micro-batches smaller if memory has become short, for example since other programs took it."""
        missing = self._limit.missing()
        if not missing:
            return
        before, fullest = self.rows.max_rows, self._fullest()
        if len(fullest) > 1 and self._update.adds_up:
            self._cut_smaller(fullest)
            self._limit.cut()
        else:
            self._limit.bear(missing)
        self._on_event(MemorySqueezed(missing, before, self.rows.max_rows))

    def _fullest(self) -> list[Example]:
        """The largest micro-batch of the steps to come."""
        return max(chain.from_iterable(map(self.rows.micro_batches, self._steps)), key=self._size, default=[])

    def _size(self, micro_batch: list[Example]) -> tuple[int, int]:
        """Rows and loss rows that a micro-batch takes memory for."""
        if self._graphs is not None and micro_batch:
            bucket = self._graphs.bucket(bucket_for(micro_batch))
            return bucket.tokens, bucket.loss_rows
        return self.rows.num_rows(micro_batch), sum(example.num_loss_tokens for example in micro_batch)

    def _rehearse(self, micro_batch: list[Example]) -> None:
        """Runs a micro-batch and an update that change nothing.

        Raises:
            RuntimeError, MemoryError: it does not fit.
        """
        try:
            with self._update.rehearsing():
                self._accumulate(micro_batch, loss_tokens=1, rehearsing=True)
            self._limit.settle()
        except BudgetExceeded as error:
            raise MemoryError(str(error)) from None
        finally:
            self._loss.zero_()

    @torch.no_grad()
    def _losses(self, micro_batch: list[Example]) -> tuple[Tensor, Tensor]:
        if self._graphs is not None:
            tokens = self.rows.tokens(micro_batch)
            losses = self._captured(lambda: self._graphs.losses(tokens))
            if losses is not None:
                return losses, tokens.sequences
        losses, sequences = self.rows(micro_batch)
        self._limit.check()
        return losses.cpu(), sequences

    def _accumulate(self, micro_batch: list[Example], loss_tokens: int, *, rehearsing: bool = False) -> None:
        if self._graphs is not None:
            tokens, graphs = self.rows.tokens(micro_batch), self._graphs
            self._captured(lambda: graphs.rehearse(tokens) if rehearsing else graphs.accumulate(tokens, loss_tokens))
        # Without graphs, or as of now.
        if self._graphs is None:
            losses, _ = self.rows(micro_batch)
            self._limit.check()
            loss = losses.sum() / loss_tokens
            loss.backward()
            self._loss += loss.detach()

    def _captured(self, function: Callable):
        """What `function` gives; if it cannot be captured, None, a notice, and no graphs any more."""
        try:
            return function()
        except CannotCapture as error:
            self._graphs = None
            self._on_event(Notice(f"Training runs without CUDA graphs, which is slower: {error}"))
            return None


def _update_for(parameters: list[Tensor], recipe: Recipe, options: MemoryOptions) -> Update | UpdateInBackward:
    """Weights that all are trained, in bf16, are updated within the backward pass; all others after it."""
    in_bf16 = any(parameter.dtype == torch.bfloat16 for parameter in parameters)
    if recipe.method == "full" and in_bf16:
        return UpdateInBackward(parameters, recipe)
    return Update(parameters, recipe, options)
