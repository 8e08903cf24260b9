"""Tiny Llamas in 4 bits, with an adapter on each projection."""

import pytest
import torch
from builders import make_llama
from peft import LoraConfig, get_peft_model
from torch import nn

bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install 'sebp-edge[4bit]'")


def in_4_bits(linear, compute_dtype, **changes):
    """Returns the layer with its weight in bitsandbytes' 4 bits."""
    options = {"quant_type": "nf4", "compute_dtype": compute_dtype} | changes
    packed = bnb.nn.Linear4bit(linear.in_features, linear.out_features, linear.bias is not None, **options)
    packed.load_state_dict(linear.state_dict())
    return packed.to(linear.weight.device)  # packs them


def four_bit_llama(compute_dtype=torch.float32, dtype=torch.float32, num_layers=2, sizes=None, **changes):
    """Makes a tiny Llama with every projection in 4 bits, and an adapter on each."""
    model = make_llama(attention_bias=True, num_hidden_layers=num_layers, **(sizes or {}))
    for block in model.model.layers:
        for part in (block.self_attn, block.mlp):
            for name, layer in list(part.named_children()):
                if type(layer) is nn.Linear:
                    nn.init.normal_(layer.weight, std=0.2)
                    part.add_module(name, in_4_bits(layer, compute_dtype, **changes))
    model.to(dtype)
    model.is_loaded_in_4bit = True
    config = LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, config)


def lora_layers(model):
    return [module for module in model.modules() if hasattr(module, "lora_A")]
