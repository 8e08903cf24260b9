"""Rows moved at memory speed, in Triton.

    gather     out[a] = x[rows[a]]                                              [A, K]
    scatter    out[rows[a]] = x[a], every other row of out is zero              [N, K], each element written once

The scatter needs no zero-filled output: each program owns a block of output rows, and finds by bisection in the sorted
ids which of them are active. Shapes: N rows, A active rows, K columns.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK_ROWS, BLOCK_COLUMNS = 8, 512


@triton.jit
def _gather_rows_kernel(
    x_ptr, rows_ptr, out_ptr, num_active, num_columns, stride_xn, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    active = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    mask = (active < num_active)[:, None] & (columns < num_columns)[None, :]
    # 64 bits: a row's offset may pass 2^31 elements.
    rows = tl.load(rows_ptr + active, mask=active < num_active, other=0).to(tl.int64)
    values = tl.load(x_ptr + rows[:, None] * stride_xn + columns[None, :], mask=mask)
    tl.store(out_ptr + active.to(tl.int64)[:, None] * num_columns + columns[None, :], values, mask=mask)


@triton.jit
def _scatter_rows_kernel(
    x_ptr,
    rows_ptr,
    out_ptr,
    num_active,
    num_rows,
    num_columns,
    BISECTIONS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    # The first position whose id is not below the row: it holds the row itself, or the row is not active.
    low = tl.zeros([BLOCK_ROWS], tl.int32)
    high = tl.zeros([BLOCK_ROWS], tl.int32) + num_active
    for _ in tl.static_range(BISECTIONS):
        middle = (low + high) // 2
        searching = low < high
        below = tl.load(rows_ptr + middle, mask=searching, other=0) < rows
        low = tl.where(searching & below, middle + 1, low)
        high = tl.where(searching & (below == 0), middle, high)
    found = tl.load(rows_ptr + low, mask=low < num_active, other=-1) == rows
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    source = x_ptr + low.to(tl.int64)[:, None] * num_columns + columns[None, :]
    values = tl.load(source, mask=inside & found[:, None], other=0.0)
    tl.store(out_ptr + rows.to(tl.int64)[:, None] * num_columns + columns[None, :], values, mask=inside)


def gather_rows(x_NK: Tensor, rows_A: Tensor) -> Tensor:
    """X[A]; [A, K], contiguous."""
    x_NK = x_NK if x_NK.stride(1) == 1 else x_NK.contiguous()
    out_AK = x_NK.new_empty(len(rows_A), x_NK.shape[1])
    if out_AK.numel():
        _gather_rows_kernel[_grid(*out_AK.shape)](
            x_NK, rows_A, out_AK, *out_AK.shape, x_NK.stride(0), BLOCK_ROWS=BLOCK_ROWS, BLOCK_COLUMNS=BLOCK_COLUMNS
        )
    return out_AK


def scatter_rows(x_AK: Tensor, rows_A: Tensor, num_rows: int) -> Tensor:
    """A matrix of `num_rows` rows with x's at the ids `rows_A` (increasing), zeros elsewhere; [N, K]."""
    x_AK = x_AK.contiguous()
    out_NK = x_AK.new_empty(num_rows, x_AK.shape[1])
    if out_NK.numel():
        _scatter_rows_kernel[_grid(*out_NK.shape)](
            x_AK,
            rows_A,
            out_NK,
            len(rows_A),
            *out_NK.shape,
            BISECTIONS=len(rows_A).bit_length(),
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_COLUMNS=BLOCK_COLUMNS,
        )
    return out_NK


def _grid(num_rows: int, num_columns: int) -> tuple[int, int]:
    return triton.cdiv(num_rows, BLOCK_ROWS), triton.cdiv(num_columns, BLOCK_COLUMNS)
