"""Which rows each of several adapters owns that lie side by side, and where its gradients go, in Triton.

Shapes: N rows, n adapters.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_N = 1024


@triton.jit
def own_range(ranges_ptr, adapter, num_rows):
    """The first row that may be the adapter's, and the one after the last; all rows if they have no owners."""
    begin = 0
    end = num_rows
    if ranges_ptr is not None:
        begin = tl.load(ranges_ptr + 2 * adapter)
        end = tl.load(ranges_ptr + 2 * adapter + 1)
    return begin, end


@triton.jit
def own_rows(owners_ptr, adapter, rows, num_rows):
    """Whether there is each row and, if rows have owners, the adapter owns it."""
    is_own = rows < num_rows
    if owners_ptr is not None:
        is_own &= tl.load(owners_ptr + rows, mask=is_own, other=-1) == adapter
    return is_own


@triton.jit
def add_at(place_ptr, elements, values, mask):
    """Adds to elements of what begins at a place, fp32, at a multiple of 16 bytes."""
    ptrs = tl.multiple_of(tl.load(place_ptr).to(tl.pointer_type(tl.float32)), 16) + elements
    tl.store(ptrs, tl.load(ptrs, mask=mask, other=0.0) + values, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _ranges_kernel(owners_ptr, ranges_ptr, num_rows, BLOCK_N: tl.constexpr):
    adapter = tl.program_id(0)
    begin, end = num_rows, 0
    for first in range(0, num_rows, BLOCK_N):
        rows = first + tl.arange(0, BLOCK_N)
        is_own = own_rows(owners_ptr, adapter, rows, num_rows)
        begin = tl.minimum(begin, tl.min(tl.where(is_own, rows, num_rows), axis=0))
        end = tl.maximum(end, tl.max(tl.where(is_own, rows + 1, 0), axis=0))
    tl.store(ranges_ptr + 2 * adapter, begin)
    tl.store(ranges_ptr + 2 * adapter + 1, end)


def ranges_of(owners_N: Tensor, num_adapters: int) -> Tensor:
    """The first row of each adapter and the one after its last, int32 [n, 2]."""
    ranges_n2 = owners_N.new_empty(num_adapters, 2, dtype=torch.int32)
    _ranges_kernel[(num_adapters,)](owners_N, ranges_n2, len(owners_N), BLOCK_N=BLOCK_N)
    return ranges_n2
