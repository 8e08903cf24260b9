"""Which models' prompts are decoded together in a `RowCache`, and how many at once.

What is known of the classes of transformers decides for keys and values. How a model passes states on is its own code:
a small copy of it is tried.
"""

import functools
import inspect
import math
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from sebp_edge.engine.models.row_cache import LAYERS, RowCache, has_states, kinds_of_layers, layer_types, masks
from sebp_edge.engine.models.small_copy import VOCABULARY, small_copy, spread

# Attention with these takes any mask; other implementations read lengths instead.
ATTENTIONS = ("sdpa", "eager")
# Rotary embeddings of these kinds change with the longest row of a batch, once that is beyond a length.
LENGTH_DEPENDENT = {"dynamic", "longrope"}
# Passes of a trial: row, first token and end. Each row goes on after another one, within the reach of convolutions.
PASSES = ((0, 0, 3), (1, 0, 2), (0, 3, 13), (1, 2, 5))


def why_not_rows(model: PreTrainedModel) -> str | None:
    """Returns why a model's prompts cannot be computed in the rows of a `RowCache`; None if they can."""
    config = model.config.get_text_config()
    if set(kinds_of_layers(config)) - LAYERS.keys():
        return "its cache has more than keys, values and states"
    if "chunked_attention" in layer_types(config):
        return "its attention has other masks than causal ones and windows"
    if getattr(config, "alibi", False) or "position_ids" not in inspect.signature(model.forward).parameters:
        return "it takes positions from the mask"
    if config._attn_implementation not in ATTENTIONS:
        return f"its attention implementation, {config._attn_implementation}, takes no prepared masks"
    if has_states(config) or model._is_stateful:
        tried = _Tried(type(model), config.to_json_string(use_diff=False), config)
        return None if _goes_on(tried) else "it has a recurrent state"
    return None if model._can_compile_fullgraph else "transformers does not run it with prepared masks"


def longest_alike(config: PretrainedConfig) -> float:
    """Returns the longest length at which a text's rotary angles do not depend on it; infinity if there is no limit."""
    rope = getattr(config, "rope_parameters", None) or {}
    changing = [
        options.get("original_max_position_embeddings", config.max_position_embeddings)
        for options in (rope, *rope.values())
        if isinstance(options, dict) and options.get("rope_type") in LENGTH_DEPENDENT
    ]
    return min(changing, default=math.inf)


class _Tried(NamedTuple):
    """What a trial depends on; `config` has the values."""

    kind: type[PreTrainedModel]
    values: str
    config: PretrainedConfig

    def __eq__(self, other) -> bool:
        return self[:2] == other[:2]

    def __hash__(self) -> int:
        return hash(self[:2])


@functools.lru_cache(maxsize=16)
@torch.no_grad()
def _goes_on(tried: _Tried) -> bool:
    """Whether a small copy's rows have the same logits part by part, with other rows in between, as each one whole."""
    draw = torch.Generator().manual_seed(0)
    try:
        model = spread(small_copy(tried.config, tried.kind).model)
        ids = torch.randint(1, VOCABULARY, (2, 15), generator=draw)
        expected = model(ids, use_cache=False).logits
        cache = RowCache(2, ids.shape[1], model.config.get_text_config())
        for row, begin, end in PASSES:
            cache.select(slice(row, row + 1), slice(begin, end), end, begins=begin == 0)
            found = _pass(model, cache, ids[row : row + 1, begin:end], torch.arange(begin, end)[None], end)
            if not _agree(found[0], expected[row, begin:end]):
                return False
        for places in ((13, 5), (14, 6)):  # one step of both
            at = torch.tensor(places)[:, None]
            cache.select(slice(0, 2), at, max(places) + 1)
            found = _pass(model, cache, ids.gather(1, at), at, max(places) + 1)
            if not _agree(found[:, 0], expected[[0, 1], places]):
                return False
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError):
        return False
    return True


def _pass(model: PreTrainedModel, cache: RowCache, ids: Tensor, at: Tensor, width: int) -> Tensor:
    options = {"attention_mask": masks(model, at, width), "position_ids": at, "past_key_values": cache}
    return model(input_ids=ids, **options, use_cache=True).logits


def _agree(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).norm() <= 1e-4 * expected.norm())
