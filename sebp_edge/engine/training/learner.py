"""Computes losses, gradients and updates as fast as this machine allows.

On a GPU with hoisted rows, micro-batches and updates are replays of captured graphs (level 3); what cannot be captured
runs eagerly, after a notice. In all other cases everything runs eagerly. Results agree up to rounding.
"""

import traceback
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from sebp_edge.basics.stopping import Check
from sebp_edge.engine.memory.guard import MemoryGuard
from sebp_edge.engine.memory.memory_options import MemoryOptions
from sebp_edge.engine.models.adaptation import Adaptation, restore, snapshot, trainable
from sebp_edge.engine.sparse.rows.batches import Collator
from sebp_edge.engine.sparse.rows.schedule import MicroBatch
from sebp_edge.engine.training.graphs import GRADIENTS, LOSSES, WORDS, GraphPool, MicroBatchGraphs
from sebp_edge.engine.training.losses import RowLosses
from sebp_edge.engine.training.update import Update
from sebp_edge.engine.training.update_in_backward import UpdateInBackward
from sebp_edge.engine.training.words import WordReader
from sebp_edge.errors import CannotCapture
from sebp_edge.events import Notice, Sink
from sebp_edge.recipe import Recipe
from sebp_edge.values.example import Example


class Outcome(NamedTuple):
    """Outcome of one step, as scalars on the device; reading them waits for the step.

    Attributes:
        loss: the mean loss, in nats per token.
        grad_norm: the norm of all gradients before clipping.
    """

    loss: Tensor
    grad_norm: Tensor


