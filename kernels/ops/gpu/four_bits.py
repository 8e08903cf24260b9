"""Dequantisation of weights in 4 bits, in Triton; `ops/quantised.py` has the formulas.

One launch writes the matrices of all projections of one input. A program writes a few blocks of one of them. Products
and sums are rounded one by one, as bitsandbytes rounds them, so they may not be fused.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ..quantised import FourBits

# Weights that a program writes, and its warps.
TILE, NUM_WARPS = 4096, 4


@triton.jit
def _dequantise_tile(
    packed_ptr,
    code_ptr,
    scales_ptr,
    scale_code_ptr,
    second_scales_ptr,
    offset_ptr,
    out_ptr,
    size,
    tile,
    BLOCK: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Writes BLOCKS blocks; SCALE_BLOCK is 0 if their scales are not quantised."""
    # 64 bits: an offset may pass 2^31 elements. What is left of the matrix after it is cut to one tile.
    begin = tile.to(tl.int64) * (BLOCKS * BLOCK)
    left = tl.minimum(size - begin, BLOCKS * BLOCK).to(tl.int32)
    blocks = tl.arange(0, BLOCKS)
    is_inside = blocks * BLOCK < left
    first = tile.to(tl.int64) * BLOCKS
    scales = tl.load(scales_ptr + first + blocks, mask=is_inside, other=0)
    if SCALE_BLOCK:
        second = tl.load(second_scales_ptr + (first + blocks) // SCALE_BLOCK, mask=is_inside, other=0.0)
        scales = tl.load(scale_code_ptr + scales.to(tl.int32)) * second + tl.load(offset_ptr)
    pairs = blocks[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    packed = tl.load(packed_ptr + begin // 2 + pairs, mask=pairs < left - left // 2, other=0).to(tl.int32)
    high = tl.load(code_ptr + (packed >> 4)) * scales[:, None]
    low = tl.load(code_ptr + (packed & 15)) * scales[:, None]
    weights = tl.interleave(high, low).to(out_ptr.dtype.element_ty)
    elements = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out_ptr + begin + elements, weights, mask=elements < left)


@triton.jit
def _dequantise_kernel(
    packed_ptrs,
    code_ptrs,
    scales_ptrs,
    scale_code_ptrs,
    second_scales_ptrs,
    offset_ptrs,
    out_ptrs,
    sizes,
    BLOCK: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    tile = tl.program_id(0)
    for part in tl.static_range(len(sizes)):
        num_tiles = tl.cdiv(sizes[part], BLOCKS * BLOCK)
        if (tile >= 0) & (tile < num_tiles):
            _dequantise_tile(
                packed_ptrs[part],
                code_ptrs[part],
                scales_ptrs[part],
                scale_code_ptrs[part],
                second_scales_ptrs[part],
                offset_ptrs[part],
                out_ptrs[part],
                sizes[part],
                tile,
                BLOCK,
                SCALE_BLOCK,
                BLOCKS,
            )
        # Below zero for the programs of parts that were written.
        tile -= num_tiles


def tensors_of(weights: Sequence[FourBits]) -> list[tuple[Tensor, ...]]:
    """The tensors of all weights as a kernel takes them: codes, table and scales, then what the scales stand for."""
    # Scales that are not quantised need no more tensors; any pointer will do.
    of_scales = [weight.of_scales[:3] if weight.of_scales else (weight.code,) * 3 for weight in weights]
    tensors = [(*weight[:3], *more) for weight, more in zip(weights, of_scales, strict=True)]
    return list(zip(*tensors, strict=True))


def dequantise(weights: Sequence[FourBits], parts: Sequence[Tensor]) -> None:
    """Writes each weight into its matrix, [M_i, K]; all weights have equal blocks."""
    first, sizes = weights[0], tuple(part.numel() for part in parts)
    blocks = max(1, TILE // first.block)
    _dequantise_kernel[(sum(triton.cdiv(size, blocks * first.block) for size in sizes),)](
        *tensors_of(weights),
        tuple(parts),
        sizes,
        BLOCK=first.block,
        SCALE_BLOCK=first.of_scales.block if first.of_scales else 0,
        BLOCKS=blocks,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
