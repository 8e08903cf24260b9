"""Makes a small copy of a decoder, of the same class with random weights, to test what depends on its code alone.

Attention windows are short, and positions are scaled after a few tokens, so that a short text exceeds both.
"""

import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from sebp_edge.engine.models.architecture import head_size_of

# Special tokens, which must be in the copy's small vocabulary.
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
VOCABULARY = 128
# In tokens: attention windows; the length from which positions are scaled; the longest text that fits into any copy.
WINDOW, SCALED_FROM, LONGEST = 16, 32, 48
NUM_EXPERTS, NUM_EXPERTS_PER_TOKEN = 4, 2
# A copy of a Gemma, which has large heads, has 4 million parameters. One with many experts would take half a minute.
_MAX_PARAMETERS = 20_000_000


class SmallCopy(NamedTuple):
    """A small copy, with one layer of each kind and at least two layers.

    Attributes:
        model: on the CPU, in fp32.
        layers: for each layer of the decoder, the index of the copy's layer of the same kind.
    """

    model: PreTrainedModel
    layers: tuple[int, ...]


def small_copy(config: PretrainedConfig, kind: type[PreTrainedModel] | None = None) -> SmallCopy:
    """Makes a small copy of the config's decoder.

    Heads keep their size, since lists of that length scale the rotary angles; all else is as small as that allows.

    Args:
        kind: the decoder's class; by default transformers' class for the config.

    Raises:
        ValueError, TypeError, RuntimeError, LookupError, AttributeError: the class does not take such sizes.
    """
    small = copy.deepcopy(config)
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    head_size = head_size_of(config)
    small.num_attention_heads = 2
    if kv_heads is not None:
        small.num_key_value_heads = 2 if kv_heads == heads else 1
    small.hidden_size = 2 * head_size
    for name in _names(small, "intermediate_size"):
        setattr(small, name, 3 * head_size)
    layers = _cut_layers(small)
    _cut_experts(small)
    _shorten_windows(small)
    small.vocab_size = VOCABULARY
    for name in _TOKENS:
        if getattr(small, name, None) is not None:
            setattr(small, name, 0)
    if (number := _make(small, kind, "meta").num_parameters()) > _MAX_PARAMETERS:
        raise ValueError(f"A small copy has {number:,} parameters; expected at most {_MAX_PARAMETERS:,}.")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return SmallCopy(_make(small, kind, "cpu").eval(), layers)


def _make(config: PretrainedConfig, kind: type[PreTrainedModel] | None, device: str) -> PreTrainedModel:
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    with torch.device(device):
        if kind is not None:
            return kind._from_config(config, **options)
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)


def _cut_layers(config: PretrainedConfig) -> tuple[int, ...]:
    """Keeps the first layer of each kind, or two layers if there is only one kind.

    Layers are of one kind if the config's per-layer lists have the same values for them.

    Returns, for each layer of the decoder, the index of the copy's layer of the same kind.
    """
    number = config.num_hidden_layers
    lists = {name: value for name, value in vars(config).items() if isinstance(value, list) and len(value) == number}
    kinds = list(zip(*lists.values(), strict=True)) if lists else [()] * number
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    chosen = first if len(first) > 1 else first * 2
    config.num_hidden_layers = len(chosen)
    for name, value in lists.items():
        setattr(config, name, [value[layer] for layer in chosen])
    return tuple(first.index(kinds.index(kind)) for kind in kinds)


def _cut_experts(config: PretrainedConfig) -> None:
    for name in _names(config, "experts"):
        setattr(config, name, min(getattr(config, name), NUM_EXPERTS))
    for name in _names(config, "experts_per_tok"):
        setattr(config, name, min(getattr(config, name), NUM_EXPERTS_PER_TOKEN))


def _shorten_windows(config: PretrainedConfig) -> None:
    for word in ("window", "window_size", "chunk_size"):
        for name in _names(config, word):
            setattr(config, name, min(getattr(config, name), WINDOW))
    given = getattr(config, "rope_parameters", None) or {}
    # One set of parameters, or one for each kind of layer.
    sets = [given] if "rope_type" in given else [each for each in given.values() if isinstance(each, dict)]
    for holder in (config, *sets):
        _set(holder, "original_max_position_embeddings", SCALED_FROM)
    # Dynamic scaling starts at this length. Other models may have a position table, which must hold the text.
    is_dynamic = any(each.get("rope_type") == "dynamic" for each in sets)
    config.max_position_embeddings = SCALED_FROM if is_dynamic else LONGEST + 1


def _set(holder: PretrainedConfig | dict, name: str, value: int) -> None:
    """Sets a number if the holder has it."""
    if isinstance(holder, dict) and name in holder:
        holder[name] = value
    elif not isinstance(holder, dict) and isinstance(getattr(holder, name, None), int):
        setattr(holder, name, value)


def _names(config: PretrainedConfig, ending: str) -> Iterator[str]:
    """Yields the names of a config's integers with this ending."""
    return (name for name, value in list(vars(config).items()) if name.endswith(ending) and type(value) is int)
