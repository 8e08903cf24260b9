"""Fake quantisation in one pass, in Triton; `ops/fake_quantise.py` has the formulas.

A program rounds a few blocks. Products and sums must be rounded one by one, as on the CPU where files are written, so
they may not be fused; and a quotient must be the nearest fp32 number.
"""

import triton
import triton.language as tl
from torch import Tensor

# Blocks of a program.
BLOCKS = 32


@triton.jit(do_not_specialize=["num_blocks"])
def _fake_quantise_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_blocks,
    STEPS: tl.constexpr,
    FITS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 64 bits: an offset may pass 2^31 elements.
    blocks = (tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS))[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    offsets, mask = blocks * BLOCK + columns, blocks < num_blocks
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    magnitude = tl.abs(x)
    if FITS == "range":
        low = tl.min(x, axis=1)[:, None]
        scale = tl.div_rn(tl.max(x, axis=1)[:, None] - low, STEPS * 1.0)
    elif FITS == "largest":
        first = tl.argmax(magnitude, axis=1, tie_break_left=True)[:, None]
        scale = tl.sum(tl.where(columns == first, x, 0.0), axis=1)[:, None] / -STEPS
    else:
        scale = tl.div_rn(tl.max(magnitude, axis=1)[:, None], STEPS * 1.0)
    stored = scale.to(tl.float16).to(tl.float32)
    is_zero = stored == 0.0
    inverse = tl.where(is_zero, 0.0, tl.div_rn(1.0, tl.where(is_zero, 1.0, scale)))
    if FITS == "range":
        integers = tl.minimum(tl.floor((x - low) * inverse + 0.5), STEPS * 1.0)
        rounded = integers * stored + low.to(tl.float16).to(tl.float32)
    elif FITS == "largest":
        # Not negative, so that the floor cuts off the fraction.
        integers = tl.minimum(tl.floor(x * inverse + (STEPS + 0.5)), 2.0 * STEPS - 1.0) - STEPS
        rounded = integers * stored
    else:
        # Halves are rounded away from zero. Adding a half before the floor would round the number below it up too.
        scaled = magnitude * inverse
        floor = tl.floor(scaled)
        rounded = (floor + tl.floor(2.0 * (scaled - floor))) * stored
        rounded = tl.where(x < 0.0, -rounded, rounded)
    if HAS_WEIGHT:
        rounded = rounded - x + tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, rounded.to(out_ptr.dtype.element_ty), mask=mask)


def fake_quantise_(out_GB: Tensor, x_GB: Tensor, steps: int, fits: str, weight_GB: Tensor | None) -> None:
    """All must be contiguous and not empty."""
    num_blocks, block = x_GB.shape
    _fake_quantise_kernel[(triton.cdiv(num_blocks, BLOCKS),)](
        x_GB,
        x_GB if weight_GB is None else weight_GB,
        out_GB,
        num_blocks,
        STEPS=steps,
        FITS=fits,
        HAS_WEIGHT=weight_GB is not None,
        BLOCKS=BLOCKS,
        BLOCK=block,
        enable_fp_fusion=False,
    )
