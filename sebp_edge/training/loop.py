"""From examples to the best state: schedule, accumulation, evaluation, early stop.

One step is one optimizer update; its loss is the sum over all its loss tokens divided by their number, however many
micro-batches they are spread over.
"""

import math
import time
from dataclasses import dataclass, field
from itertools import chain

import torch

from sebp_edge.errors import NonFiniteLoss
from sebp_edge.events import Evaluated, Sink, StepDone
from sebp_edge.models.adaptation import Adaptation, restore, snapshot, trainable
from sebp_edge.recipe import Recipe
from sebp_edge.texts.batches import shuffled_steps
from sebp_edge.texts.examples import Example
from sebp_edge.training.evaluation import evaluate
from sebp_edge.training.losses import RowLosses


@dataclass
class Progress:
    """How far a training came; filled in as it runs.

    Attributes:
        steps, total_steps: updates done, and planned.
        tokens: real tokens trained on, repeats included.
        seconds: spent on steps, evaluations excluded.
        best_epoch: the epoch whose state is the best; 0 is the state before training.
        best_loss: that state's held-out loss, nats per token; NaN where nothing was held out to select by.
    """

    steps: int = 0
    total_steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_epoch: int = 0
    best_loss: float = math.inf
    best_state: list[torch.Tensor] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Trainer:
    """Trains one adaptation, and leaves it in its best state.

    Attributes:
        adaptation: whose parameters are trained.
        rows: gives the losses.
        recipe, seed: how.
        on_event: takes events; `phase` names this training in them.
        progress: how far it came, also when it was stopped.
    """

    adaptation: Adaptation
    rows: RowLosses
    recipe: Recipe
    seed: int
    on_event: Sink
    phase: str
    progress: Progress = field(default_factory=Progress)

    def train(self, examples: list[Example], select: list[Example], *, last_epoch: int | None = None) -> Progress:
        """Trains on `examples`; the best state is chosen on `select`, without it the one after `last_epoch` is taken.

        However it is stopped, the adaptation is left in the best state so far; before the first evaluation, as it is.

        Raises:
            NonFiniteLoss: the loss or its gradient became NaN or infinite.
        """
        progress, recipe = self.progress, self.recipe
        shuffled = shuffled_steps(examples, recipe.batch_tokens, recipe.epochs, self.seed)
        # All micro-batches are known before the first one runs.
        epochs = [[self.rows.micro_batches(step) for step in steps] for steps in shuffled]
        optimizer, scheduler = self._optimizer(sum(map(len, epochs)))
        progress.total_steps = sum(map(len, epochs[:last_epoch]))
        try:
            self._evaluate(select, 0)
            for epoch, steps in enumerate(epochs[:last_epoch], start=1):
                for step in steps:
                    self._step(step, epoch, optimizer, scheduler)
                self._evaluate(select, epoch)
                if epoch - progress.best_epoch > recipe.patience:
                    break
        except BaseException as stop:
            # An interrupted state is worth something before the first evaluation, a diverged one never.
            if progress.best_epoch > 0 or isinstance(stop, NonFiniteLoss):
                restore(self.adaptation, progress.best_state)
            raise
        restore(self.adaptation, progress.best_state)
        return progress

    def _optimizer(self, total_steps: int):
        recipe = self.recipe
        optimizer = torch.optim.AdamW(
            trainable(self.adaptation), lr=recipe.learning_rate, weight_decay=recipe.weight_decay
        )
        warmup = max(1, round(recipe.warmup_ratio * total_steps))

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total_steps - warmup)))

        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def _step(self, micro_batches: list[list[Example]], epoch: int, optimizer, scheduler) -> None:
        begin, progress = time.perf_counter(), self.progress
        examples = list(chain.from_iterable(micro_batches))
        loss_tokens = sum(example.num_loss_tokens for example in examples)
        loss = torch.zeros((), device=self.rows.device)
        for micro_batch in micro_batches:
            losses, _ = self.rows(micro_batch)
            part = losses.sum() / loss_tokens
            part.backward()
            loss += part.detach()
        grad_norm = torch.nn.utils.clip_grad_norm_(trainable(self.adaptation), self.recipe.max_grad_norm)
        # The first look at the step's numbers: a GPU is not waited for before.
        loss, grad_norm = float(loss), float(grad_norm)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            optimizer.zero_grad()
            raise NonFiniteLoss(
                f"At step {progress.steps + 1} the loss is {loss} and its gradient's norm {grad_norm}; "
                "lower the learning rate."
            )
        optimizer.step()
        learning_rate = scheduler.get_last_lr()[0]
        scheduler.step()
        optimizer.zero_grad()
        progress.steps += 1
        progress.tokens += sum(len(example.input_ids) for example in examples)
        progress.seconds += time.perf_counter() - begin
        self.on_event(
            StepDone(
                phase=self.phase,
                step=progress.steps,
                steps=progress.total_steps,
                epoch=epoch,
                loss=loss,
                learning_rate=learning_rate,
                grad_norm=grad_norm,
                tokens=progress.tokens,
                tokens_per_second=progress.tokens / progress.seconds,
                seconds_left=progress.seconds / progress.steps * (progress.total_steps - progress.steps),
            )
        )

    def _evaluate(self, select: list[Example], epoch: int) -> None:
        """Keeps this epoch's state if it is the best so far; without examples to select on, the latest is."""
        progress = self.progress
        loss = evaluate(self.rows, select).mean if select else math.nan
        best = not select or loss < progress.best_loss
        if best:
            progress.best_epoch, progress.best_loss = epoch, loss
            progress.best_state = snapshot(self.adaptation)
        if select:
            self.on_event(Evaluated(self.phase, "select", epoch, loss, best))
