"""A base model in 4 bits, and the same weights in full precision for the reference.

As in QLoRA (Dettmers et al. 2023): linear layers are in NF4 with quantised scales, except the head.
"""

import torch
from torch import nn


def quantise_(model: nn.Module) -> None:
    """Replaces the linear layers by bitsandbytes' 4-bit layers, as transformers does while it loads a model."""
    from bitsandbytes.nn import Linear4bit

    for parent, name, layer in _linear_layers(model):
        options = {"compute_dtype": layer.weight.dtype, "compress_statistics": True, "quant_type": "nf4"}
        packed = Linear4bit(layer.in_features, layer.out_features, bias=False, device="meta", **options)
        packed.weight = _quantised(layer.weight)
        setattr(parent, name, packed)
    # PEFT asks the model for this.
    model.is_loaded_in_4bit = True


@torch.no_grad()
def round_(model: nn.Module) -> None:
    """Gives the linear layers the values that are left of their weights in 4 bits."""
    from bitsandbytes.functional import dequantize_4bit

    for _, _, layer in _linear_layers(model):
        weight = _quantised(layer.weight)
        layer.weight.copy_(dequantize_4bit(weight.data, weight.quant_state))


def _quantised(weight: nn.Parameter):
    from bitsandbytes.nn import Params4bit

    found = Params4bit(weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4")
    # Quantises.
    return found.to(weight.device)


def _linear_layers(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """The linear layers except the head, all without biases: the parent of each, its name there, and the layer."""
    head = model.get_output_embeddings()
    return [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if type(layer) is nn.Linear and layer is not head
    ]
