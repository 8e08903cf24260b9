"""What prompts that are decoded together have computed: each row's keys and values in its own columns, and its states.

A token's column is its position in its row, so rows of any lengths share a batch, a window is one of columns, and a
step writes one column per row in place; transformers' own caches copy everything for each token. The state of a short
convolution or of linear attention has no columns: it is that after a row's last token, and cannot go back.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel, cache_utils
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from sebp_edge.engine.models.architecture import head_size_of, per_layer

# Kinds of layers that attend to columns; those with states have no mask.
MASKED = {"full_attention", "sliding_attention", "chunked_attention"}


def bytes_per_token(model: PreTrainedModel) -> int:
    """Returns the bytes of one token's keys and values in all layers, by the config."""
    config = model.config.get_text_config()
    of_layers = per_layer(config)
    heads = sum(getattr(each, "num_key_value_heads", None) or each.num_attention_heads for each in of_layers)
    return 2 * config.num_hidden_layers * heads * head_size_of(config) * model.dtype.itemsize // len(of_layers)


def layer_types(config: PretrainedConfig) -> list[str]:
    """Returns the kinds of the layers' masks; a single one if all are alike."""
    if (types := getattr(config, "layer_types", None)) is not None:
        # Falcon-H1's layers, which have both, look for these two names.
        both = ("full_attention", "linear_attention") if set(types) - MASKED else ()
        return sorted({*types, *both})
    if getattr(config, "attention_chunk_size", None) is not None:
        return ["chunked_attention"]
    return ["full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"]


class RowCache(Cache):
    """Keys, values and states of up to `rows` rows with up to `columns` tokens each."""

    def __init__(self, rows: int, columns: int, config: PretrainedConfig):
        # Layers refer to their cache weakly, so that its memory is freed without garbage collection.
        own = weakref.proxy(self)
        if has_states(config):
            super().__init__(layers=[LAYERS[kind](own) for kind in kinds_of_layers(config)])
        else:  # a model may go through its layers several times, as HRM's does
            super().__init__(layer_class_to_replicate=partial(_Layer, own))
        self.rows, self.columns = rows, columns
        # Where the next pass writes and reads.
        self.write_at: tuple[Tensor | None, Tensor | slice]
        self.read: tuple[slice, slice]
        # The first row's states after so many of its tokens.
        self._settled: tuple[int, list[Tensor]] | None = None

    def select(self, rows: slice, columns: Tensor | slice, width: int, *, begins: bool = False) -> None:
        """Chooses where the next pass writes, and what it reads: the first `width` columns of `rows`.

        Each token has a column, [rows, tokens], which is `self.columns` if it only fills up; or all rows have the same.
        Rows with states are not filled up.

        Args:
            begins: whether it has the first tokens of all these rows.
        """
        numbers = None
        if isinstance(columns, Tensor):
            numbers = torch.arange(rows.start, rows.stop, device=columns.device)[:, None]
        self.write_at, self.read = (numbers, columns), (rows, slice(width))
        for layer in self._of_kind(_States):
            layer.select(rows, begins=begins)

    def settle(self, columns: int) -> None:
        """Keeps a copy of the first row's states after its first `columns` tokens, for `go_back`."""
        self._settled = columns, [states[0].clone() for states in self._states()]

    def go_back(self, known: int, computed: int | None) -> int:
        """Sets the first row's states to those after at most `known` tokens; returns after how many.

        Args:
            computed: after how many tokens they are now; None if that is not known.
        """
        if not self._of_kind(_States) or known == computed != 0:
            return known
        if self._settled is None or self._settled[0] > known:
            self._settled = 0, [torch.zeros_like(states[0]) for states in self._states()]
        columns, settled = self._settled
        for states, own in zip(self._states(), settled, strict=True):
            states.zero_()[0] = own
        return columns

    @contextmanager
    def unmoved(self) -> Iterator[None]:
        """Context that restores all states at its end."""
        before = {id(states): states.clone() for states in self._states()}
        try:
            yield
        finally:
            for states in self._states():
                states.copy_(before.get(id(states), torch.zeros_like(states)))

    def take(self, other: "RowCache", columns: int) -> None:
        """Copies the first row of another cache into this one, which is empty: its first columns, and its states."""
        self.layers = self.layers or [_Layer(weakref.proxy(self)) for _ in other.layers]
        for layer, found in zip(self.layers, other.layers, strict=True):
            layer.take(found, columns)
        self._settled = other._settled

    def share(self, row: int, others: slice, columns: int) -> None:
        """Copies the first columns of one row, and its states, to others."""
        for buffer in self._columns():
            buffer[others, :, :columns].copy_(buffer[row, :, :columns])
        for states in self._states():
            states[others] = states[row]

    def keep(self, rows: list[int]) -> None:
        """Moves these rows to the front; those after them are lost."""
        if rows:
            for buffer in (*self._columns(), *self._states()):
                buffer[: len(rows)].copy_(buffer[rows])

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in (*self._columns(), *self._states()))

    def _columns(self) -> list[Tensor]:
        layers = [layer for layer in self._of_kind(_Layer) if layer.is_initialized]
        return [buffer for layer in layers for buffer in (layer.keys, layer.values)]

    def _states(self) -> list[Tensor]:
        return [states for layer in self._of_kind(_States) for states in layer.of_rows.values()]

    def _of_kind(self, kind: type) -> list:
        return [layer for layer in self.layers if isinstance(layer, kind)]


