"""AdamW of one tensor in one pass, in Triton; `ops/adamw.py` has the formula and the 8-bit codes.

A program updates one or four blocks of 256 elements, a warp each. With codes its instructions take longer than its
memory traffic, so they are few. Philox4x32-7 (Salmon et al. 2011), with index and step as its counter and the seed as
its key, gives each of eight neighbours 16 random bits for its weight. Its codes take the bits of products of two
neighbours' bits with odd numbers, which are as uniform: only those of one element's weight and codes are related.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..reference import BLOCK

# Codes have a sum over a block, for which several warps would wait for each other.
BLOCKS, BLOCKS_WITH_CODES = 4, 1
ROUNDS = tl.constexpr(7)
# 2^32 divided by the golden ratio, and a constant of Murmur's hash.
FIRST_ODD, SECOND_ODD = tl.constexpr(0x9E3779B1), tl.constexpr(0x85EBCA6B)


@triton.jit
def _decode(codes, exponents, SIGNED: tl.constexpr):
    """The fp32 values of 8-bit codes; 0 is zero, all others are the upper bits of fp32 relative to their block."""
    codes = codes.to(tl.int32)
    lowest = (exponents.to(tl.int32) - (15 if SIGNED else 31)) << 23
    bits = lowest + ((codes & 0x7F if SIGNED else codes) << 20)
    # Neither the code 0 nor those below fp32's normal numbers.
    bits = tl.where(bits > tl.maximum(lowest, 0), bits, 0)
    if SIGNED:
        bits |= (codes & 0x80) << 24
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _encode(values, random, SIGNED: tl.constexpr):
    """8-bit codes of [blocks, elements] values, stochastically rounded, and their blocks' exponents [blocks, 1].

    The bits below a code are 20, to which the random ones are aligned.
    """
    bits = values.to(tl.int32, bitcast=True)
    magnitudes = bits & 0x7FFFFFFF
    # NaN and infinity have an exponent of 255.
    largest = tl.minimum(tl.max(magnitudes, axis=1)[:, None], 0x7FF00000)
    # The exponent that the largest has if it is rounded up.
    exponents = (largest + 0xFFFFF) >> 23
    codes = magnitudes - ((exponents - (15 if SIGNED else 31)) << 23) + random
    if SIGNED:
        codes = tl.minimum(tl.maximum(codes, 0), 0x7FFFFFF) << 4
        codes = ((codes & 0x7FFFFFFF) | (bits & -0x80000000)).to(tl.uint32, bitcast=True) >> 24
    else:
        codes = tl.minimum(tl.maximum(codes >> 20, tl.minimum(magnitudes, 1)), 0xFF)
    return codes.to(tl.uint8), exponents.to(tl.uint8)


@triton.jit
def _random_for_codes(words, ODD: tl.constexpr):
    """16 random bits, and 4 more or zeros below them, for each of two neighbours: int32 [blocks, 2 words]."""
    low, high = (words * (ODD * 16 & 0xFFFFFFFF)) & 0xFFFF0, (words * ODD) >> 12
    return _interleave(low, high)


@triton.jit
def _interleave(low, high):
    return tl.join(low, high).reshape(low.shape[0], 2 * low.shape[1]).to(tl.int32, bitcast=True)


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

    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    gradient = tl.load(gradient_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_CODES:
        first_exponents = tl.load(exponents_ptr + blocks, mask=has_block, other=0)
        second_exponents = tl.load(exponents_ptr + num_blocks + blocks, mask=has_block, other=0)
        first = _decode(tl.load(first_ptr + offsets, mask=mask, other=0), first_exponents, True)
        second = _decode(tl.load(second_ptr + offsets, mask=mask, other=0), second_exponents, False)
    else:
        first = tl.load(first_ptr + offsets, mask=mask, other=0.0)
        second = tl.load(second_ptr + offsets, mask=mask, other=0.0)
    if HAS_FACTOR:
        gradient *= tl.load(factor_ptr)

    eighths = blocks * (BLOCK // 8) + tl.arange(0, BLOCK // 8)[None, :]
    low = (eighths & 0xFFFFFFFF).to(tl.uint32)
    step = low * 0 + tl.load(step_ptr).to(tl.uint32)
    one, other, third, fourth = tl.philox(seed, low, step, (eighths >> 32).to(tl.uint32), low * 0, ROUNDS)
    words = tl.join(tl.join(one, third), tl.join(other, fourth)).reshape(BLOCKS, BLOCK // 2)

    first = first * beta1 + gradient * one_minus_beta1
    second = second * beta2 + gradient * gradient * one_minus_beta2
    learning_rate = tl.load(learning_rate_ptr)
    denominator = tl.sqrt(second) * tl.rsqrt(tl.load(corrections_ptr + 1)) + eps
    # Its square is the inverse, for half of the instructions of a division.
    root = tl.rsqrt(denominator)
    update = first * (learning_rate / tl.load(corrections_ptr)) * (root * root)
    weight = weight * (1.0 - learning_rate * weight_decay) - update

    if TO_BF16:
        bits = weight.to(tl.int32, bitcast=True)
        # Not NaN, which would overflow.
        bits = tl.where(weight == weight, bits + _interleave(words & 0xFFFF, words >> 16), bits)
        tl.store(weight_ptr + offsets, (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        tl.store(weight_ptr + offsets, weight, mask=mask)
    if HAS_CODES:
        first, first_exponents = _encode(first, _random_for_codes(words, FIRST_ODD), True)
        second, second_exponents = _encode(second, _random_for_codes(words, SECOND_ODD), False)
        tl.store(exponents_ptr + blocks, first_exponents, mask=has_block)
        tl.store(exponents_ptr + num_blocks + blocks, second_exponents, mask=has_block)
    tl.store(first_ptr + offsets, first, mask=mask)
    tl.store(second_ptr + offsets, second, mask=mask)


def adamw_(weight: Tensor, gradient: Tensor, moments, adamw, seed: int, factor: Tensor | None) -> None:
    """Weight, gradient and moments must be contiguous and not empty."""
    num_blocks = triton.cdiv(weight.numel(), BLOCK)
    (beta1, beta2), has_codes = adamw.betas, moments.exponents is not None
    blocks = BLOCKS_WITH_CODES if has_codes else BLOCKS
    _adamw_kernel[(triton.cdiv(num_blocks, blocks),)](
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
        BLOCKS=blocks,
        BLOCK=BLOCK,
        num_warps=blocks,
    )
