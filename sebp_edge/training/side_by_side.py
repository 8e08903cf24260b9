"""Runs the steps of several trainings in one pass of the base model: folds, or learning rates.

Each training has an adapter of its own, with its own moments, norm and rate, so that its steps are those that it would
have alone, up to rounding. The micro-batches of a step lie in one batch, whose rows the adapters own, and the base
model's weights are read once for all. The trainings are in lock-step; one that is over has no rows any more.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain

import torch
from torch import Tensor, nn

from sebp_edge.errors import SparsityError
from sebp_edge.events import ExamplesEvaluated
from sebp_edge.machine.devices import clear_frames, ran_out_of_memory, release_memory
from sebp_edge.memory.options import MemoryOptions
from sebp_edge.memory.side_by_side import num_rows, sizes_beside, steps_together
from sebp_edge.recipe import Recipe
from sebp_edge.sparse.rows.active_tokens import ActiveTokens
from sebp_edge.sparse.rows.buckets import Bucket
from sebp_edge.sparse.rows.side_by_side import side_by_side, sums_by_owner
from sebp_edge.texts.examples import Outline
from sebp_edge.texts.schedule import Group, Schedule
from sebp_edge.training.graphs import GRADIENTS, MicroBatchGraphs
from sebp_edge.training.learner import Outcome
from sebp_edge.training.loop import Step, Trainer, run_in_lockstep
from sebp_edge.training.recovery import LearnerState, RecoveringLearner
from sebp_edge.training.update import Update


class SideBySide:
    """Lays adapters side by side in a learner's model; a context manager, after which the learner has its own again.

    Args:
        learner: its adaptation is LoRA on a hoisted model; the first adapter is the adaptation's.
        number: how many adapters.

    Attributes:
        places: the adapters, each as the learner of its training.

    Raises:
        SparsityError: the model cannot compute several adapters.
    """

    def __init__(self, learner: RecoveringLearner, recipe: Recipe, options: MemoryOptions, number: int):
        self.learner, own = learner, learner.parameters
        if learner.row_losses.hoisted is None:
            raise SparsityError("The model runs on padded batches.")
        self._hoisted = learner.row_losses.hoisted
        self._adapters = [own, *([nn.Parameter(each.detach().clone()) for each in own] for _ in range(number - 1))]
        self._losses = torch.zeros(number, device=learner.device)
        updates = [learner.update, *(Update(each, recipe, options) for each in self._adapters[1:])]
        pairs = zip(self._adapters, updates, strict=True)
        self.places = [Place(learner, (place, number), *pair) for place, pair in enumerate(pairs)]

    def __enter__(self) -> "SideBySide":
        learner, own = self.learner, self._adapters[0]
        self._had_graphs, self._handled = learner.graphs is not None, sys.exception()
        learner.release_graphs()
        self._overwrite(True)
        try:
            self._hoisted.lay_side_by_side([dict(zip(own, each, strict=True)) for each in self._adapters[1:]])
            if self._had_graphs:
                for place in self.places[1:]:
                    place.update.capture(learner.new_pool())
                updates = {GRADIENTS: self}
                learner.graphs = MicroBatchGraphs(
                    learner.new_pool(), self._hoisted, updates, self._losses, learner.words()
                )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, kind=None, error: BaseException | None = None, trace=None) -> None:
        learner = self.learner
        if ran_out_of_memory(error):
            clear_frames(error, self._handled)
        learner.release_graphs()
        self._overwrite(False)
        for place in self.places[1:]:
            place.update.release()
        self._hoisted.lay_side_by_side(())
        if self._had_graphs:
            learner.begin_graphs()
        learner.update.zero_gradients()
        release_memory(learner.device)

    def _overwrite(self, value: bool) -> None:
        """Whether a pass overwrites all gradients, since it is a whole step."""
        for place in self.places:
            # The update of the learner is captured already, and zeroes its gradients.
            place.update.is_overwritten = value
        for parameter in chain.from_iterable(self._adapters):
            parameter.overwrite_main_grad = value

    def prepare(self, schedules: Sequence[Schedule], done: Sequence[int]) -> None:
        """Plans the graphs of schedules that are laid out, and runs the largest pass dry; resets all updates.

        Args:
            done: how many steps of each are done.

        Raises:
            RuntimeError, MemoryError: it does not fit into memory.
        """
        graphs = self.learner.graphs
        together = list(steps_together(schedules, done))
        if graphs is not None:
            self._plan_graphs(schedules, together)
        self.learner.try_out(lambda: self._run_dry(max(together, key=num_rows)))

    def _run_dry(self, steps: list[Group]) -> None:
        with ExitStack() as stack:
            for place in self.places:
                stack.enter_context(place.update.dry_run())
            tokens = side_by_side(dict(enumerate(map(self._pack, steps))), len(self.places))
            if self.learner.graphs is not None:
                self.learner.graphs.capture(tokens)
            else:
                self._accumulate(tokens)

    def _plan_graphs(self, schedules: Sequence[Schedule], together: list[list[Group]]) -> None:
        graphs, sizes_of = self.learner.graphs, self.learner.row_losses.sizes
        needed = []
        for steps in together:
            found = [sizes_of(step.micro_batches[0]) for step in steps]
            needed.append((Bucket.holding(*sizes_beside([sizes for sizes, _ in found])), any(p for _, p in found)))
        validation = [
            (Bucket.holding(*sizes), has_prefixes)
            for schedule in schedules
            for sizes, has_prefixes in map(sizes_of, schedule.num_validations * schedule.validation.micro_batches)
        ]
        soft_targets = {max(each.num_soft_targets for step in steps for each in step.examples) for steps in together}
        graphs.prepare(needed, validation, nums_soft_targets=soft_targets)

    def train(self, trainings: Sequence[tuple[Trainer, Schedule]]) -> None:
        """Runs the steps of trainings, that of each place with its schedule, until all are over; see `run`."""

        def run(steps: dict[int, Step]) -> dict[int, Outcome]:
            for place in steps:
                trainings[place][0].hold()
            return self.run(steps)

        run_in_lockstep({place: trainer.steps(schedule) for place, (trainer, schedule) in enumerate(trainings)}, run)

    def run(self, steps: Mapping[int, Step]) -> dict[int, Outcome]:
        """Runs the next step of some trainings in one pass.

        Args:
            steps: by the training's place, the step, which is one micro-batch, and its learning rate.

        Raises:
            RuntimeError, MemoryError: memory ran out; no training has made its step.
            CannotCapture: the pass cannot be captured; likewise.
        """
        learner = self.learner
        learner.refuse_shortfall()
        parts = {place: self._pack(step) for place, (step, _) in steps.items()}
        self._losses.zero_()
        try:
            self._accumulate(side_by_side(parts, len(self.places)))
            learner.between_micro_batches()
        except BaseException:
            for place in self.places:
                place.update.zero_gradients()
            raise
        outcomes = {}
        for place, (_, learning_rate) in steps.items():
            update = self.places[place].update
            update.begin(learning_rate)
            outcomes[place] = Outcome(self._losses[place].clone(), update.finish())
        return outcomes

    def take_gradients(self, loss: Tensor, *, is_warming_up: bool = False) -> None:
        """Puts the gradients of `loss` into the `grad` of all adapters."""
        parameters = list(chain.from_iterable(self._adapters))
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        found = [pair for pair in zip(parameters, gradients, strict=True) if pair[1] is not None]
        if found:
            torch._foreach_copy_([parameter.grad for parameter, _ in found], [gradient for _, gradient in found])

    def _pack(self, step: Group) -> ActiveTokens:
        (micro_batch,) = step.micro_batches
        return self.learner.row_losses.pack(micro_batch.examples).weighted(1 / step.num_loss_tokens)

    def _accumulate(self, tokens: ActiveTokens) -> None:
        if self.learner.graphs is not None:
            self.learner.graphs.accumulate(tokens, 1)
            return
        tokens = tokens.to(self.learner.device)
        losses = self._hoisted.row_losses(tokens) * tokens.weights
        self.take_gradients(losses.sum())
        self._losses += sums_by_owner(losses.detach(), tokens)


class Place:
    """One of the adapters side by side, which its trainer takes for a learner."""

    def __init__(self, learner: RecoveringLearner, owner: tuple[int, int], parameters: list[Tensor], update: Update):
        self.parameters, self.update, self._learner, self._owner = parameters, update, learner, owner
        self.adaptation, self.row_losses, self.words = learner.adaptation, learner.row_losses, learner.words
        self.hook, self.steps_ahead = learner.hook, learner.steps_ahead

    @property
    def tensors(self) -> list[Tensor]:
        """See `Learner.tensors`."""
        return [tensor.detach() for tensor in self.update.state]

    @property
    def state(self) -> LearnerState:
        """What a learner that is alone goes on from; see `RecoveringLearner.state`."""
        return self._learner.state._replace(tensors=self.tensors)

    def go_on_from(self, state: LearnerState | None, start: list[Tensor]) -> None:
        """Goes on with a training, or begins it in `start` if there is no state."""
        if state is None:
            self.restore(start)
            return
        for own, saved in zip(self.tensors, state.tensors, strict=True):
            own.copy_(saved)

    def snapshot(self) -> list[Tensor]:
        """Copies the adapter to the CPU."""
        return [parameter.detach().to("cpu", copy=True) for parameter in self.parameters]

    def restore(self, state: list[Tensor]) -> None:
        """Restores a snapshot, bit for bit."""
        for parameter, value in zip(self.parameters, state, strict=True):
            parameter.data.copy_(value)

    def losses(self, group: Group, *, reads_words: bool = False) -> Iterator[tuple[list[Outline], Tensor, Tensor]]:
        """Evaluates a group; see `RecoveringLearner.losses`. If memory runs out, raises that error."""
        done = 0
        for micro_batch in group.micro_batches:
            self.row_losses.owner = self._owner
            try:
                losses, sequences = self._learner.losses_of(micro_batch, reads_words=reads_words)
            finally:
                self.row_losses.owner = None
            done += len(micro_batch.examples)
            self._learner.on_event(ExamplesEvaluated(done, len(group.examples)))
            yield micro_batch.examples, losses, sequences


def can_lie_side_by_side(learner: RecoveringLearner) -> bool:
    """Whether a learner's steps can be those of several trainings, which pays only if they are captured on a GPU."""
    hoisted = learner.row_losses.hoisted
    return learner.graphs is not None and not hoisted.recomputes
