"""Layers whose state must restart at each text: short convolutions, linear attention, state spaces.

They mix along time without attention, and most are not told where texts begin. So each runs on one row for each text,
padded on the right. The state restarts by itself, and padding cannot reach back into a text. Texts of similar lengths
are computed together (see `lengths_together`).

All else runs on active rows, and so do the layer's projections: those that read its input, and one that gives its
output. If fla's kernels compute the delta rules (see `delta_rule`), so does the whole layer.

Shapes: A active rows, S sequences, P padded rows, C channels; B texts computed together, T positions.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sebp_edge.engine.models.architecture import blocks_of
from sebp_edge.engine.sparse.patches.delta_rule import CONVOLUTION, RULE, kernel_for, packed_options
from sebp_edge.engine.sparse.patches.patch import Patch, forward_of
from sebp_edge.engine.sparse.rows.active_tokens import ActiveTokens
from sebp_edge.engine.sparse.rows.buckets import lengths_together, most_lengths
from sebp_edge.errors import SparsityError

# Modules of torch with a state, which is empty at the first row, and that no later row can change if they are causal.
WITH_STATE = (nn.Conv1d, nn.RNNBase)
# Keywords that say where texts begin among packed rows. A layer that attends without them raises an error.
OF_PACKED_ROWS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "recorded_scores", "prefixes")


class Layout(NamedTuple):
    """Where active rows lie among padded ones."""

    groups: list[tuple[int, int]]  # how many texts are computed together, and their padded length
    places_A: Tensor  # int64, the padded row of each active row
    padding: float  # what the other rows hold; no active row may depend on it

    @classmethod
    def of(cls, tokens: ActiveTokens, lengths: Iterable[int], padding: float = 0.0) -> "Layout":
        """Lays out texts, the longest first, of at most these sorted lengths, without waiting for a GPU."""
        groups, device = lengths_together(lengths), tokens.cu_seqlens.device
        begins, num_padded = [], 0
        for B, T in groups:
            begins.append(torch.arange(num_padded, num_padded + B * T, T, device=device))
            num_padded += B * T
        order_S = tokens.cu_seqlens.diff().argsort(descending=True, stable=True)
        # Texts beyond these are empty.
        begins_S = torch.zeros_like(order_S).index_copy(0, order_S[: sum(B for B, _ in groups)], torch.cat(begins))
        rows_A, texts_A = _rows_and_texts(tokens)
        return cls(groups, rows_A + (begins_S - tokens.cu_seqlens[:-1])[texts_A], padding)

    @classmethod
    def spaced(cls, tokens: ActiveTokens, gap: int) -> "Layout":
        """Lays out all texts in one row, each after so many rows of zeros."""
        rows_A, texts_A = _rows_and_texts(tokens)
        num_rows = len(rows_A) + gap * (len(tokens.cu_seqlens) - 1)
        return cls([(1, num_rows)], rows_A + gap * (texts_A + 1), 0.0)

    def pad(self, rows_1A: Tensor) -> list[Tensor]:
        """The padded texts of each group, [B, T, ...]."""
        sizes = [B * T for B, T in self.groups]
        rows_P = _Move.apply(rows_1A.squeeze(0), self.places_A, sum(sizes), self.padding)
        return [part.unflatten(0, group) for part, group in zip(rows_P.split(sizes), self.groups, strict=True)]

    def unpad(self, padded: Iterable[Tensor]) -> Tensor:
        """The active rows of padded texts, [1, A, ...]."""
        return _Move.apply(torch.cat([part.flatten(0, 1) for part in padded]), self.places_A, None)[None]


def _rows_and_texts(tokens: ActiveTokens) -> tuple[Tensor, Tensor]:
    """The number of each active row, and that of its text."""
    rows_A = torch.arange(len(tokens.input_ids), device=tokens.cu_seqlens.device)
    return rows_A, torch.searchsorted(tokens.cu_seqlens[1:], rows_A, right=True)


class Packed(NamedTuple):
    """Where texts begin among active rows, for layers that take them packed.

    Attributes:
        spaced: the rows that convolutions read, each text after as many zeros as they reach back.
        options: the kernels' keywords, with tensors of this pass alone: fla keeps what it derives from one.
    """

    spaced: Layout
    options: dict[str, Tensor]


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


class Restarts(Patch):
    """Handle of one decoder's layers whose state restarts at each text; `layout` is the present batch's."""

    def __init__(self, decoder: nn.Module):
        super().__init__()
        self.layers = [layer for block in blocks_of(decoder) for layer in layers_with_state(block)]
        self.layout: Layout | Packed | None = None
        # How far the layers' convolutions reach back, if all are computed on packed rows.
        self._reach: int | None = None

    def attach(self) -> None:
        """Replaces the forwards of the layers and of their projections; each replacement calls the present forward."""
        kernels = [kernel_for(layer) for layer in self.layers]
        if self.layers and None not in kernels:
            self._reach = max(layer.conv1d.weight.shape[-1] for layer in self.layers) - 1
            for layer, kernel in zip(self.layers, kernels, strict=True):
                self._replace(layer, self._on_packed(layer, kernel))
            return
        for layer in self.layers:
            replacement = _PerText(self, layer)
            for child in layer.children():
                if isinstance(getattr(child, "base_layer", child), nn.Linear):
                    self._replace(child, partial(replacement.project, forward_of(child)))
            self._replace(layer, replacement)

    def _on_packed(self, layer: nn.Module, kernel: Callable) -> Callable:
        """The layer's forward, and within a pass the same code with the convolution and the rule of packed rows."""
        forward, own = forward_of(layer), inspect.unwrap(type(layer).forward)

        def convolution(x_1CA: Tensor, *args, **options) -> Tensor:
            (padded_1PC,) = self.layout.spaced.pad(x_1CA.mT)
            return self.layout.spaced.unpad([own.__globals__[CONVOLUTION](padded_1PC.mT, *args, **options).mT]).mT

        names = own.__globals__ | {CONVOLUTION: convolution}
        names |= {RULE: lambda *args, **options: kernel(*args, **options | self.layout.options)}
        packed = FunctionType(own.__code__, names, None, own.__defaults__, own.__closure__)
        packed.__kwdefaults__ = own.__kwdefaults__

        def replacement(*args, **kwargs):
            if self.layout is None:
                return forward(*args, **kwargs)
            return packed(layer, *args, **{name: each for name, each in kwargs.items() if name not in OF_PACKED_ROWS})

        return replacement

    @contextmanager
    def at(self, layout: Layout | Packed | None) -> Iterator[None]:
        """Context in which texts lie so."""
        before, self.layout = self.layout, layout
        try:
            yield
        finally:
            self.layout = before

    def layout_of(self, tokens: ActiveTokens, padding: float = 0.0) -> Layout | Packed | None:
        """The layout of a batch; None if no layer needs it. On a GPU its sizes follow from the batch's alone."""
        if not self.layers:
            return None
        if self._reach is not None:
            options = packed_options(tokens.cu_seqlens.clone(), len(tokens.input_ids))
            return Packed(Layout.spaced(tokens, self._reach), options)
        lengths_S = tokens.cu_seqlens.diff()
        if lengths_S.device.type == "cpu":
            return Layout.of(tokens, sorted(lengths_S.tolist(), reverse=True), padding)
        return Layout.of(tokens, most_lengths(len(tokens.input_ids), len(lengths_S), tokens.max_len), padding)


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
        layout = self._restarts.layout
        if layout is None:
            return self._forward(*args, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in OF_PACKED_ROWS}
        groups = list(zip(*(self._pad(value, layout) for value in (*args, *kwargs.values())), strict=True))

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
        first, *others = (None if parts[0] is None else layout.unpad(parts) for parts in zip(*outputs, strict=True))
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
                self._projected[forward] = self._restarts.layout.pad(forward(rows_1A, *args, **kwargs))
            out = self._projected[forward][self._group]
        self._latest = forward, out
        return out

    def _pad(self, value, layout: Layout) -> list:
        """The value for each group of texts."""
        if isinstance(value, tuple):
            return list(zip(*(self._pad(each, layout) for each in value), strict=True))
        if not (isinstance(value, Tensor) and value.shape[:2] == (1, len(layout.places_A))):
            return [value] * len(layout.groups)
        padded = layout.pad(value)
        self._inputs.append((value, padded))
        return padded
