"""Computes a decoder's last layer on loss rows only, forward and backward.

If every operation after the last attention works row by row, a row without a loss needs no query, no output projection
and no MLP; other rows read only its key and value. Each of the three parts becomes gather, operation, scatter. A trial
tests whether the hidden states of the other rows stay the same, and read nothing that is left out. The hidden states of
rows without a loss become meaningless, so only the loss may read the result.

Shapes: N rows, A kept rows, K columns.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from sebp_edge.engine.models.architecture import is_norm, last_block, row_mixer
from sebp_edge.engine.models.sharding import FSDPModule
from sebp_edge.engine.sparse.patches.agreement import find_mismatch, reads_other_rows, without_main_grads
from sebp_edge.engine.sparse.patches.checkpoints import is_in_checkpoint
from sebp_edge.engine.sparse.patches.patch import Patch, forward_of
from sebp_edge.engine.sparse.patches.state import has_hooks
from sebp_edge.errors import SparsityError
from sebp_edge.ops import gather_rows, scatter_rows
from sebp_edge.ops import rows as row_sets

logger = logging.getLogger(__name__)

_IS_EXACT = "the last layer's restriction is exact"
# Takes all rows of a part's input or output, and returns the tensor to use instead.
Watch = Callable[[Tensor], Tensor]


class LastLayer(Patch):
    """Handle of one decoder's restricted last layer.

    Attributes:
        running_trial: returns the context of a trial's forward and backward pass.
        verdicts: what the trial of an equal model has shown, which this one adds to; empty without one.
        query: the query projection, which must not be computed together with keys and values; None if the last block
            lacks one of the three parts and is not changed.
    """

    def __init__(
        self,
        decoder: nn.Module,
        running_trial: Callable[[], AbstractContextManager] = nullcontext,
        verdicts: dict[str, bool] | None = None,
    ):
        super().__init__()
        self.running_trial = running_trial
        self._parts = _parts_of(decoder)
        self._layers = {layer for part in self._parts for layer in part.modules()}
        self.query: nn.Module | None = self._parts[0] if self._parts else None
        self._rows: Tensor | slice | None = None
        self._watch: Watch | None = None
        self._verdicts = {} if verdicts is None else verdicts

    def attach(self) -> None:
        """Replaces the forwards of the three parts; each replacement calls the present forward."""
        for part in self._parts:
            self._replace(part, _OnRows(self, part))

    def is_exact(self, decoder: nn.Module, hidden_states: Callable[[Watch | None], Tensor]) -> bool:
        """Whether restricting the last layer changes no loss; tried once, and again after `forget_trial`.

        `hidden_states` computes those of a trial's loss rows, restricted to them.
        """
        if _IS_EXACT not in self._verdicts:
            reason = self._find_obstacle(decoder)
            if reason is None:
                unrestricted = partial(self._unrestricted, decoder, hidden_states)
                reason = find_mismatch(decoder, unrestricted, lambda: hidden_states(None))
            self._verdicts[_IS_EXACT] = reason is None
            if reason is not None:
                logger.info("The last layer computes all rows: %s", reason)
        return self._verdicts[_IS_EXACT]

    def _unrestricted(self, decoder: nn.Module, hidden_states: Callable[[Watch | None], Tensor]) -> Tensor:
        """Returns the hidden states without a restriction, or raises a SparsityError if they read other rows."""
        watched: list[Tensor] = []
        rows: Tensor | slice | None = None

        def watch(tensor: Tensor) -> Tensor:
            nonlocal rows
            # A copy, since keys and values may read all rows of the same tensor.
            watched.append((tensor if tensor.requires_grad else tensor.detach().requires_grad_()).clone())
            rows = self._rows
            return watched[-1]

        with self.running_trial(), without_main_grads(decoder), torch.enable_grad():
            hidden_CD = hidden_states(watch)
            if not watched or reads_other_rows(hidden_CD, watched, rows):
                raise SparsityError("after the last attention, rows read other rows")
        return hidden_CD.detach()

    def forget_trial(self) -> None:
        """Makes `is_exact` test again, since the model has changed."""
        self._verdicts = {}

    def _find_obstacle(self, decoder: nn.Module) -> str | None:
        """Returns why no trial is needed to compute all rows, or None."""
        if not self._parts:
            return "it lacks q_proj, o_proj or mlp"
        if self._parts != _parts_of(decoder):
            return "it is another layer now"
        if any(isinstance(layer, FSDPModule) for layer in self._layers):
            return "its parts are sharded one by one"
        if any(map(has_hooks, _readers(decoder))):
            return "hooks would see meaningless rows"
        mixer = row_mixer(_readers(decoder)[:-1])
        return mixer and f"its {mixer} may mix rows"

    @contextmanager
    def restricted_to(self, rows: Tensor | slice | None, watch: Watch | None = None) -> Iterator[None]:
        """Context in which the parts compute these rows only and return zeros elsewhere; None for all rows.

        If their inputs and outputs are watched, they compute all rows.
        """
        self._rows, self._watch = rows, watch or (self._verify if row_sets.VERIFY else None)
        try:
            yield
        finally:
            self._rows = self._watch = None

    def restricts(self, layers: list[nn.Module]) -> bool:
        """Whether these layers get the kept rows only, at present."""
        return self._restricted() and self._watch is None and self._layers.issuperset(layers)

    def _restricted(self) -> bool:
        # A checkpoint recomputes after the rows are gone, and both of its runs must save the same shapes.
        return self._rows is not None and not is_in_checkpoint()

    def _verify(self, tensor: Tensor) -> Tensor:
        """Checks in the backward pass that the rows that would be left out have no gradient."""
        if not tensor.requires_grad:
            return tensor
        tensor, rows = tensor.view_as(tensor), row_sets.as_rows(self._rows, tensor.shape[:-1].numel())
        tensor.register_hook(lambda gradient: row_sets.rows_of(rows, gradient.flatten(0, -2)) and None)
        return tensor


def _parts_of(decoder: nn.Module) -> list[nn.Module]:
    """Returns the last block's query and output projections and its MLP; empty if it lacks one of them."""
    block = last_block(decoder)
    attention = getattr(block, "self_attn", None)
    parts = [getattr(attention, "q_proj", None), getattr(attention, "o_proj", None), getattr(block, "mlp", None)]
    return parts if None not in parts else []


def _readers(decoder: nn.Module) -> list[nn.Module]:
    """Returns the modules whose inputs or outputs are restricted: the last block's, the final norm, the base model."""
    base = decoder.base_model
    return [*last_block(decoder).modules(), *filter(is_norm, base.children()), base]


class _OnRows:
    """Replacement of one part's `forward`."""

    def __init__(self, last_layer: LastLayer, part: nn.Module):
        self._last_layer, self._forward = last_layer, forward_of(part)

    def __call__(self, x: Tensor, *args, **kwargs) -> Tensor:
        if not self._last_layer._restricted():
            return self._forward(x, *args, **kwargs)
        rows, watch = self._last_layer._rows, self._last_layer._watch
        if watch is not None:
            return watch(self._forward(watch(x), *args, **kwargs))
        x_NK = x.reshape(-1, x.shape[-1])
        out_1AM = self._forward(gather_rows(x_NK, rows)[None], *args, **kwargs)
        return scatter_rows(out_1AM.squeeze(0), rows, len(x_NK)).reshape(*x.shape[:-1], -1)
