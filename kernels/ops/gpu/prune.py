"""N:M pruning in one pass over a weight, in Triton; `ops/prune.py` has the formulas.

A program ranks a few groups: a weight's rank is the number of others in its group that come before it. They are read
again one by one, from the cache, since all M² comparisons of a group at once would not fit into registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements that a program ranks.
TILE = 1024


@triton.jit
def _is_kept(weight_ptr, weight, groups, num_groups, n, columns, M: tl.constexpr):
    """Whether each weight of [groups, M] is one of the n largest of its group."""
    magnitude = tl.abs(weight)
    rank = tl.zeros(weight.shape, tl.int32)
    for other in range(M):
        rival = tl.abs(tl.load(weight_ptr + groups * M + other, mask=groups < num_groups, other=0.0))
        # A weight does not come before itself: neither `>` nor a later column.
        rank += tl.where(columns > other, rival >= magnitude, rival > magnitude).to(tl.int32)
    return rank < n


@triton.jit(do_not_specialize=["num_groups", "n"])
def _prune_kernel(
    weight_ptr, out_ptr, num_groups, n, decay, M: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr
):
    # 64 bits: an offset may pass 2^31 elements.
    groups = (tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS))[:, None]
    columns = tl.arange(0, BLOCK_M)[None, :]
    offsets, mask = groups * M + columns, (groups < num_groups) & (columns < M)
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0)
    is_kept = _is_kept(weight_ptr, weight, groups, num_groups, n, columns, M)
    # Plus zero, so that no pruned weight is -0.
    decayed = (weight.to(tl.float32) * decay + 0.0).to(weight.dtype)
    tl.store(out_ptr + offsets, tl.where(is_kept, weight, decayed), mask=mask)


@triton.jit(do_not_specialize=["num_groups", "n", "seed", "step"])
def _shrink_kernel(
    weight_ptr,
    num_groups,
    n,
    shrinkage,
    seed,
    step,
    M: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TO_BF16: tl.constexpr,
):
    groups = (tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS))[:, None]
    columns = tl.arange(0, BLOCK_M)[None, :]
    offsets, mask = groups * M + columns, (groups < num_groups) & (columns < M)
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0)
    # Other threads may have shrunk a pruned rival already; it still comes after every kept weight.
    is_kept = _is_kept(weight_ptr, weight, groups, num_groups, n, columns, M)
    shrunk = weight.to(tl.float32) * (1.0 - shrinkage)
    if TO_BF16:
        low = (offsets & 0xFFFFFFFF).to(tl.uint32)
        random, _, _, _ = tl.philox(seed, low, low * 0 + step, (offsets >> 32).to(tl.uint32), low * 0)
        bits = shrunk.to(tl.int32, bitcast=True)
        shrunk = ((bits + (random.to(tl.int32, bitcast=True) & 0xFFFF)) & -0x10000).to(tl.float32, bitcast=True)
    tl.store(weight_ptr + offsets, shrunk.to(weight.dtype), mask=mask & (is_kept == 0))


def prune_(out_GM: Tensor, weight_GM: Tensor, n: int, decay: float) -> None:
    """Both must be contiguous and not empty."""
    grid, sizes = _grid(weight_GM)
    _prune_kernel[grid](weight_GM, out_GM, len(weight_GM), n, decay, **sizes)


def shrink_pruned_(weight_GM: Tensor, n: int, shrinkage: float, seed: int, step: int) -> None:
    """The weight must be contiguous and not empty."""
    grid, sizes = _grid(weight_GM)
    to_bf16 = weight_GM.dtype == torch.bfloat16
    _shrink_kernel[grid](weight_GM, len(weight_GM), n, shrinkage, seed, step, **sizes, TO_BF16=to_bf16)


def _grid(weight_GM: Tensor) -> tuple[tuple[int], dict[str, int]]:
    num_groups, m = weight_GM.shape
    block_m = triton.next_power_of_2(m)
    groups = max(1, TILE // block_m)
    return (triton.cdiv(num_groups, groups),), {"M": m, "GROUPS": groups, "BLOCK_M": block_m}
