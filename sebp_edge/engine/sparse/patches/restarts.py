"""Layers whose state must restart at each text: short convolutions, linear attention, state spaces.

They mix along time without attention, and are not told where texts begin. They run on packed texts (see
`packed_layers`); a model with others is refused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from sebp_edge.engine.models.architecture import blocks_of
from sebp_edge.engine.sparse.patches.packed_layers import (
    PackedTexts,
    packed_forward,
    runs_packed,
    without_texts,
)
from sebp_edge.engine.sparse.patches.patch import Patch, forward_of
from sebp_edge.engine.sparse.rows.active_tokens import ActiveTokens

# Modules of torch with a state.
WITH_STATE = (nn.Conv1d, nn.RNNBase)


class Restarts(Patch):
    """Handle of one decoder's layers whose state restarts at each text; `texts` are the present batch's."""

    def __init__(self, decoder: nn.Module):
        super().__init__()
        self.layers = packed_layers(decoder)
        self.texts: PackedTexts | None = None

    def attach(self) -> None:
        """Replaces the layers' forwards; each replacement calls the present forward outside of a batch."""
        for layer in self.layers:
            self._replace(layer, self._on_packed(layer))

    def _on_packed(self, layer: nn.Module) -> Callable:
        forward, packed = forward_of(layer), packed_forward(layer, lambda: self.texts)

        def replacement(*args, **kwargs):
            return forward(*args, **kwargs) if self.texts is None else packed(*args, **without_texts(kwargs))

        return replacement

    @contextmanager
    def at(self, texts: PackedTexts | None) -> Iterator[None]:
        """Context in which texts lie so."""
        before, self.texts = self.texts, texts
        try:
            yield
        finally:
            self.texts = before

    def texts_of(self, tokens: ActiveTokens) -> PackedTexts | None:
        """Where a batch's texts are; None if no layer needs it."""
        return PackedTexts(tokens.cu_seqlens, len(tokens.input_ids)) if self.layers else None


def packed_layers(decoder: nn.Module) -> list[nn.Module]:
    """Returns a decoder's layers with a state that run on packed texts."""
    layers = (layer for block in blocks_of(decoder) for layer in layers_with_state(block))
    return [layer for layer in layers if runs_packed(layer)]


def layers_with_state(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the outermost modules that hold a module of torch with a state."""
    if any(isinstance(child, WITH_STATE) for child in module.children()):
        yield module
    else:
        for child in module.children():
            yield from layers_with_state(child)
