"""Fake quantisation: rounds weights to the grid of a quantised file, but keeps them in floating point.

    Q(x) = d q         (q4_0, q5_0, q8_0)      q: integers; d: a scale in fp16 for each block of 32
    Q(x) = d q + m     (q4_1, q5_1)            m: the block's smallest weight in fp16

These are the types of GGUF files, rounded as llama.cpp's reference rounds them. With a frozen weight W it writes
W + (Q(x) - x): if x is W with an adapter merged in, that is what W becomes for a forward pass through Q(x) whose
gradients pass straight through to the adapter (Bengio et al. 2013).

Shapes: M outputs, K inputs, G blocks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import backend

BLOCK = 32


class Grid(NamedTuple):
    """The integers of a type.

    Attributes:
        steps: a block's range, divided by the scale.
        fits: what the scale makes fit: the "largest" weight, which gets the lowest integer; its "magnitude"; or the
            "range" from the smallest weight.
    """

    steps: int
    fits: str


# By the type's name in lower case.
GRIDS = {
    "q4_0": Grid(8, "largest"),
    "q4_1": Grid(15, "range"),
    "q5_0": Grid(16, "largest"),
    "q5_1": Grid(31, "range"),
    "q8_0": Grid(127, "magnitude"),
}


@torch.no_grad()
def fake_quantise_(out_MK: Tensor, x_MK: Tensor, grid: str, weight_MK: Tensor | None = None) -> None:
    """Writes Q(x) into `out`, or W + (Q(x) - x) if a weight is given.

    Args:
        out_MK: contiguous, of any floating-point dtype; may be x.
        x_MK: contiguous, fp32.
        grid: a name of `GRIDS`.
        weight_MK: W, contiguous, of any floating-point dtype.

    Raises:
        ValueError: a tensor has another shape, dtype or memory layout than expected, or K is no multiple of 32.
    """
    tensors = [x_MK, out_MK, *([] if weight_MK is None else [weight_MK])]
    if x_MK.dtype != torch.float32 or not all(each.is_contiguous() for each in tensors):
        raise ValueError(f"Fake quantisation needs contiguous weights in fp32, not {x_MK.dtype}.")
    if len({each.shape for each in tensors}) > 1 or x_MK.shape[-1] % BLOCK:
        raise ValueError(f"Blocks of {BLOCK} do not divide weights of the shape {tuple(x_MK.shape)}, or shapes differ.")
    if x_MK.numel():
        blocks = [each.view(-1, BLOCK) for each in tensors]
        frozen = None if weight_MK is None else blocks[2]
        backend.implementation(x_MK, "fake_quantise").fake_quantise_(blocks[1], blocks[0], *GRIDS[grid], frozen)
        torch.autograd.graph.increment_version(out_MK)