class _Layer(CacheLayerMixin):
    """One layer's keys and values, [rows, heads, columns + 1, head size]; nothing reads the last column."""

    is_sliding = False

    def __init__(self, cache: RowCache):
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # A masked column has weight zero, but must be finite.
        self.keys, self.values = (
            states.new_zeros(self._cache.rows, states.shape[1], self._cache.columns + 1, states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def take(self, other: "_Layer", columns: int) -> None:
        if other.is_initialized:
            _Layer.lazy_initialization(self, other.keys, other.values)
            self.keys[0, :, :columns].copy_(other.keys[0, :, :columns])
            self.values[0, :, :columns].copy_(other.values[0, :, :columns])

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            _Layer.lazy_initialization(self, key_states, value_states)
        (numbers, columns), (rows, width) = self._cache.write_at, self._cache.read
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            if numbers is None:
                buffer[rows, :, columns] = states
            else:
                buffer[numbers, :, columns] = states.transpose(1, 2)
        return self.keys[rows, :, width], self.values[rows, :, width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.read[1].stop, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self._cache.columns


class _States(LinearAttentionLayer):
    """One layer's states; transformers' code reads and writes, in place, those of the rows that are selected."""

    def __init__(self, cache: RowCache):
        super().__init__()
        self._cache = cache
        self.of_rows: dict[tuple[str, int], Tensor] = {}  # by transformers' names and numbers, [rows, ...]

    def lazy_initialization(self, **states) -> None:
        LinearAttentionLayer.lazy_initialization(self, **states)
        for name in ("conv_states", "recurrent_states"):
            for number, own in getattr(self, name).items():
                if own is not None and (name, number) not in self.of_rows:
                    self.of_rows[name, number] = own.new_zeros(self._cache.rows, *own.shape[1:])
        self._point_to(self._cache.read[0])

    def select(self, rows: slice, *, begins: bool) -> None:
        self._point_to(rows)
        # Zeros are the state before a row's first token.
        self.has_previous_state = dict.fromkeys(self.has_previous_state, bool(self.of_rows) and not begins)

    def take(self, other: "_States", columns: int) -> None:
        self.conv_kernel_size, self.dtype, self.device = other.conv_kernel_size, other.dtype, other.device
        self.is_conv_states_initialized = other.is_conv_states_initialized
        self.is_recurrent_states_initialized = other.is_recurrent_states_initialized
        for key, found in other.of_rows.items():
            self.of_rows[key] = found.new_zeros(self._cache.rows, *found.shape[1:])
            self.of_rows[key][0].copy_(found[0])

    def _point_to(self, rows: slice) -> None:
        for (name, number), states in self.of_rows.items():
            getattr(self, name)[number] = states[rows]


class _StatesAndKeys(_States, _Layer):
    """One layer of both."""

    def __init__(self, cache: RowCache):
        _Layer.__init__(self, cache)
        _States.__init__(self, cache)

    def take(self, other: "_StatesAndKeys", columns: int) -> None:
        _Layer.take(self, other, columns)
        _States.take(self, other, columns)


# Our class for each class of the layers of transformers' cache. Newer versions have one for layers without a cache of
# their own, such as Gemma 4's that share keys and values.
LAYERS = {
    DynamicLayer: _Layer,
    DynamicSlidingWindowLayer: _Layer,
    LinearAttentionLayer: _States,
    LinearAttentionAndFullAttentionLayer: _StatesAndKeys,
    getattr(cache_utils, "DummyLayer", DynamicLayer): _Layer,
}


def kinds_of_layers(config: PretrainedConfig) -> list[type]:
    """Returns the classes of the layers of transformers' cache for a model."""
    return [type(layer) for layer in DynamicCache(config=config).layers]


def has_states(config: PretrainedConfig) -> bool:
    return any(issubclass(LAYERS.get(kind, _Layer), _States) for kind in kinds_of_layers(config))


def needs_no_mask(model: PreTrainedModel, width: int) -> bool:
    """Whether one token sees all of its row's first `width` columns in each layer, and attention takes that as None."""
    config = model.config.get_text_config()
    window = config.sliding_window if "sliding_attention" in layer_types(config) else None
    return config._attn_implementation == "sdpa" and (window is None or width < window)


def no_masks(model: PreTrainedModel) -> dict[str, None] | None:
    """Returns None as transformers' models take it: once for each kind of layer if there are several."""
    kinds = layer_types(model.config.get_text_config())
    return None if len(kinds) == 1 else dict.fromkeys(kinds)


def masks(model: PreTrainedModel, positions: Tensor, width: int) -> Tensor | dict[str, Tensor | None]:
    """Returns what tokens at `positions`, [rows, tokens], see of their rows' first `width` columns.

    One mask if all layers have the same, else one for each kind of layer, as transformers' models take them; None for
    layers that do not attend.
    """
    config = model.config.get_text_config()
    columns = torch.arange(width, device=positions.device)
    found = {}
    for kind in layer_types(config):
        if kind not in MASKED:
            found[kind] = None
            continue
        mask = columns <= positions[:, None, :, None]
        if kind == "sliding_attention":
            mask = mask & (columns > positions[:, None, :, None] - config.sliding_window)
        if config._attn_implementation == "eager":
            least = torch.finfo(model.dtype).min
            mask = torch.zeros(mask.shape, dtype=model.dtype, device=mask.device).masked_fill_(~mask, least)
        found[kind] = mask
    return next(iter(found.values())) if len(found) == 1 else found