class Learner:
    """Computes losses, gradients and updates of an adaptation, until `release` and `remove`.

    Args:
        examples: see `RowLosses`.
        options: what the training holds in memory at once.
        guard: checks how much memory the process uses.
        check: see `RowLosses`.
        words: returns what reads the words of test documents; None to compute their losses only.

    Attributes:
        adaptation: the adaptation whose parameters are trained.
        row_losses: computes the losses without graphs.
        graphs: the graphs of micro-batches; None if micro-batches run eagerly.
        update: updates the parameters.
        on_event: receives the events.
        can_accumulate: whether a step may have several micro-batches.
    """

    def __init__(
        self,
        adaptation: Adaptation,
        recipe: Recipe,
        examples: list[Example],
        collator: Collator,
        on_event: Sink,
        options: MemoryOptions,
        guard: MemoryGuard,
        check: Check = lambda: None,
        words: Callable[[], WordReader | None] = lambda: None,
    ):
        self.adaptation, self.on_event, self._guard, self.words = adaptation, on_event, guard, words
        self.parameters = trainable(adaptation)
        self.device = device = self.parameters[0].device
        self.row_losses = RowLosses(adaptation.model, examples, collator, device, on_event, options, check)
        self.graphs: MicroBatchGraphs | None = None
        try:
            self._loss = torch.zeros((), device=device)
            self.update = _update_for(self.parameters, recipe, options)
            self.can_accumulate = self.update.can_accumulate
            if device.type == "cuda" and self.is_hoisted:
                self.begin_graphs()
                # It has its own pool, since the graphs of micro-batches may be dropped, but this one never is.
                self._captured(lambda: self.update.capture(self.new_pool()))
        except BaseException:
            self.remove()
            raise

    @property
    def is_hoisted(self) -> bool:
        """Whether only active rows are computed."""
        return self.row_losses.hoisted is not None

    @property
    def tensors(self) -> list[Tensor]:
        """What a training goes on from after a step; graphs read these tensors, so they are changed in place."""
        return [tensor.detach() for tensor in self.update.state]

    def begin_graphs(self) -> None:
        """Starts to capture micro-batches, and replaces earlier graphs."""
        hoisted, updates = self.row_losses.hoisted, {GRADIENTS: self.update}
        self.graphs = MicroBatchGraphs(self.new_pool(), hoisted, updates, self._loss, self.words())

    def new_pool(self) -> GraphPool:
        """Returns a pool of graphs, in memory of its own."""
        return GraphPool(self.device, self.on_event)

    def plan_graphs(
        self, trained: Iterable[MicroBatch], validation: Iterable[MicroBatch], test: Iterable[MicroBatch]
    ) -> None:
        """Plans a few graphs for all micro-batches, with gradients and without."""
        if self.graphs is not None:
            trained = list(trained)
            found = ([self.row_losses.sizes(each) for each in group] for group in (trained, validation, test))
            needed, validation, test = ([(sizes.on_grid, shares) for sizes, shares in group] for group in found)
            soft_targets = {max(example.num_soft_targets for example in each.examples) for each in trained}
            self.graphs.prepare(needed, validation, test, nums_soft_targets=soft_targets)

    def size(self, micro_batch: MicroBatch) -> tuple[int, int]:
        """Returns the number of rows and of loss rows that a micro-batch takes memory for."""
        sizes, _ = self.row_losses.sizes(micro_batch)
        if self.graphs is not None:
            sizes = self.graphs.bucket(sizes.on_grid)
        return sizes.tokens, sizes.loss_rows

    @torch.no_grad()
    def losses_of(self, micro_batch: MicroBatch, *, reads_words: bool = False) -> tuple[Tensor, Tensor]:
        """Returns the losses of the loss rows in nats, fp32 [C], and the example of each, int64 [C], on the host.

        If it reads words, instead of the losses what it has read, [C, 6].
        """
        examples, words = micro_batch.examples, self.words() if reads_words else None
        if self.graphs is not None:
            tokens, graphs = self.row_losses.pack(examples), self.graphs
            found = self._captured(lambda: graphs.losses(tokens, LOSSES if words is None else WORDS))
            if found is not None:
                return found, tokens.sequences
        found, sequences = self.row_losses(examples) if words is None else self.row_losses.read(examples, words)
        self._guard.check()
        return found.cpu(), sequences

    def begin_step(self, learning_rate: float) -> None:
        """Begins a step, before its micro-batches."""
        self.update.begin(learning_rate)
        self._loss.zero_()

    def accumulate(self, micro_batch: MicroBatch, loss_tokens: int) -> None:
        """Adds a micro-batch's gradients and loss to the step's.

        Args:
            loss_tokens: the divisor of the sum of losses.
        """
        if self.graphs is not None:
            graphs = self.graphs
            self._captured(lambda: graphs.accumulate(self.row_losses.pack(micro_batch.examples), loss_tokens))
        # Graphs may have been dropped just now, if the capture failed.
        if self.graphs is not None:
            return
        losses, _ = self.row_losses(micro_batch.examples)
        self._guard.check()
        loss = losses.sum() / loss_tokens
        loss.backward()
        self._loss += loss.detach()

    def discard_step(self) -> None:
        """Discards the step's gradients and loss so far."""
        self.update.zero_gradients()
        self._loss.zero_()

    def finish_step(self) -> Outcome:
        """Updates the parameters; returns the step's outcome."""
        return Outcome(self._loss.clone(), self.update.finish())

    def dry_run(self, micro_batch: MicroBatch) -> None:
        """Runs a micro-batch, or captures its graph, and an update; neither changes anything, bit for bit."""
        try:
            with self.update.dry_run():
                if self.graphs is not None:
                    graphs = self.graphs
                    self._captured(lambda: graphs.capture(self.row_losses.pack(micro_batch.examples)))
                if self.graphs is None:
                    self.accumulate(micro_batch, loss_tokens=1)
        finally:
            self._loss.zero_()

    def start_again(self, state: list[Tensor]) -> None:
        """Restores `state`, a snapshot of the adaptation before its first step, and resets the optimizer."""
        self.restore(state)
        self.update.reset()

    def snapshot(self) -> list[Tensor]:
        """Copies the trained parameters to the CPU."""
        return snapshot(self.adaptation)

    def restore(self, state: list[Tensor]) -> None:
        """Restores a snapshot, bit for bit."""
        restore(self.adaptation, state)

    def drop_graphs(self) -> None:
        """Drops the graphs of micro-batches, which run eagerly from then on."""
        self.graphs = None

    def release(self) -> None:
        """Frees graphs, gradients and moments; ends the updates."""
        self.drop_graphs()
        self.update.release()

    def remove(self) -> None:
        """Restores the model's original code."""
        self.row_losses.__exit__()

    def _captured(self, function: Callable):
        """Returns `function()`; if it cannot be captured, drops the graphs, sends a notice and returns None.

        A function, since in a context manager the autograd graph of the failed pass stayed alive.
        """
        try:
            return function()
        except CannotCapture as error:
            self.drop_graphs()
            _clear_frames(error)
            self.on_event(Notice(f"Training runs without CUDA graphs, which is slower: {error.reason}"))
            return None


def _clear_frames(error: BaseException | None) -> None:
    """Frees what the frames of a failed pass hold: its autograd graph, which would live until Python finds a cycle."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _update_for(parameters: list[Tensor], recipe: Recipe, options: MemoryOptions) -> Update | UpdateInBackward:
    """Returns updates within the backward pass for full fine-tuning in bf16, else updates after it."""
    in_bf16 = any(parameter.dtype == torch.bfloat16 for parameter in parameters)
    if recipe.method == "full" and in_bf16:
        return UpdateInBackward(parameters, recipe)
    return Update(parameters, recipe, options)
