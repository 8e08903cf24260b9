"""Prunes linear layers during a training: which stage each step has, and the weights at that stage."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from sebp_edge.models.training_hook import TrainingHook
from sebp_edge.recipe import PruningRecipe
from sebp_edge.research.pruning.layers import layers_to_prune
from sebp_edge.research.pruning.phases import Phases, Stage
from sebp_edge.research.pruning.pruned_weights import PrunedWeights


class Pruning(TrainingHook):
    """The pruning of one model; its layers are dense until `begin`.

    Attributes:
        weights: the pruned weights.
        num_done: the number of steps done since `begin`.

    Raises:
        SparsityError: see `layers_to_prune`.
    """

    def __init__(self, model: nn.Module, sparsity: PruningRecipe):
        self.weights = PrunedWeights(layers_to_prune(model, sparsity))
        self._sparsity, self._phases, self.num_done = sparsity, None, 0

    @property
    def stage(self) -> Stage:
        """What the model computes with now."""
        return self.weights.stage

    @property
    def is_settled(self) -> bool:
        """Whether the sparse phase has begun."""
        return self._phases is not None and self.num_done >= self._phases.first_sparse_step

    def updated(self, parameters: list[nn.Parameter]) -> list[Tensor]:
        """Returns the dense weights of pruned parameters, and the other parameters themselves."""
        return [self.weights.dense(parameter) for parameter in parameters]

    def begin(self, num_steps: int) -> None:
        """Begins a training of `num_steps` steps with the model's current weights."""
        self._phases, self.num_done = Phases(self._sparsity, num_steps), 0
        self.weights.take_dense()
        self.weights.prune(self._phases.stage(0))

    def step(self, learning_rates: Mapping[nn.Parameter, float | Tensor]) -> None:
        """Prunes the updated dense weights for the next step."""
        shrinkage = self._phases.shrinkage
        if shrinkage:
            self.weights.shrink({one: float(rate) * shrinkage for one, rate in learning_rates.items()}, self.num_done)
        self.num_done += 1
        self.weights.prune(self._phases.stage(self.num_done))

    def after_step(self, learning_rate: float) -> None:
        """Prunes the updated dense weights for the next step; all had the same learning rate."""
        self.step(dict.fromkeys(self.weights, learning_rate))

    def finish(self) -> None:
        """Prunes the weights to the pattern, whatever phase the training is in."""
        self.weights.prune(self._phases.final)

    @contextmanager
    def finished(self) -> Iterator[None]:
        """Context in which the model has the weights that it would have if the training ended now."""
        self.finish()
        try:
            yield
        finally:
            self.weights.prune(self._phases.stage(self.num_done))
