"""Rows moved at memory speed, in Triton.

    gather     out[a] = x[rows[a]]                                              [A, K]
    scatter    out[rows[a]] = x[a], every other row of out is zero              [N, K]

Shapes: N rows, A active rows, K columns.
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
    x_ptr, rows_ptr, out_ptr, num_active, num_columns, stride_xa, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    active = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    mask = (active < num_active)[:, None] & (columns < num_columns)[None, :]
    rows = tl.load(rows_ptr + active, mask=active < num_active, other=0).to(tl.int64)
    values = tl.load(x_ptr + active.to(tl.int64)[:, None] * stride_xa + columns[None, :], mask=mask)
    tl.store(out_ptr + rows[:, None] * num_columns + columns[None, :], values, mask=mask)


def gather_rows(x_NK: Tensor, rows_A: Tensor) -> Tensor:
    """X[A]; [A, K], contiguous."""
    out_AK = x_NK.new_empty(len(rows_A), x_NK.shape[1])
    _launch(_gather_rows_kernel, x_NK, rows_A, out_AK)
    return out_AK


def scatter_rows(x_AK: Tensor, rows_A: Tensor, num_rows: int) -> Tensor:
    """A matrix of `num_rows` rows with x's at the ids `rows_A`, zeros elsewhere; [N, K]."""
    out_NK = x_AK.new_zeros(num_rows, x_AK.shape[1])
    _launch(_scatter_rows_kernel, x_AK, rows_A, out_NK)
    return out_NK


def _launch(kernel, x: Tensor, rows_A: Tensor, out: Tensor) -> None:
    x = x if x.stride(1) == 1 else x.contiguous()
    grid = triton.cdiv(len(rows_A), BLOCK_ROWS), triton.cdiv(x.shape[1], BLOCK_COLUMNS)
    if len(rows_A):
        kernel[grid](
            x,
            rows_A,
            out,
            len(rows_A),
            x.shape[1],
            x.stride(0),
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_COLUMNS=BLOCK_COLUMNS,
        )
