"""Computes a decoder's last layer on loss rows only, forward and backward.

After the last attention every operation works row by row, so a row without a loss needs no query, no output projection
and no MLP; other rows read only its key and value. Each of the three parts becomes gather, operation, scatter. A trial
tests whether the model's losses stay the same. The hidden states of rows without a loss become meaningless, so only the
loss may read the result.

Shapes: N rows, A kept rows, K columns.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from sebp_edge.models.architecture import is_norm, last_block
from sebp_edge.models.sharding import FSDPModule
from sebp_edge.ops import gather_rows, scatter_rows
from sebp_edge.sparse.patches.agreement import find_mismatch
from sebp_edge.sparse.patches.checkpoints import is_in_checkpoint
from sebp_edge.sparse.patches.patch import Patch, forward_of
from sebp_edge.sparse.patches.state import has_hooks

logger = logging.getLogger(__name__)


class LastLayer(Patch):
    """Handle of one decoder's restricted last layer.

    Attributes:
        query: the query projection, which must not be computed together with keys and values; None if the last block
            lacks one of the three parts and is not changed.
    """

    def __init__(self, decoder: nn.Module):
        super().__init__()
        self._parts = _parts_of(decoder)
        self._layers = {layer for part in self._parts for layer in part.modules()}
        self.query: nn.Module | None = self._parts[0] if self._parts else None
        self._rows: Tensor | slice | None = None
        self._exact: bool | None = None

    def attach(self) -> None:
        """Replaces the forwards of the three parts; each replacement calls the present forward."""
        for part in self._parts:
            self._replace(part, _OnRows(self, forward_of(part)))

    def is_exact(self, decoder: nn.Module, losses: Callable[[bool], Tensor]) -> bool:
        """Whether restricting the last layer leaves the losses the same; tried once, and again after `forget_trial`."""
        if self._exact is None:
            reason = self._find_obstacle(decoder)
            if reason is None:
                reason = find_mismatch(decoder, lambda: losses(False), lambda: losses(True))
            self._exact = reason is None
            if reason is not None:
                logger.info("The last layer computes all rows: %s", reason)
        return self._exact

    def forget_trial(self) -> None:
        """Makes `is_exact` test again, since the model has changed."""
        self._exact = None

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
        return None

    @contextmanager
    def restricted_to(self, rows: Tensor | slice | None) -> Iterator[None]:
        """Context in which the parts compute these rows only and return zeros elsewhere; None for all rows."""
        self._rows = rows
        try:
            yield
        finally:
            self._rows = None

    def restricts(self, layers: list[nn.Module]) -> bool:
        """Whether these layers get the kept rows only, at present."""
        return self._restricted() and self._layers.issuperset(layers)

    def _restricted(self) -> bool:
        # A checkpoint recomputes after the rows are gone, and both of its runs must save the same shapes.
        return self._rows is not None and not is_in_checkpoint()

    def _run(self, forward: Callable, x: Tensor, args, kwargs) -> Tensor:
        if not self._restricted():
            return forward(x, *args, **kwargs)
        x_NK = x.reshape(-1, x.shape[-1])
        out_1AM = forward(gather_rows(x_NK, self._rows)[None], *args, **kwargs)
        return scatter_rows(out_1AM.squeeze(0), self._rows, len(x_NK)).reshape(*x.shape[:-1], -1)


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

    def __init__(self, last_layer: LastLayer, forward: Callable):
        self._last_layer, self._forward = last_layer, forward

    def __call__(self, x: Tensor, *args, **kwargs) -> Tensor:
        return self._last_layer._run(self._forward, x, args, kwargs)
