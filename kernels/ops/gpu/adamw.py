"""AdamW of one tensor in one pass, in Triton; `ops/adamw.py` has the formula and the 8-bit codes.

A program updates four blocks of 256 elements. Philox4x32-7 (Salmon et al. 2011), with index and step as its counter and
the seed as its key, gives each of four neighbours 32 random bits. The weight takes 16 of them. Both codes take the bits
of their product with an odd number, which is as uniform: only that of one element's weight and codes is related.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..reference import BLOCK

BLOCKS = 4
ROUNDS = tl.constexpr(7)
# 2^32 divided by the golden ratio.
ODD = tl.constexpr(0x9E3779B1)


@triton.jit
def _decode(codes, exponents, SIGNED: tl.constexpr):
    """The fp32 values of 8-bit codes; 0 is zero, all others are the upper bits of fp32 relative to their block."""
    codes = codes.to(tl.int32)
    magnitudes = codes & 0x7F if SIGNED else codes
    bits = ((exponents.to(tl.int32) - (15 if SIGNED else 31)) << 23) + (magnitudes << 20)
    values = tl.where((magnitudes > 0) & (bits > 0), bits, 0).to(tl.float32, bitcast=True)
    if SIGNED:
        values = tl.where(codes > 0x7F, -values, values)
    return values


@triton.jit
def _encode(values, random, SIGNED: tl.constexpr):
    """8-bit codes of [blocks, elements] values, stochastically rounded, and their blocks' exponents [blocks, 1]."""
    bits = values.to(tl.int32, bitcast=True)
    negative = bits < 0
    # NaN and infinity keep an exponent of 255, and no sum below overflows.
    bits = tl.minimum(bits & 0x7FFFFFFF, 0x7FF00000)
    # The exponent that the largest has if it is rounded up.
    exponents = (tl.max(bits, axis=1)[:, None] + 0xFFFFF) >> 23
    codes = ((bits + (random << 4)) >> 20) - ((exponents - (15 if SIGNED else 31)) << 3)
    if SIGNED:
        codes = tl.minimum(tl.maximum(codes, 0), 0x7F) + tl.where(negative, 0x80, 0)
    else:
        codes = tl.minimum(tl.maximum(codes, tl.where(bits > 0, 1, 0)), 0xFF)
    return codes.to(tl.uint8), exponents.to(tl.uint8)


@triton.jit(do_not_specialize=["seed", "num_blocks"])
def _adamw_kernel(
    weight_ptr,
    gradient_ptr,
    first_ptr,
    second_ptr,
    exponents_ptr,
    learning_rate_ptr,
    step_ptr,
    corrections_ptr,
    factor_ptr,
    seed,
    num_elements,
    num_blocks,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    weight_decay,
    HAS_CODES: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    TO_BF16: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 64 bits: an offset may pass 2^31 elements.
    blocks = (tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS))[:, None]
    offsets = blocks * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask, has_block = offsets < num_elements, blocks < num_blocks

    fours = blocks * (BLOCK // 4) + tl.arange(0, BLOCK // 4)[None, :]
    low = (fours & 0xFFFFFFFF).to(tl.uint32)
    step = low * 0 + tl.load(step_ptr).to(tl.uint32)
    one, other, third, fourth = tl.philox(seed, low, step, (fours >> 32).to(tl.uint32), low * 0, ROUNDS)
    random = tl.join(tl.join(one, third), tl.join(other, fourth)).reshape(BLOCKS, BLOCK)
    random_codes = (random * ODD).to(tl.int32, bitcast=True)
    random = random.to(tl.int32, bitcast=True)

    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    gradient = tl.load(gradient_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_FACTOR:
        gradient *= tl.load(factor_ptr)
    if HAS_CODES:
        first_exponents = tl.load(exponents_ptr + blocks, mask=has_block, other=0)
        second_exponents = tl.load(exponents_ptr + num_blocks + blocks, mask=has_block, other=0)
        first = _decode(tl.load(first_ptr + offsets, mask=mask, other=0), first_exponents, True)
        second = _decode(tl.load(second_ptr + offsets, mask=mask, other=0), second_exponents, False)
    else:
        first = tl.load(first_ptr + offsets, mask=mask, other=0.0)
        second = tl.load(second_ptr + offsets, mask=mask, other=0.0)

    first = first * beta1 + gradient * one_minus_beta1
    second = second * beta2 + gradient * gradient * one_minus_beta2
    learning_rate = tl.load(learning_rate_ptr)
    denominator = tl.sqrt(second * (1.0 / tl.load(corrections_ptr + 1))) + eps
    update = first * (1.0 / tl.load(corrections_ptr)) / denominator
    weight = weight * (1.0 - learning_rate * weight_decay) - learning_rate * update

    if TO_BF16:
        bits = weight.to(tl.int32, bitcast=True)
        rounded = ((bits + (random & 0xFFFF)) & -0x10000).to(tl.float32, bitcast=True)
        weight = tl.where((bits & 0x7F800000) != 0x7F800000, rounded, weight)
    tl.store(weight_ptr + offsets, weight.to(weight_ptr.dtype.element_ty), mask=mask)
    if HAS_CODES:
        first, first_exponents = _encode(first, random_codes & 0xFFFF, True)
        second, second_exponents = _encode(second, (random_codes >> 16) & 0xFFFF, False)
        tl.store(exponents_ptr + blocks, first_exponents, mask=has_block)
        tl.store(exponents_ptr + num_blocks + blocks, second_exponents, mask=has_block)
    tl.store(first_ptr + offsets, first, mask=mask)
    tl.store(second_ptr + offsets, second, mask=mask)


def adamw_(weight: Tensor, gradient: Tensor, moments, adamw, seed: int, factor: Tensor | None) -> None:
    """Weight, gradient and moments must be contiguous and not empty."""
    num_blocks = triton.cdiv(weight.numel(), BLOCK)
    (beta1, beta2), has_codes = adamw.betas, moments.exponents is not None
    _adamw_kernel[(triton.cdiv(num_blocks, BLOCKS),)](
        weight,
        gradient,
        moments.first,
        moments.second,
        # A placeholder that the kernel does not read; likewise for the factor.
        moments.exponents if has_codes else moments.first,
        adamw.learning_rate,
        adamw.step,
        adamw.corrections,
        adamw.learning_rate if factor is None else factor,
        seed,
        weight.numel(),
        num_blocks,
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        adamw.eps,
        adamw.weight_decay,
        HAS_CODES=has_codes,
        HAS_FACTOR=factor is not None,
        TO_BF16=weight.element_size() == 2,
        BLOCKS=BLOCKS,
        BLOCK=BLOCK,
    )
