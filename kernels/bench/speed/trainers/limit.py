"""The least time that a training step can take on a GPU: that of its arithmetic or of its memory traffic.

Arithmetic: 4 operations for each parameter and token with LoRA, in the forward pass and for the gradients of inputs,
and 2 more for those of all weights. Adapters are not counted, nor embeddings of which a text looks up few rows.

Memory traffic, in bytes: all weights are read forward and backward. Of what is trained, gradients are written and read,
weights and moments are read and written:

    2 weights + 2 (gradients + trained weights + moments)

A weight in bf16 takes 2 bytes and one in NF4 about 0.52. The two moments of a weight take 4 bytes in bf16, 8 in fp32,
and about 2 in 8 bits: 2 + 2 / 256 in ours, whose 256 elements share an exponent of a byte, 2 + 8 / 256 in
bitsandbytes', where they share a scale in fp32. Rows count the tensors that an optimizer really holds.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from sebp_edge.engine.models.four_bits import NF4_BYTES
from speed.trainers.work import Job, shape_config


@dataclass(frozen=True)
class Ceilings:
    """What a GPU can do in a second: operations of bf16 matrix products, and bytes read or written."""

    flops: float
    bytes: float


# Measured: an 8192^3 matrix product on random data, and a copy.
CEILINGS = {"NVIDIA H100 80GB HBM3": Ceilings(765e12, 3.0e12), "NVIDIA H200": Ceilings(788e12, 4.3e12)}


@dataclass(frozen=True)
class Size:
    """A base model's parameters, and the bytes of its weights as the trainers hold them."""

    parameters: int
    weight_bytes: float

    @classmethod
    def of(cls, job: Job) -> "Size":
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shape_config(job.shape))
        head = model.get_output_embeddings()
        looked_up = [each.weight for each in model.modules() if isinstance(each, nn.Embedding)]
        linear = sum(
            layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear) and layer is not head
        )
        parameters = sum(parameter.numel() for parameter in model.parameters())
        parameters -= sum(weight.numel() for weight in looked_up if weight is not head.weight)
        in_bf16 = parameters - linear if job.four_bit else parameters
        return cls(parameters, 2 * in_bf16 + NF4_BYTES * (parameters - in_bf16))


def limit_ms(size: Size, tokens: int, full: bool, trained_bytes: int, moments_bytes: int, ceilings: Ceilings) -> float:
    """The limit as defined in this module's docstring."""
    operations = (6 if full else 4) * size.parameters * tokens
    traffic = 2 * size.weight_bytes + 2 * (2 * trained_bytes + moments_bytes)
    return 1e3 * max(operations / ceilings.flops, traffic / ceilings.bytes)
