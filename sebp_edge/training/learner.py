"""A model that learns from examples: losses, gradients and updates, each in the fastest way that this machine has.

On a GPU with hoisted rows, micro-batches and updates are replays of captured graphs (level 3); what cannot be captured
runs as it is, after a notice. Everywhere else all of it does. The numbers are the same to rounding.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from sebp_edge.events import Notice, Sink
from sebp_edge.models.adaptation import Adaptation, restore, trainable
from sebp_edge.recipe import Recipe
from sebp_edge.texts.batches import Collator, bucket_for
from sebp_edge.texts.examples import Example
from sebp_edge.training.graph import CannotCapture, Graphs, MicroBatchGraphs
from sebp_edge.training.losses import MAX_ROWS, RowLosses
from sebp_edge.training.update import Update


class Outcome(NamedTuple):
    """What one step was; on the device, so that reading it waits for the step.

    Attributes:
        loss: nats per token.
        grad_norm: of the gradients of all parameters, before clipping.
    """

    loss: Tensor
    grad_norm: Tensor


class Learner:
    """Trains an adaptation; a context manager that leaves the model's own code as it was.

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
        max_rows: int = MAX_ROWS,
    ):
        self.adaptation, self._on_event = adaptation, on_event
        parameters = trainable(adaptation)
        device = parameters[0].device
        self.rows = RowLosses(adaptation.model, examples, collator, device, on_event, max_rows)
        self.steps_ahead = 1 if device.type == "cuda" else 0
        self._graphs: MicroBatchGraphs | None = None
        try:
            self._loss = torch.zeros((), device=device)
            self._update = Update(parameters, recipe)
            if device.type == "cuda" and self.rows.hoisted is not None:
                graphs = Graphs(device, on_event)
                self._graphs = MicroBatchGraphs(graphs, self.rows.hoisted, parameters, self._loss)
                self._captured(lambda: self._update.capture(graphs))
        except BaseException:
            self.rows.__exit__()
            raise

    def prepare(self, micro_batches: Iterable[list[Example]]) -> None:
        """Is told which micro-batches are to come, so that few graphs serve them all."""
        if self._graphs is not None:
            self._graphs.prepare(map(bucket_for, micro_batches))

    @torch.no_grad()
    def losses(self, micro_batch: list[Example]) -> tuple[Tensor, Tensor]:
        """The losses of loss rows, in nats: fp32 [C], and the example of each: int64 [C]; on the host."""
        if self._graphs is not None:
            tokens = self.rows.tokens(micro_batch)
            losses = self._captured(lambda: self._graphs.losses(tokens))
            if losses is not None:
                return losses, tokens.sequences
        losses, sequences = self.rows(micro_batch)
        return losses.cpu(), sequences

    def step(self, micro_batches: list[list[Example]], learning_rate: float) -> Outcome:
        """One optimizer update on the mean loss of all loss tokens, over however many micro-batches they are spread."""
        loss_tokens = sum(example.num_loss_tokens for micro_batch in micro_batches for example in micro_batch)
        self._loss.zero_()
        for micro_batch in micro_batches:
            self._accumulate(micro_batch, loss_tokens)
        return Outcome(self._loss.clone(), self._update(learning_rate))

    def start_again(self, state: list[Tensor]) -> None:
        """Forgets all that was learnt since `state`, a snapshot of the adaptation before its first step."""
        restore(self.adaptation, state)
        self._update.reset()

    def __enter__(self) -> "Learner":
        return self

    def __exit__(self, *exception) -> None:
        self._graphs = None
        self._update.release()
        self.rows.__exit__(*exception)

    def _accumulate(self, micro_batch: list[Example], loss_tokens: int) -> None:
        if self._graphs is not None:
            tokens = self.rows.tokens(micro_batch)
            self._captured(lambda: self._graphs.accumulate(tokens, loss_tokens))
        # Without graphs, or as of now.
        if self._graphs is None:
            losses, _ = self.rows(micro_batch)
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
