"""Which rows belong to each of several adapters that lie side by side, and where its gradients go, in Triton.

Adapter i owns the rows from `cu_owned[i]` to `cu_owned[i + 1]`; those after all of them are filler and have no adapter.
"""

import triton
import triton.language as tl
from torch import Tensor


def count_adapters(cu_owned: Tensor | None) -> int:
    """How many adapters own rows; one, which owns all, if that is None."""
    return 1 if cu_owned is None else len(cu_owned) - 1


@triton.jit
def own_range(cu_owned_ptr, adapter, num_adapters, num_rows):
    """The first row of an adapter and the one after its last; of adapter `num_adapters`, the filler's."""
    begin, end = 0, num_rows
    if cu_owned_ptr is not None:
        begin = tl.load(cu_owned_ptr + adapter)
        end = tl.load(cu_owned_ptr + adapter + 1, mask=adapter < num_adapters, other=num_rows)
    return begin, end


@triton.jit
def own_block(cu_owned_ptr, block, num_rows, NUM_ADAPTERS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The adapter of a block of rows, the block's first row, and the row after the adapter's last.

    Each adapter's rows begin a block, and so does the filler, so there are up to `NUM_ADAPTERS` blocks more.
    """
    adapter, first, end = 0, block * BLOCK_N, num_rows
    if cu_owned_ptr is not None:
        first, before = num_rows, 0
        for each in tl.static_range(NUM_ADAPTERS + 1):
            own_begin, own_end = own_range(cu_owned_ptr, each, NUM_ADAPTERS, num_rows)
            num_blocks = tl.cdiv(own_end - own_begin, BLOCK_N)
            is_own = (block >= before) & (block < before + num_blocks)
            adapter = tl.where(is_own, each, adapter)
            first = tl.where(is_own, own_begin + (block - before) * BLOCK_N, first)
            end = tl.where(is_own, own_end, end)
            before += num_blocks
    return adapter, first, end


@triton.jit
def place_of(places_ptr, adapter):
    """Where the gradients of an adapter begin, at a multiple of 16 bytes."""
    return tl.multiple_of(tl.load(places_ptr + adapter).to(tl.pointer_type(tl.float32)), 16)
