"""Keys and values of prompts that are decoded together: each row's tokens in its own columns, without gaps.

A token's column is its position in its row, so rows of any lengths share a batch, a window is one of columns, and a
step writes one column per row in place; transformers' own caches copy everything for each token.
"""

import functools
import inspect
import weakref

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from sebp_edge.engine.models.architecture import head_size_of

# Attention with these takes any mask; other implementations read lengths instead.
ATTENTIONS = ("sdpa", "eager")
# Rotary embeddings of these kinds depend on the longest row of a batch.
LENGTH_DEPENDENT = {"dynamic", "longrope"}


def why_not_rows(model: PreTrainedModel) -> str | None:
    """Returns why a model's prompts cannot be decoded together in a `RowCache`; None if they can."""
    config = model.config.get_text_config()
    if model._is_stateful:
        return "it has a recurrent state"
    if not model._can_compile_fullgraph:
        return "transformers does not run it with prepared masks"
    if {type(layer) for layer in DynamicCache(config=config).layers} - {DynamicLayer, DynamicSlidingWindowLayer}:
        return "its cache has more than keys and values"
    if set(_layer_types(config)) - {"full_attention", "sliding_attention"}:
        return "its attention has other masks than causal ones and windows"
    if getattr(config, "alibi", False) or "position_ids" not in inspect.signature(model.forward).parameters:
        return "it takes positions from the mask"
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {options.get("rope_type") for options in (rope, *rope.values()) if isinstance(options, dict)}
    if kinds & LENGTH_DEPENDENT:
        return "its rotary embedding depends on the batch's longest row"
    if config._attn_implementation not in ATTENTIONS:
        return f"its attention implementation, {config._attn_implementation}, takes no prepared masks"
    return None


def bytes_per_token(model: PreTrainedModel) -> int:
    """Returns the bytes of one token's keys and values in all layers, by the config."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_size_of(config) * model.dtype.itemsize


def _layer_types(config: PretrainedConfig) -> list[str]:
    """Returns the kinds of the layers' masks; a single one if all are alike."""
    if (types := getattr(config, "layer_types", None)) is not None:
        return sorted(set(types))
    if getattr(config, "attention_chunk_size", None) is not None:
        return ["chunked_attention"]
    return ["full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"]


class RowCache(Cache):
    """Keys and values of up to `rows` rows with up to `columns` tokens each."""

    def __init__(self, rows: int, columns: int):
        # Layers refer to their cache weakly, so that its memory is freed without garbage collection.
        super().__init__(layer_class_to_replicate=functools.partial(_Layer, weakref.proxy(self)))
        self.rows, self.columns = rows, columns
        # Where the next pass writes and reads.
        self.write_at: tuple[Tensor | None, Tensor | slice]
        self.read: tuple[slice, slice]

    def select(self, rows: slice, columns: Tensor | slice, width: int) -> None:
        """Chooses where the next pass writes, and what it reads: the first `width` columns of `rows`.

        Each token has a column, [rows, tokens], which is `self.columns` if it only fills up; or all rows have the same.
        """
        numbers = None
        if isinstance(columns, Tensor):
            numbers = torch.arange(rows.start, rows.stop, device=columns.device)[:, None]
        self.write_at, self.read = (numbers, columns), (rows, slice(width))

    def take(self, other: "RowCache", columns: int) -> None:
        """Copies the first columns of another cache's first row into this one, which is empty."""
        for found in other.layers:
            layer = _Layer(weakref.proxy(self))
            layer.lazy_initialization(found.keys, found.values)
            layer.keys[0, :, :columns].copy_(found.keys[0, :, :columns])
            layer.values[0, :, :columns].copy_(found.values[0, :, :columns])
            self.layers.append(layer)

    def share(self, row: int, others: slice, columns: int) -> None:
        """Copies the first columns of one row to others."""
        for buffer in self._buffers():
            buffer[others, :, :columns].copy_(buffer[row, :, :columns])

    def keep(self, rows: list[int]) -> None:
        """Moves these rows to the front; those after them are lost."""
        if rows:
            for buffer in self._buffers():
                buffer[: len(rows)].copy_(buffer[rows])

    def _buffers(self) -> list[Tensor]:
        return [buffer for layer in self.layers for buffer in (layer.keys, layer.values)]


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

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
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


def needs_no_mask(model: PreTrainedModel, width: int) -> bool:
    """Whether one token sees all of its row's first `width` columns in each layer, and attention takes that as None."""
    config = model.config.get_text_config()
    window = config.sliding_window if "sliding_attention" in _layer_types(config) else None
    return config._attn_implementation == "sdpa" and (window is None or width < window)


def no_masks(model: PreTrainedModel) -> dict[str, None] | None:
    """Returns None as transformers' models take it: once for each kind of layer if there are several."""
    kinds = _layer_types(model.config.get_text_config())
    return None if len(kinds) == 1 else dict.fromkeys(kinds)


def masks(model: PreTrainedModel, positions: Tensor, width: int) -> Tensor | dict[str, Tensor]:
    """Returns what tokens at `positions`, [rows, tokens], see of their rows' first `width` columns.

    One mask if all layers have the same, else one for each kind of layer, as transformers' models take them.
    """
    config = model.config.get_text_config()
    columns = torch.arange(width, device=positions.device)
    found = {}
    for kind in _layer_types(config):
        mask = columns <= positions[:, None, :, None]
        if kind == "sliding_attention":
            mask = mask & (columns > positions[:, None, :, None] - config.sliding_window)
        if config._attn_implementation == "eager":
            least = torch.finfo(model.dtype).min
            mask = torch.zeros(mask.shape, dtype=model.dtype, device=mask.device).masked_fill_(~mask, least)
        found[kind] = mask
    return next(iter(found.values())) if len(found) == 1 else found
