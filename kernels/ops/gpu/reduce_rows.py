"""One number per row in one pass over it, in Triton: its squared norm, or whether it is not zero.

Both are one reduction. A small number's square can be zero, so the second cannot be read off the first.
Shapes: N rows, M columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_ROWS, BLOCK_COLUMNS = 4, 1024


@triton.jit
def _row_reduction_kernel(
    x_ptr,
    out_ptr,
    num_rows,
    num_columns,
    stride_xn,
    stride_xm,
    SQUARES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    # 64 bits: an offset may pass 2^31 elements, along either dimension.
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_COLUMNS).to(tl.int64)
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for begin in range(0, num_columns, BLOCK_COLUMNS):
        mask = (rows < num_rows)[:, None] & (begin + columns < num_columns)[None, :]
        offsets = rows[:, None] * stride_xn + (begin + columns)[None, :] * stride_xm
        values = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if SQUARES:
            total += values * values
        else:
            total += (values != 0.0).to(tl.float32)
    tl.store(out_ptr + rows, tl.sum(total, axis=1).to(out_ptr.dtype.element_ty), mask=rows < num_rows)


def row_norms(dout_NM: Tensor) -> Tensor:
    return _reduce(dout_NM, squares=True)


def nonzero_rows(dout_NM: Tensor) -> Tensor:
    return _reduce(dout_NM, squares=False) > 0


def _reduce(x_NM: Tensor, *, squares: bool) -> Tensor:
    num_rows, num_columns = x_NM.shape
    out_N = x_NM.new_empty(num_rows, dtype=torch.float32)
    if num_rows:
        _row_reduction_kernel[(triton.cdiv(num_rows, BLOCK_ROWS),)](
            x_NM,
            out_N,
            num_rows,
            num_columns,
            x_NM.stride(0),
            x_NM.stride(1),
            SQUARES=squares,
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_COLUMNS=min(BLOCK_COLUMNS, triton.next_power_of_2(max(num_columns, 1))),
        )
    return out_N
