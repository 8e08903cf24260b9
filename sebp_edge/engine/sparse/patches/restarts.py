"""Layers whose state must restart at each text: short convolutions, linear attention, state spaces.

They mix along time without attention, and most are not told where texts begin. So each runs on one row for each text,
padded on the right, while all around it runs on active rows. The state restarts by itself, and padding cannot reach
back into a text. Texts of similar lengths are computed together (see `lengths_together`).

Shapes: A active rows, S sequences, P padded rows; B texts computed together, T positions.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sebp_edge.engine.models.architecture import blocks_of
from sebp_edge.engine.sparse.patches.patch import Patch, forward_of
from sebp_edge.engine.sparse.rows.active_tokens import ActiveTokens
from sebp_edge.engine.sparse.rows.buckets import lengths_together, most_lengths
from sebp_edge.errors import SparsityError

# Modules of torch with a state, which is empty at the first row, and that no later row can change if they are causal.
WITH_STATE = (nn.Conv1d, nn.RNNBase)
# Keywords that say where texts begin among packed rows. A layer that attends without them raises an error.
_OF_PACKED_ROWS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "recorded_scores", "prefixes")


class Layout(NamedTuple):
    """Where active rows lie among padded ones.

    Attributes:
        groups: how many texts are computed together, and their padded length.
        places_A: int64, the padded row of each active row.
        padding: what the other rows hold; no active row may depend on it.
    """

    groups: list[tuple[int, int]]
    places_A: Tensor
    padding: float

    @classmethod
    def of(cls, tokens: ActiveTokens, lengths: Iterable[int], padding: float = 0.0) -> "Layout":
        """Lays out the texts of a batch, the longest first, without waiting for a GPU.

        Args:
            lengths: of each text at least its length, sorted.
        """
        groups, device = lengths_together(lengths), tokens.cu_seqlens.device
        begins, num_padded = [], 0
        for B, T in groups:
            begins.append(torch.arange(num_padded, num_padded + B * T, T, device=device))
            num_padded += B * T
        order_S = tokens.cu_seqlens.diff().argsort(descending=True, stable=True)
        # Texts beyond these are empty.
        begins_S = torch.zeros_like(order_S).index_copy(0, order_S[: sum(B for B, _ in groups)], torch.cat(begins))
        rows_A = torch.arange(len(tokens.input_ids), device=device)
        texts_A = torch.searchsorted(tokens.cu_seqlens[1:], rows_A, right=True)
        return cls(groups, rows_A + (begins_S - tokens.cu_seqlens[:-1])[texts_A], padding)

    @property
    def num_rows(self) -> int:
        return sum(B * T for B, T in self.groups)

    def pad(self, rows_1A: Tensor) -> list[Tensor]:
        """The padded texts of each group, [B, T, ...]."""
        rows_A = rows_1A.squeeze(0)
        padding_P = rows_A.new_full((self.num_rows, *rows_A.shape[1:]), self.padding)
        rows_P = padding_P.index_copy(0, self.places_A, rows_A)
        parts = rows_P.split([B * T for B, T in self.groups])
        return [part.unflatten(0, group) for part, group in zip(parts, self.groups, strict=True)]

    def unpad(self, padded: list[Tensor]) -> Tensor:
        """The active rows of padded texts, [1, A, ...]."""
        return torch.cat([part.flatten(0, 1) for part in padded])[self.places_A][None]


class Restarts(Patch):
    """Handle of one decoder's layers whose state restarts at each text.

    Attributes:
        blocks: those that have such layers.
    """

    def __init__(self, decoder: nn.Module):
        super().__init__()
        found = {block: list(_layers_with_state(block)) for block in blocks_of(decoder)}
        self.blocks = [block for block, layers in found.items() if layers]
        self._layers = [layer for layers in found.values() for layer in layers]
        self.layout: Layout | None = None

    def attach(self) -> None:
        for layer in self._layers:
            self._replace(layer, _PerText(self, forward_of(layer)))

    @contextmanager
    def at(self, layout: Layout | None) -> Iterator[None]:
        """Context in which texts lie so."""
        before, self.layout = self.layout, layout
        try:
            yield
        finally:
            self.layout = before

    def layout_of(self, tokens: ActiveTokens, padding: float = 0.0) -> Layout | None:
        """The layout of a batch; None if no layer needs it. On a GPU its groups follow from the sizes alone."""
        if not self._layers:
            return None
        lengths_S = tokens.cu_seqlens.diff()
        if lengths_S.device.type == "cpu":
            return Layout.of(tokens, sorted(lengths_S.tolist(), reverse=True), padding)
        return Layout.of(tokens, most_lengths(len(tokens.input_ids), len(lengths_S), tokens.max_len), padding)


def _layers_with_state(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the outermost modules that hold a module of torch with a state."""
    if any(isinstance(child, WITH_STATE) for child in module.children()):
        yield module
    else:
        for child in module.children():
            yield from _layers_with_state(child)


class _PerText:
    """Replacement of one layer's `forward`."""

    def __init__(self, restarts: Restarts, forward: Callable):
        self._restarts, self._forward = restarts, forward

    def __call__(self, *args, **kwargs):
        layout = self._restarts.layout
        if layout is None:
            return self._forward(*args, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in _OF_PACKED_ROWS}
        num_rows = len(layout.places_A)

        def pad(value):
            if isinstance(value, tuple):
                return list(zip(*map(pad, value), strict=True))
            is_of_rows = isinstance(value, Tensor) and value.shape[:2] == (1, num_rows)
            return layout.pad(value) if is_of_rows else [value] * len(layout.groups)

        padded = [pad(value) for value in (*args, *kwargs.values())]
        outputs = []
        for values in zip(*padded, strict=True):
            outputs.append(self._forward(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True))))
        if isinstance(outputs[0], tuple):
            return tuple(layout.unpad(parts) if parts[0] is not None else None for parts in zip(*outputs, strict=True))
        return layout.unpad(outputs)
