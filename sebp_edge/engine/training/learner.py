"""Computes losses, gradients and updates as fast as this machine allows.

On a GPU with hoisted rows, micro-batches and updates are replays of captured graphs (level 3); what cannot be captured
runs eagerly, after a notice. In all other cases everything runs eagerly. Results agree up to rounding.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from sebp_edge.basics.stopping import Check
from sebp_edge.engine.memory.guard import MemoryGuard
from sebp_edge.engine.memory.memory_options import FASTEST, MemoryOptions
from sebp_edge.engine.models.adaptation import Adaptation, restore, trainable
from sebp_edge.engine.sparse.rows.batches import Collator
from sebp_edge.engine.sparse.rows.schedule import MicroBatch
from sebp_edge.engine.training.graphs import GRADIENTS, LOSSES, WORDS, GraphPool, MicroBatchGraphs
from sebp_edge.engine.training.losses import RowLosses
from sebp_edge.engine.training.update import Update
from sebp_edge.engine.training.update_in_backward import UpdateInBackward
from sebp_edge.engine.training.words import WordReader
from sebp_edge.errors import CannotCapture
from sebp_edge.events import Notice, Sink
from sebp_edge.machine.devices import clear_frames, release_memory, synchronize
from sebp_edge.recipe import Recipe
from sebp_edge.values.example import Example


class Outcome(NamedTuple):
    """Outcome of one step, as scalars on the device; reading them waits for the step."""

    loss: Tensor  # the mean loss, in nats per token
    grad_norm: Tensor  # the norm of all gradients before clipping


class AutogradQueue:
    """Clears autograd's queue for this thread and `device`; create it before the autograd graphs that may fail.

    A failed backward pass leaves the activations of a whole micro-batch in the queue. The engine keeps a queue of ready
    nodes per thread and runs the newest first. If a node fails, the others stay queued until a later pass reaches them,
    finds that their pass is over, and drops them. On the CPU a later pass ends before it reaches them, since its own
    nodes are newer. Running a node that is older than all of them clears the queue.
    """

    def __init__(self, device: torch.device):
        self._leaf = torch.zeros(1, device=device, requires_grad=True)
        # The backward pass of a view allocates nothing; memory may have run out.
        self._oldest = self._leaf.view(())
        self._gradient = torch.ones((), device=device)

    def clear(self) -> None:
        """Drops what failed backward passes left in the queue."""
        torch.autograd.grad(self._oldest, self._leaf, self._gradient, retain_graph=True)


class Learner:
    """Computes losses, gradients and updates of an adaptation, until `release` and `remove`.

    Args:
        guard: limits the memory; by default to all free memory.
        words: returns what reads the words of test documents; None to compute their losses only.

    Attributes:
        row_losses: computes the losses without graphs.
        graphs: the graphs of micro-batches; None if micro-batches run eagerly.
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
        check: Check = lambda: None,
        words: Callable[[], WordReader | None] = lambda: None,
    ):
        self.adaptation, self.words, self._on_event = adaptation, words, on_event
        self.parameters = trainable(adaptation)
        self.device = device = self.parameters[0].device
        # It must be older than every autograd graph that may fail.
        self._autograd_queue = AutogradQueue(device)
        self.guard = guard or MemoryGuard(device)
        self.guard.begin()
        self.row_losses = RowLosses(adaptation.model, examples, collator, device, on_event, options, check)
        self.graphs: MicroBatchGraphs | None = None
        try:
            self._loss = torch.zeros((), device=device)
            self.update = _update_for(self.parameters, recipe, options)
            if device.type == "cuda" and self.row_losses.hoisted is not None:
                self.begin_graphs()
                try:
                    # It has its own pool, since the graphs of micro-batches may be dropped, but this one never is.
                    self.update.capture(self.new_pool())
                except CannotCapture as error:
                    self._run_eagerly(error)
        except BaseException:
            self.remove()
            raise

    @property
    def num_dequantised(self) -> int:
        """How many blocks also hold their 4-bit weights dequantised."""
        return 0 if self.row_losses.hoisted is None else self.row_losses.hoisted.num_dequantised

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
        return GraphPool(self.device, self._on_event)

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

        If it reads words, instead of the losses what it has read, [C, F].
        """
        examples, words = micro_batch.examples, self.words() if reads_words else None
        if self.graphs is not None:
            tokens = self.row_losses.pack(examples)
            try:
                return self.graphs.losses(tokens, LOSSES if words is None else WORDS), tokens.sequences
            except CannotCapture as error:
                self._run_eagerly(error)
        found, sequences = self.row_losses(examples) if words is None else self.row_losses.read(examples, words)
        self.guard.check()
        return found.cpu(), sequences

    def begin_step(self, learning_rate: float) -> None:
        """Begins a step, before its micro-batches."""
        self.update.begin(learning_rate)
        self._loss.zero_()

    def accumulate(self, micro_batch: MicroBatch, loss_tokens: int) -> None:
        """Adds a micro-batch's gradients and loss to the step's."""
        if self.graphs is not None:
            try:
                self.graphs.accumulate(self.row_losses.pack(micro_batch.examples), loss_tokens)
                return
            except CannotCapture as error:
                self._run_eagerly(error)
        losses, _ = self.row_losses(micro_batch.examples)
        self.guard.check()
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
                    try:
                        self.graphs.capture(self.row_losses.pack(micro_batch.examples))
                    except CannotCapture as error:
                        self._run_eagerly(error)
                # Graphs may have been dropped just now, if the capture failed.
                if self.graphs is None:
                    self.accumulate(micro_batch, loss_tokens=1)
        finally:
            self._loss.zero_()

    def start_again(self, state: list[Tensor]) -> None:
        """Restores `state`, a snapshot of the adaptation, and resets the optimizer."""
        restore(self.adaptation, state)
        self.update.reset()

    def free_dequantised(self) -> bool:
        """Frees dequantised copies of 4-bit weights, and starts new graphs without them; returns if there were any."""
        if self.num_dequantised == 0:
            return False
        self.replace_graphs()
        self.row_losses.hoisted.free_dequantised()
        release_memory(self.device)
        self._on_event(Notice("Memory is short, so from now on every pass dequantises all 4-bit weights."))
        return True

    def replace_graphs(self) -> None:
        """Frees the graphs of micro-batches, which will be smaller, and starts new ones if there were any."""
        had_graphs = self.graphs is not None
        self.release_graphs()
        if had_graphs:
            self.begin_graphs()

    def release_graphs(self) -> None:
        """Frees the memory of graphs and of failed backward passes; micro-batches run eagerly from then on."""
        synchronize(self.device)  # a graph may be running
        self.graphs = None
        self._autograd_queue.clear()
        release_memory(self.device)

    def release(self) -> None:
        """Frees graphs, gradients and moments; ends the updates."""
        self.graphs = None
        self.update.release()

    def remove(self) -> None:
        """Restores the model's original code, and drops what failed backward passes left in the queue."""
        self.row_losses.__exit__()
        self._autograd_queue.clear()

    def _run_eagerly(self, error: CannotCapture) -> None:
        """Drops the graphs, since one cannot be captured, and sends a notice."""
        self.graphs = None
        clear_frames(error)
        self._on_event(Notice(f"Training runs without CUDA graphs, which is slower: {error.reason}"))


def _update_for(parameters: list[Tensor], recipe: Recipe, options: MemoryOptions) -> Update | UpdateInBackward:
    """Returns updates within the backward pass for full fine-tuning in bf16, else updates after it."""
    in_bf16 = any(parameter.dtype == torch.bfloat16 for parameter in parameters)
    if recipe.method == "full" and in_bf16:
        return UpdateInBackward(parameters, recipe)
    return Update(parameters, recipe, options)
