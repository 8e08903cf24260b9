"""A model that learns: losses, gradients and updates, each in the fastest way that this machine has.

On a GPU with hoisted rows, micro-batches and updates are replays of captured graphs (level 3); what cannot be captured
runs as it is, after a notice. Everywhere else all of it does. The numbers are the same to rounding.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from sebp_edge.events import Notice, Sink
from sebp_edge.memory.guard import MemoryGuard
from sebp_edge.memory.options import MemoryOptions
from sebp_edge.models.adaptation import Adaptation, restore, trainable
from sebp_edge.recipe import Recipe
from sebp_edge.rows.buckets import Bucket
from sebp_edge.texts.batches import Collator, pack
from sebp_edge.texts.examples import Example
from sebp_edge.texts.schedule import MicroBatch
from sebp_edge.training.graphs import GRADIENTS, CannotCapture, Graphs, MicroBatchGraphs
from sebp_edge.training.losses import RowLosses
from sebp_edge.training.update import Update
from sebp_edge.training.update_in_backward import UpdateInBackward


class Outcome(NamedTuple):
    """What one step was; on the device, so that reading it waits for the step.

    Attributes:
        loss: nats per token.
        grad_norm: of the gradients of all parameters, before clipping.
    """

    loss: Tensor
    grad_norm: Tensor


class Learner:
    """Computes with an adaptation; a context manager that leaves the model's own code as it was.

    Args:
        examples: some of those to come, to try the model on.
        options: what is held in memory at once.
        guard: is asked to check what the process holds.

    Attributes:
        adaptation: whose parameters are trained.
        rows: gives the losses where no graph does.
        graphs: of micro-batches; None where they run as they are.
        adds_up: whether a step may have several micro-batches.
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
    ):
        self.adaptation, self._on_event, self._guard = adaptation, on_event, guard
        self.parameters = trainable(adaptation)
        self.device = device = self.parameters[0].device
        self.rows = RowLosses(adaptation.model, examples, collator, device, on_event, options)
        self.graphs: MicroBatchGraphs | None = None
        try:
            self._loss = torch.zeros((), device=device)
            self._update = _update_for(self.parameters, recipe, options)
            self.adds_up = self._update.adds_up
            if device.type == "cuda" and self.rows.hoisted is not None:
                self.begin_graphs()
                # In a pool of its own: micro-batches' graphs may have to go, this one never does.
                self._captured(lambda: self._update.capture(Graphs(device, on_event)))
        except BaseException:
            self.rows.__exit__()
            raise

    def begin_graphs(self) -> None:
        """Begins to capture micro-batches, in place of what was captured before."""
        graphs = Graphs(self.device, self._on_event)
        self.graphs = MicroBatchGraphs(graphs, self.rows.hoisted, {GRADIENTS: self._update}, self._loss)

    def prepare(self, trained: Iterable[MicroBatch], evaluated: Iterable[MicroBatch]) -> None:
        """Is told the micro-batches to come, with gradients and without, so that few graphs serve them all."""
        if self.graphs is not None:
            self.graphs.prepare(*([Bucket.holding(*one.sizes) for one in group] for group in (trained, evaluated)))

    def size(self, micro_batch: MicroBatch) -> tuple[int, int]:
        """Rows and loss rows that a micro-batch takes memory for."""
        sizes = micro_batch.sizes
        if self.graphs is not None:
            sizes = self.graphs.bucket(Bucket.holding(*sizes))
        return sizes.tokens, sizes.loss_rows

    @torch.no_grad()
    def losses(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """The losses of its loss rows, in nats: fp32 [C]; the example of each: int64 [C]; both on the host."""
        if self.graphs is not None:
            tokens = pack(micro_batch.examples)
            losses = self._captured(lambda: self.graphs.losses(tokens))
            if losses is not None:
                return losses, tokens.sequences
        losses, sequences = self.rows(micro_batch.examples)
        self._guard.check()
        return losses.cpu(), sequences

    def begin_step(self, learning_rate: float) -> None:
        """Begins an update, whose micro-batches are to follow."""
        self._update.begin(learning_rate)
        self._loss.zero_()

    def accumulate(self, micro_batch: MicroBatch, loss_tokens: int, *, rehearsing: bool = False) -> None:
        """Adds the gradients of its losses over `loss_tokens`, and that loss, to the step's."""
        if self.graphs is not None:
            tokens, graphs = pack(micro_batch.examples), self.graphs
            self._captured(lambda: graphs.rehearse(tokens) if rehearsing else graphs.accumulate(tokens, loss_tokens))
        # Without graphs, or as of now.
        if self.graphs is None:
            losses, _ = self.rows(micro_batch.examples)
            self._guard.check()
            loss = losses.sum() / loss_tokens
            loss.backward()
            self._loss += loss.detach()

    def begin_again(self) -> None:
        """Forgets the gradients and the loss that were added up in a step."""
        self._update.zero_gradients()
        self._loss.zero_()

    def finish_step(self) -> Outcome:
        """Updates the parameters."""
        return Outcome(self._loss.clone(), self._update.finish())

    def try_out(self, micro_batch: MicroBatch) -> None:
        """Runs a micro-batch and an update that change nothing, bit for bit."""
        try:
            with self._update.rehearsing():
                self.accumulate(micro_batch, loss_tokens=1, rehearsing=True)
        finally:
            self._loss.zero_()

    def start_again(self, state: list[Tensor]) -> None:
        """Forgets all that was learnt since `state`, a snapshot of the adaptation before its first step."""
        restore(self.adaptation, state)
        self._update.reset()

    def release(self) -> None:
        """Gives back the memory of graphs, gradients and moments; ends the updates."""
        self.graphs = None
        self._update.release()

    def __enter__(self) -> "Learner":
        return self

    def __exit__(self, *exception) -> None:
        self.release()
        self.rows.__exit__()

    def _captured(self, function: Callable):
        """What `function` gives; if it cannot be captured, None, a notice, and no graphs any more."""
        try:
            return function()
        except CannotCapture as error:
            self.graphs = None
            self._on_event(Notice(f"Training runs without CUDA graphs, which is slower: {error}"))
            return None


def _update_for(parameters: list[Tensor], recipe: Recipe, options: MemoryOptions) -> Update | UpdateInBackward:
    """Weights that all are trained, in bf16, are updated within the backward pass; all others after it."""
    in_bf16 = any(parameter.dtype == torch.bfloat16 for parameter in parameters)
    if recipe.method == "full" and in_bf16:
        return UpdateInBackward(parameters, recipe)
    return Update(parameters, recipe, options)
