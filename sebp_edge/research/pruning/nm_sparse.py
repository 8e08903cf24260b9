"""N:M training in your own loop: the model computes with pruned weights, the optimizer updates dense ones.

    with nm_sparse(model, "2:4", num_steps=1000) as sparse:
        for batch in batches:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            sparse.step()

Afterwards the model is pruned, and nothing of the handle is left. A layer's parameter holds the pruned weight, which
the model computes with, always in the same memory: so it works with the drop-in, hoisted models and captured graphs.
The optimizer updates the dense weight, of the same dtype, with its gradient.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from sebp_edge.errors import SparsityError
from sebp_edge.ops import prune_, shrink_pruned_
from sebp_edge.research.pruning.layers_to_prune import layers_to_prune
from sebp_edge.research.pruning.pruning_phases import Phases, PruningMethod, Stage


def nm_sparse(
    model: nn.Module,
    pattern: str,
    method: PruningMethod = "mdgf-exponential",
    *,
    num_steps: int,
    dense: float = 0.0,
    decay: float = 0.5,
    layers: Sequence[str] | None = None,
) -> "NmSparse":
    """Prunes a model's linear layers to N:M while it is trained; biases, embeddings and the head stay dense.

    Args:
        pattern: N:M, such as "2:4": of each M neighbouring inputs of an output, N weights are left.
        method: see `sebp_edge.research.pruning.pruning_phases`.
        num_steps: the number of optimizer steps of the training.
        dense, decay: the shares of these steps in the dense and in the decay phase; the sparse phase has the rest.
            "sr-ste" has no decay phase.
        layers: the ends of the layers' names, such as "gate_proj" or "output.dense"; None for all linear layers but the
            head.

    Returns:
        A handle: a context manager, or call `remove()` when done.

    Raises:
        OptionError: the pattern or the method is unknown, or the phases do not fit into the steps.
        SparsityError: the model has no such layers, its weights are in 4 bits or sharded, it has an adapter, or the
            pattern does not divide a layer's inputs.
    """
    phases = Phases(pattern=pattern, num_steps=num_steps, method=method, dense=dense, decay=decay)
    return NmSparse(model, phases, layers)


class NmSparse:
    """Handle of one model that is pruned while it is trained by an optimizer of torch."""

    def __init__(self, model: nn.Module, phases: Phases, layers: Sequence[str] | None):
        found = layers_to_prune(model, phases.largest_group, layers).values()
        # The dense weight of each pruned parameter. One that several layers share is pruned once.
        self._dense = {layer.weight: layer.weight.detach().clone() for layer in found}
        self._phases, self._num_done = phases, 0
        self._prune(phases.stage(0))
        # The pruned tensors of the parameters that an optimizer has updated since the last step, and its rates.
        self._pruned: dict[nn.Parameter, torch.Tensor] = {}
        self._rates: dict[nn.Parameter, float | torch.Tensor] = {}
        self._hook = register_optimizer_step_pre_hook(self._before_update)

    @property
    def num_done(self) -> int:
        """The number of steps done."""
        return self._num_done

    @property
    def stage(self) -> Stage:
        """What the model computes with now."""
        return self._stage

    def step(self) -> None:
        """Prunes the updated weights for the next step; call it after `optimizer.step()`.

        Does nothing if no optimizer has updated the weights, as after a step that a GradScaler skipped.

        Raises:
            SparsityError: something other than an optimizer of torch has changed the pruned weights.
        """
        if not self._pruned:
            self._refuse_other_changes()
            return
        self._restore_pruned()
        shrinkage = self._phases.shrinkage
        if shrinkage and not self._stage.is_dense:
            for seed, (parameter, dense) in enumerate(self._dense.items()):
                share = float(self._rates.get(parameter, 0.0)) * shrinkage
                shrink_pruned_(dense, parameter.detach(), share, seed=seed, step=self._num_done)
        self._num_done += 1
        self._prune(self._phases.stage(self._num_done))

    def remove(self) -> None:
        """Leaves the model pruned to the pattern, whatever phase the training is in."""
        self._hook.remove()
        self._restore_pruned()
        self._prune(self._phases.final)

    def __enter__(self) -> "NmSparse":
        return self

    def __exit__(self, *exception) -> None:
        self.remove()

    def _before_update(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        """Gives the parameters that the optimizer updates their dense weights."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                dense = self._dense.get(parameter)
                if dense is None:
                    continue
                if parameter in self._pruned:
                    raise SparsityError(
                        "An optimizer steps again on weights that were not pruned after its last step; call step() of "
                        "the handle that nm_sparse returned after each optimizer.step()."
                    )
                self._refuse_other_changes(parameter)
                self._pruned[parameter], parameter.data = parameter.data, dense
                self._rates[parameter] = group["lr"]

    def _restore_pruned(self) -> None:
        for parameter, pruned in self._pruned.items():
            parameter.data = pruned
        self._pruned.clear()

    @torch.no_grad()
    def _prune(self, stage: Stage) -> None:
        """Writes the dense weights, pruned as `stage` says, into the parameters."""
        for parameter, dense in self._dense.items():
            if stage.is_dense:
                parameter.copy_(dense)
            else:
                prune_(parameter.detach(), dense, stage.n, stage.m, stage.decay)
        self._stage = stage
        self._versions = {parameter: parameter._version for parameter in self._dense}

    def _refuse_other_changes(self, *parameters: nn.Parameter) -> None:
        if any(parameter._version != self._versions[parameter] for parameter in parameters or self._versions):
            raise SparsityError(
                "The pruned weights have changed, but not in the step of an optimizer of torch; the next step would "
                "overwrite the change. Change weights before nm_sparse is called, or train with torch.optim."
            )
