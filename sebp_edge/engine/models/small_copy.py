"""Makes a small copy of a decoder, of the same class with random weights, to test what depends on its code alone.

Attention windows are short, and positions are scaled after a few tokens, so that a short text exceeds both.
"""

import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from sebp_edge.engine.models.architecture import head_sizes_of
from sebp_edge.engine.models.libraries import without_fla

# Special tokens, which must be in the copy's small vocabulary.
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
VOCABULARY = 128
# In tokens: attention windows; the length from which positions are scaled; the longest text that fits into any copy.
WINDOW, SCALED_FROM, LONGEST = 16, 32, 48
NUM_EXPERTS, NUM_EXPERTS_PER_TOKEN = 4, 2
# The size of a head, if there is no attention.
HEAD_SIZE = 64
# Endings of numbers that are proportional to the hidden size.
_WITH_HIDDEN_SIZE = ("mamba_n_heads", "mamba_heads", "num_heads", "d_ssm", "n_groups", "lru_width")
# A copy of a Gemma, which has large heads, has 4 million parameters. One with many experts would take half a minute.
_MAX_NUMBERS = 25_000_000


class SmallCopy(NamedTuple):
    """A small copy, with one layer of each kind and at least two."""

    model: PreTrainedModel  # on the CPU, in fp32
    layers: tuple[int, ...]  # for each layer of the decoder, the index of the copy's layer of the same kind


def small_copy(config: PretrainedConfig, kind: type[PreTrainedModel] | None = None) -> SmallCopy:
    """Makes a small copy of the config's decoder, by default of transformers' class for it.

    Heads keep their size, since lists of that length scale the rotary angles; all else is as small as that allows.
    Classes that do not take such sizes raise errors of any kind.
    """
    small, layers = _with_few_layers(config, is_small=True)
    _cut_experts(small)
    _shorten_windows(small)
    for name in _names(small, "vocab_size", "vocab_size_per_layer_input"):
        setattr(small, name, VOCABULARY)
    for name in _TOKENS:
        if getattr(small, name, None) is not None:
            setattr(small, name, 0)
    if (number := _count(_make(small, kind, "meta"))) > _MAX_NUMBERS:
        raise ValueError(f"A small copy has {number:,} numbers; expected at most {_MAX_NUMBERS:,}.")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return SmallCopy(_make(small, kind, "cpu").eval(), layers)


@torch.no_grad()
def spread(model: PreTrainedModel) -> PreTrainedModel:
    """Adds noise to all weights: fresh ones are so small, and some zero, that a trial shows little."""
    draw = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.05)
    return model


def copy_of_few_layers(config: PretrainedConfig, kind: type[PreTrainedModel]) -> SmallCopy:
    """Makes a copy with the decoder's own sizes but few layers, on "meta"; see `small_copy`."""
    few, layers = _with_few_layers(config)
    return SmallCopy(_make(few, kind, "meta").eval(), layers)


def _count(model: PreTrainedModel) -> int:
    """Counts a model's parameters, and the numbers in its buffers."""
    return model.num_parameters() + sum(buffer.numel() for buffer in model.buffers())


@without_fla()
def _make(config: PretrainedConfig, kind: type[PreTrainedModel] | None, device: str) -> PreTrainedModel:
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    with torch.device(device):
        if kind is not None:
            return kind._from_config(config, **options)
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)


def _shrink(config: PretrainedConfig, head_size: int) -> None:
    hidden_size = 2 * head_size
    for name in _names(config, *_WITH_HIDDEN_SIZE):
        setattr(config, name, max(1, getattr(config, name) * hidden_size // config.hidden_size))
    heads, kv_heads = (getattr(config, f"num_{kind}_heads", None) for kind in ("attention", "key_value"))
    if heads is not None:
        config.num_attention_heads = 2
    if kv_heads is not None:
        config.num_key_value_heads = 2 if kv_heads == heads else 1
    config.hidden_size = hidden_size
    for name in _names(config, "intermediate_size"):
        setattr(config, name, 3 * head_size)


def _with_few_layers(config: PretrainedConfig, *, is_small: bool = False) -> tuple[PretrainedConfig, tuple[int, ...]]:
    """Keeps the first layer of each kind, or two layers if there is only one kind.

    Layers are of one kind if the config's per-layer lists and values are the same for them, and all or none read
    another's keys and values. Returns the config, and for each layer the index of the copy's layer of its kind.
    """
    few, number = copy.deepcopy(config), config.num_hidden_layers
    names = sorted(getattr(config, "per_layer_attributes", None) or ())
    of_layers = list(config.per_layer_config) if names else []
    lists = {name: value for name, value in vars(few).items() if isinstance(value, list) and len(value) == number}
    values = [str([getattr(each, name) for name in names]) for each in of_layers or [config] * number]
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    kinds = list(zip([layer >= number - shared for layer in range(number)], values, *lists.values(), strict=True))
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    chosen = first if len(first) > 1 else first * 2
    if names:
        few.per_layer_config = None
    few.num_hidden_layers = len(chosen)
    if shared:
        few.num_kv_shared_layers = sum(layer >= number - shared for layer in chosen)
    for name, value in lists.items():
        setattr(few, name, [value[layer] for layer in chosen])
    for each in (few, *of_layers) if is_small else ():
        _shrink(each, min(head_sizes_of(config), default=HEAD_SIZE))
    if names:
        few.per_layer_config = {
            place: {name: getattr(of_layers[layer], name) for name in names} for place, layer in enumerate(chosen)
        }
    return few, tuple(first.index(kinds.index(kind)) for kind in kinds)


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
    scaled_from = "original_max_position_embeddings"
    for name in _names(config, scaled_from):
        setattr(config, name, SCALED_FROM)
    for each in sets:
        if scaled_from in each:
            each[scaled_from] = SCALED_FROM
    # Dynamic scaling starts at this length. Other models may have a position table, which must hold the text.
    is_dynamic = any(each.get("rope_type") == "dynamic" for each in sets)
    config.max_position_embeddings = SCALED_FROM if is_dynamic else LONGEST + 1


def _names(config: PretrainedConfig, *endings: str) -> Iterator[str]:
    """Yields the names of a config's integers with these endings."""
    return (name for name, value in list(vars(config).items()) if name.endswith(endings) and type(value) is int)
