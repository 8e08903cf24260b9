"""Layers whose state must restart at each text: short convolutions, linear attention, state spaces.

They mix along time without attention, and most are not told where texts begin. Some run on packed texts (see
`packed_layers`). Each of the others runs on one row for each text, padded on the right. The state restarts by itself,
and padding cannot reach back into a text. Texts of similar lengths are computed together (see `lengths_together`).

All else runs on active rows, and so do the layer's projections: those that read its input, and one that gives its
output.

Shapes: A active rows, S sequences, P padded rows; B texts computed together, T positions.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sebp_edge.engine.models.architecture import blocks_of
from sebp_edge.engine.sparse.patches.packed_layers import (
    PackedTexts,
    packed_forward,
    runs_packed,
    without_texts,
)
from sebp_edge.engine.sparse.patches.patch import Patch, forward_of
from sebp_edge.engine.sparse.rows.active_tokens import ActiveTokens
from sebp_edge.engine.sparse.rows.buckets import lengths_together, most_lengths
from sebp_edge.errors import SparsityError

# Modules of torch with a state, which is empty at the first row, and that no later row can change if they are causal.
WITH_STATE = (nn.Conv1d, nn.RNNBase)


class PaddedTexts(NamedTuple):
    """Where active rows lie among padded ones."""

    groups: list[tuple[int, int]]  # how many texts are computed together, and their padded length
    places_A: Tensor  # int64, the padded row of each active row
    padding: float  # what the other rows hold; no active row may depend on it

    @classmethod
    def of(cls, tokens: ActiveTokens, lengths: Iterable[int], padding: float = 0.0) -> "PaddedTexts":
        """Lays out texts, the longest first, of at most these sorted lengths, without waiting for a GPU."""
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

    def pad(self, rows_1A: Tensor) -> list[Tensor]:
        """The padded texts of each group, [B, T, ...]."""
        sizes = [B * T for B, T in self.groups]
        rows_P = _Move.apply(rows_1A.squeeze(0), self.places_A, sum(sizes), self.padding)
        return [part.unflatten(0, group) for part, group in zip(rows_P.split(sizes), self.groups, strict=True)]

    def unpad(self, padded: Iterable[Tensor]) -> Tensor:
        """The active rows of padded texts, [1, A, ...]."""
        return _Move.apply(torch.cat([part.flatten(0, 1) for part in padded]), self.places_A, None)[None]


class _Move(torch.autograd.Function):
    """Puts rows at their places among others, or takes them from there; torch's own operations would keep the rows."""

    @staticmethod
    def forward(ctx, rows, places_A, num_rows, padding=0.0):
        ctx.places_A, ctx.num_rows = places_A, len(rows) if num_rows is None else None
        if num_rows is None:
            return rows.index_select(0, places_A)
        return rows.new_full((num_rows, *rows.shape[1:]), padding).index_copy_(0, places_A, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        return _Move.apply(dout, ctx.places_A, ctx.num_rows), None, None, None


class Layout(NamedTuple):
    """Where the texts of a batch are for each kind of layer; None for those that there are not."""

    padded: PaddedTexts | None
    packed: PackedTexts | None


class Restarts(Patch):
    """Handle of one decoder's layers whose state restarts at each text; `layout` is the present batch's."""

    def __init__(self, decoder: nn.Module):
        super().__init__()
        layers = [layer for block in blocks_of(decoder) for layer in layers_with_state(block)]
        self.packed = [layer for layer in layers if runs_packed(layer)]
        self.padded = [layer for layer in layers if layer not in self.packed]
        self.layout: Layout | None = None

    def attach(self) -> None:
        """Replaces the forwards of the layers and of their projections; each replacement calls the present forward."""
        for layer in self.packed:
            self._replace(layer, self._on_packed(layer))
        for layer in self.padded:
            replacement = _PerText(self, layer)
            for child in layer.children():
                if isinstance(getattr(child, "base_layer", child), nn.Linear):
                    self._replace(child, partial(replacement.project, forward_of(child)))
            self._replace(layer, replacement)

    def _on_packed(self, layer: nn.Module) -> Callable:
        forward, packed = forward_of(layer), packed_forward(layer, lambda: self.layout.packed)

        def replacement(*args, **kwargs):
            return forward(*args, **kwargs) if self.layout is None else packed(*args, **without_texts(kwargs))

        return replacement

    @contextmanager
    def at(self, layout: Layout | None) -> Iterator[None]:
        """Context in which texts lie so."""
        before, self.layout = self.layout, layout
        try:
            yield
        finally:
            self.layout = before

    def layout_of(self, tokens: ActiveTokens, padding: float = 0.0) -> Layout | None:
        """The layout of a batch; None if no layer needs it."""
        if not (self.packed or self.padded):
            return None
        packed = PackedTexts(tokens.cu_seqlens, len(tokens.input_ids)) if self.packed else None
        padded = PaddedTexts.of(tokens, _most_lengths(tokens), padding) if self.padded else None
        return Layout(padded, packed)


def _most_lengths(tokens: ActiveTokens) -> list[int]:
    """The most rows of each text, the longest first. On a GPU they follow from the batch's sizes alone."""
    lengths_S = tokens.cu_seqlens.diff()
    if lengths_S.device.type == "cpu":
        return sorted(lengths_S.tolist(), reverse=True)
    return most_lengths(len(tokens.input_ids), len(lengths_S), tokens.max_len)


def layers_with_state(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the outermost modules that hold a module of torch with a state."""
    if any(isinstance(child, WITH_STATE) for child in module.children()):
        yield module
    else:
        for child in module.children():
            yield from layers_with_state(child)


class _PerText:
    """Replacement of one layer's `forward`; once found, the projection that gives its output returns its input."""

    def __init__(self, restarts: Restarts, layer: nn.Module):
        self._restarts, self._layer, self._forward = restarts, layer, forward_of(layer)
        # By the layer's mode, in which it may run other code.
        self._last_in: dict[bool, Callable | None] = {}
        # Of the present call: active rows with their padded groups, what projections made of these, and the group.
        self._inputs: list[tuple[Tensor, list[Tensor]]] = []
        self._projected: dict[Callable, list[Tensor]] = {}
        self._group: int | None = None
        self._latest: tuple[Callable | None, Tensor | None] = None, None

    def __call__(self, *args, **kwargs):
        if self._restarts.layout is None:
            return self._forward(*args, **kwargs)
        texts, kwargs = self._restarts.layout.padded, without_texts(kwargs)
        groups = list(zip(*(self._pad(value, texts) for value in (*args, *kwargs.values())), strict=True))

        def run(number: int) -> tuple:
            self._group, values = number, groups[number]
            out = self._forward(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))
            return out if isinstance(out, tuple) else (out,)

        mode = self._layer.training
        try:
            if mode not in self._last_in:
                with torch.no_grad():
                    is_last = run(0)[0] is self._latest[1]
                self._last_in[mode], self._projected = self._latest[0] if is_last else None, {}
            last, outputs = self._last_in[mode], []
            for number in range(len(groups)):
                outputs.append(run(number))
                if last is not None and outputs[-1][0] is not self._latest[1]:
                    raise SparsityError("a layer's output does not come from the projection that it came from before.")
        finally:
            self._inputs, self._projected, self._group, self._latest = [], {}, None, (None, None)
        first, *others = (None if parts[0] is None else texts.unpad(parts) for parts in zip(*outputs, strict=True))
        first = first if last is None else last(first)
        return (first, *others) if others else first

    def project(self, forward: Callable, x: Tensor, *args, **kwargs) -> Tensor:
        """Calls a projection: once on active rows, if it reads the layer's input; later, if it gives the output."""
        if self._group is None:
            return forward(x, *args, **kwargs)
        if forward is self._last_in.get(self._layer.training):
            self._latest = forward, x
            return x
        rows_1A = next((rows for rows, padded in self._inputs if padded[self._group] is x), None)
        if rows_1A is None:
            out = forward(x, *args, **kwargs)
        else:
            if forward not in self._projected:
                self._projected[forward] = self._restarts.layout.padded.pad(forward(rows_1A, *args, **kwargs))
            out = self._projected[forward][self._group]
        self._latest = forward, out
        return out

    def _pad(self, value, texts: PaddedTexts) -> list:
        """The value for each group of texts."""
        if isinstance(value, tuple):
            return list(zip(*(self._pad(each, texts) for each in value), strict=True))
        if not (isinstance(value, Tensor) and value.shape[:2] == (1, len(texts.places_A))):
            return [value] * len(texts.groups)
        padded = texts.pad(value)
        self._inputs.append((value, padded))
        return padded
