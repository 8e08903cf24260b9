"""A small copy of a decoder: its class with random weights and few of everything, for what depends on code alone."""

import copy
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

# Special tokens, which must be among the few that the copy knows.
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_VOCABULARY = 128
# A copy of a Gemma, whose heads are large, has 4 million parameters. One of many experts would take half a minute.
_MOST_PARAMETERS = 20_000_000


class SmallCopy(NamedTuple):
    """A small copy: a layer of each kind, at least two.

    Attributes:
        model: on the CPU, in fp32.
        layers: for each layer of the decoder, the number of the copy's layer that is of its kind.
    """

    model: PreTrainedModel
    layers: tuple[int, ...]


def small_copy(config: PretrainedConfig) -> SmallCopy:
    """A small copy of the config's decoder.

    Heads are as large as there, since angles are scaled by lists of that length; the rest is as small as that allows.

    Raises:
        ValueError, TypeError, RuntimeError, LookupError, AttributeError: the class takes no such sizes.
    """
    small = copy.deepcopy(config)
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    small.num_attention_heads = 2
    if kv_heads is not None:
        small.num_key_value_heads = 2 if kv_heads == heads else 1
    small.hidden_size = 2 * head_size
    small.intermediate_size = 3 * head_size
    layers = _cut_layers(small)
    small.vocab_size = _VOCABULARY
    for name in _TOKENS:
        if getattr(small, name, None) is not None:
            setattr(small, name, 0)
    if (number := _made(small, "meta").num_parameters()) > _MOST_PARAMETERS:
        raise ValueError(f"A small copy has {number:,} parameters.")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return SmallCopy(_made(small, "cpu").eval(), layers)


def _made(config: PretrainedConfig, device: str) -> PreTrainedModel:
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)


def _cut_layers(config: PretrainedConfig) -> tuple[int, ...]:
    """Leaves the first layer of each kind, by what the config's lists say of each; of one kind two."""
    number = config.num_hidden_layers
    lists = {name: value for name, value in vars(config).items() if isinstance(value, list) and len(value) == number}
    kinds = list(zip(*lists.values(), strict=True)) if lists else [()] * number
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    chosen = first if len(first) > 1 else first * 2
    config.num_hidden_layers = len(chosen)
    for name, value in lists.items():
        setattr(config, name, [value[layer] for layer in chosen])
    return tuple(first.index(kinds.index(kind)) for kind in kinds)
