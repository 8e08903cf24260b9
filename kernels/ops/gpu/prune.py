"""N:M pruning in one pass over a weight, in Triton; `ops/prune.py` has the formulas.

A program ranks a few groups: a weight's rank is the number of others in its group that come before it. They are read
again one by one, from the cache, since all M² comparisons of a group at once would not fit into registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of a program.
TILE = 1024


@triton.jit(do_not_specialize=["num_groups", "n"])
def _prune_kernel(
    weight_ptr, out_ptr, num_groups, n, decay, M: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr
):
    # 64 bits: an offset may pass 2^31 elements.
    groups = (tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS))[:, None]
    columns = tl.arange(0, BLOCK_M)[None, :]
    offsets, mask = groups * M + columns, (groups < num_groups) & (columns < M)
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0)
    magnitude = tl.abs(weight)
    rank = tl.zeros(weight.shape, tl.int32)
    for other in range(M):
        rival = tl.abs(tl.load(weight_ptr + groups * M + other, mask=groups < num_groups, other=0.0))
        # A weight does not come before itself: neither `>` nor a later column.
        rank += tl.where(columns > other, rival >= magnitude, rival > magnitude).to(tl.int32)
    # Plus zero, so that no pruned weight is -0.
    decayed = (weight.to(tl.float32) * decay + 0.0).to(weight.dtype)
    tl.store(out_ptr + offsets, tl.where(rank < n, weight, decayed), mask=mask)


@triton.jit(do_not_specialize=["size", "seed", "step"])
def _shrink_kernel(weight_ptr, pruned_ptr, size, shrinkage, seed, step, BLOCK: tl.constexpr, TO_BF16: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pruned = tl.load(pruned_ptr + offsets, mask=offsets < size, other=1.0)
    weight = tl.load(weight_ptr + offsets, mask=offsets < size, other=0.0)
    shrunk = weight.to(tl.float32) * (1.0 - shrinkage)
    if TO_BF16:
        low = (offsets & 0xFFFFFFFF).to(tl.uint32)
        random, _, _, _ = tl.philox(seed, low, low * 0 + step, (offsets >> 32).to(tl.uint32), low * 0)
        bits = shrunk.to(tl.int32, bitcast=True)
        shrunk = ((bits + (random.to(tl.int32, bitcast=True) & 0xFFFF)) & -0x10000).to(tl.float32, bitcast=True)
    tl.store(weight_ptr + offsets, shrunk.to(weight.dtype), mask=(offsets < size) & (pruned == 0.0))


def prune_(out_GM: Tensor, weight_GM: Tensor, n: int, decay: float) -> None:
    """Both must be contiguous and not empty."""
    num_groups, m = weight_GM.shape
    block_m = triton.next_power_of_2(m)
    groups = max(1, TILE // block_m)
    grid = (triton.cdiv(num_groups, groups),)
    _prune_kernel[grid](weight_GM, out_GM, num_groups, n, decay, M=m, GROUPS=groups, BLOCK_M=block_m)


def shrink_pruned_(weight_P: Tensor, pruned_P: Tensor, shrinkage: float, seed: int, step: int) -> None:
    """Both must be contiguous and not empty."""
    grid, to_bf16 = (triton.cdiv(weight_P.numel(), TILE),), weight_P.dtype == torch.bfloat16
    _shrink_kernel[grid](weight_P, pruned_P, weight_P.numel(), shrinkage, seed, step, BLOCK=TILE, TO_BF16=to_bf16)
