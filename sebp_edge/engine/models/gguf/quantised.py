"""The types of a GGUF file's tensors, and their weights as floating-point numbers.

A quantised row consists of blocks of 32 or 256 weights: a few small integers each, and scales in fp16. All products and
sums are taken in fp32 in the order of llama.cpp's reference, so the results are bitwise equal to those of the package
`gguf`. Legend of shapes: G blocks of one chunk, S sub-blocks of a block.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# Blocks are dequantised in chunks of so many weights: fewer are slowed by the start of operations, more by the memory.
_CHUNK = 2**18


class QuantType(NamedTuple):
    """A tensor type that can be read.

    Attributes:
        weights, size: number of weights and of bytes in a block.
        dequantise: writes blocks, uint8 [G, size], to fp32 [G, weights]; None for types that torch has itself.
        dtype: the type in torch, for those.
    """

    name: str
    weights: int
    size: int
    dequantise: Callable[[Tensor, Tensor], None] | None = None
    dtype: torch.dtype | None = None


def dequantise(raw: Tensor, kind: QuantType, out: Tensor) -> Tensor:
    """Writes the weights of a tensor's bytes to `out`, and returns it.

    Args:
        raw: its bytes, uint8, contiguous.
        out: of any floating-point dtype, contiguous; weights are rounded to it from fp32.
    """
    flat = out.view(-1)
    if kind.dtype is not None:
        flat.copy_(raw.view(kind.dtype))
        return out
    step = _CHUNK // kind.weights
    blocks, weights = raw.view(-1, kind.size), flat.view(-1, kind.weights)
    chunk = torch.empty(min(step, len(blocks)), kind.weights)
    for part, target in zip(blocks.split(step), weights.split(step), strict=True):
        kind.dequantise(part, chunk[: len(part)])
        target.copy_(chunk[: len(part)])
    return out


def quantisation_of_head(quantisation: str) -> str:
    """Returns how files of a quantisation have the head, which is the embedding in many models."""
    return "q8_0" if quantisation.startswith(("q4", "q5")) else quantisation


def _fp16(blocks: Tensor, start: int) -> Tensor:
    """Returns a block's scale at byte `start`, fp32 [G, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _shifted(values: Tensor, shifts: range, mask: int) -> Tensor:
    """Splits bytes [G, R, K] into small integers [G, R, len(shifts), K], those of the lowest bits first."""
    shifts = torch.tensor(shifts, dtype=torch.uint8)[:, None]
    return (values.unsqueeze(2) >> shifts).bitwise_and_(mask)


def _nibbles(blocks: Tensor, start: int, length: int, out: Tensor) -> None:
    """Writes integers of 4 bits to `out`, fp32; in each run of `length` bytes, first the lower ones, then the upper."""
    packed = blocks[:, start : start + out.shape[1] // 2].reshape(len(blocks), -1, length)
    split = out.view(len(blocks), -1, 2, length)
    split[:, :, 0] = packed & 15
    split[:, :, 1] = packed >> 4


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks, 2, 16, out)
    out.sub_(8).mul_(_fp16(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks, 4, 16, out)
    out.mul_(_fp16(blocks, 0)).add_(_fp16(blocks, 2))


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks, 6, 16, out)
    out.add_(_fifth_bits(blocks, 2)).sub_(16).mul_(_fp16(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks, 8, 16, out)
    out.add_(_fifth_bits(blocks, 4)).mul_(_fp16(blocks, 0)).add_(_fp16(blocks, 2))


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """Returns 16 for each of 32 weights whose bit is set in four bytes, else 0: uint8 [G, 32]."""
    bits = _shifted(blocks[:, start : start + 4, None], range(8), 1)
    return bits.reshape(len(blocks), 32) << 4


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(_fp16(blocks, 0))


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns scales and minima of Q4_K's and Q5_K's sub-blocks, fp32 [G, 8, 1]; twelve bytes hold 6 bits each."""
    scales, minima, rest = blocks[:, 4:16].split(4, dim=1)
    scales = torch.cat((scales & 63, (rest & 15) | ((scales >> 2) & 48)), dim=1)
    minima = torch.cat((minima & 63, (rest >> 4) | ((minima >> 2) & 48)), dim=1)
    return (_fp16(blocks, 0) * scales)[..., None], (_fp16(blocks, 2) * minima)[..., None]


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    scales, minima = _k_scales(blocks)
    _nibbles(blocks, 16, 32, out)
    out.view(-1, 8, 32).mul_(scales).sub_(minima)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    scales, minima = _k_scales(blocks)
    _nibbles(blocks, 48, 32, out)
    bits = _shifted(blocks[:, None, 16:48], range(8), 1).view(-1, 8, 32) << 4
    out.view(-1, 8, 32).add_(bits).mul_(scales).sub_(minima)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks, 0, 64, out)
    bits = _shifted(blocks[:, 128:192].reshape(-1, 2, 32), range(0, 8, 2), 3) << 4
    scales = _fp16(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    out.add_(bits.view(-1, 256)).sub_(32)
    out.view(-1, 16, 16).mul_(scales[..., None])


def _q2_k(blocks: Tensor, out: Tensor) -> None:
    scales = blocks[:, :16]
    out.copy_(_shifted(blocks[:, 16:80].reshape(-1, 2, 32), range(0, 8, 2), 3).view(-1, 256))
    minima = (_fp16(blocks, 82) * (scales >> 4))[..., None]
    out.view(-1, 16, 16).mul_((_fp16(blocks, 80) * (scales & 15))[..., None]).sub_(minima)


def _q3_k(blocks: Tensor, out: Tensor) -> None:
    low = _shifted(blocks[:, None, 96:104], range(0, 8, 4), 15).view(-1, 16)
    high = _shifted(blocks[:, None, 104:108], range(0, 8, 2), 3).view(-1, 16)
    scales = _fp16(blocks, 108) * ((low | (high << 4)).float() - 32)
    # A weight whose bit is not set in the mask is lower by 4.
    bits = _shifted(blocks[:, None, :32], range(8), 1).view(-1, 256) << 2
    out.copy_(_shifted(blocks[:, 32:96].reshape(-1, 2, 32), range(0, 8, 2), 3).view(-1, 256))
    out.add_(bits).sub_(4)
    out.view(-1, 16, 16).mul_(scales[..., None])


# By the number that files give them.
TYPES = {
    0: QuantType("F32", 1, 4, dtype=torch.float32),
    1: QuantType("F16", 1, 2, dtype=torch.float16),
    2: QuantType("Q4_0", 32, 18, _q4_0),
    3: QuantType("Q4_1", 32, 20, _q4_1),
    6: QuantType("Q5_0", 32, 22, _q5_0),
    7: QuantType("Q5_1", 32, 24, _q5_1),
    8: QuantType("Q8_0", 32, 34, _q8_0),
    10: QuantType("Q2_K", 256, 84, _q2_k),
    11: QuantType("Q3_K", 256, 110, _q3_k),
    12: QuantType("Q4_K", 256, 144, _q4_k),
    13: QuantType("Q5_K", 256, 176, _q5_k),
    14: QuantType("Q6_K", 256, 210, _q6_k),
    30: QuantType("BF16", 1, 2, dtype=torch.bfloat16),
}
# Types that can only be named.
OTHER_TYPES = {
    **{9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S"},
    **{22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M"},
    **{34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}
