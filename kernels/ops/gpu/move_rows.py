"""Gathers and scatters rows at memory speed, in Triton.

A scatter writes every row once, as the sum of the parts of a product whose contraction was split.
Shapes: N rows, A active rows, K columns, S parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_ROWS, BLOCK_COLUMNS = 8, 512
# Of a result of at most FEW_ROWS, so that it has enough programs for a GPU.
FEW_ROWS, FEW_BLOCK_ROWS = 256, 1


@triton.jit
def load_count(count_ptr, num_active):
    """The device's count, if there is one; else all."""
    count = num_active
    if count_ptr is not None:
        count = tl.load(count_ptr).to(tl.int32)
    return count


@triton.jit
def load_sum(pointers, mask, stride_of_parts, NUM_PARTS: tl.constexpr):
    """The sum of values that come in parts, in a fixed order and in their dtype."""
    total = tl.load(pointers, mask=mask, other=0.0)
    for _ in tl.static_range(1, NUM_PARTS):
        pointers += stride_of_parts
        total += tl.load(pointers, mask=mask, other=0.0)
    return total


@triton.jit(do_not_specialize=["num_active"])
def _gather_rows_kernel(
    x_ptr,
    ids_ptr,
    count_ptr,
    out_ptr,
    num_active,
    num_columns,
    stride_xn,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    active = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    count = load_count(count_ptr, num_active)
    # 64 bits: a row's offset may pass 2^31 elements.
    rows = tl.load(ids_ptr + active, mask=active < count, other=0).to(tl.int64)
    mask = (active < count)[:, None] & (columns < num_columns)[None, :]
    values = tl.load(x_ptr + rows[:, None] * stride_xn + columns[None, :], mask=mask, other=0.0)
    mask = (active < num_active)[:, None] & (columns < num_columns)[None, :]
    tl.store(out_ptr + active.to(tl.int64)[:, None] * num_columns + columns[None, :], values, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _scatter_rows_kernel(
    x_ptr,
    slots_ptr,
    out_ptr,
    num_rows,
    num_columns,
    stride_xs,
    stride_xa,
    NUM_PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    slots = rows
    if slots_ptr is not None:
        slots = tl.load(slots_ptr + rows, mask=rows < num_rows, other=-1)
    within = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    part_ptrs = x_ptr + slots.to(tl.int64)[:, None] * stride_xa + columns[None, :]
    active = within & (slots >= 0)[:, None]
    values = load_sum(part_ptrs, active, stride_xs, NUM_PARTS).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows.to(tl.int64)[:, None] * num_columns + columns[None, :], values, mask=within)


def gather_rows(x_NK: Tensor, ids_A: Tensor, count: Tensor | None = None) -> Tensor:
    x_NK = with_contiguous_rows(x_NK)
    out_AK = x_NK.new_empty(len(ids_A), x_NK.shape[1])
    if len(ids_A):
        _gather_rows_kernel[_grid(out_AK)](
            x_NK,
            ids_A,
            count,
            out_AK,
            len(ids_A),
            x_NK.shape[1],
            x_NK.stride(0),
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_COLUMNS=BLOCK_COLUMNS,
        )
    return out_AK


def scatter_rows(x_AK: Tensor, slots_N: Tensor) -> Tensor:
    x_AK = with_contiguous_rows(x_AK)
    return _scatter(x_AK[None], slots_N, x_AK.new_empty(len(slots_N), x_AK.shape[1]))


def sum_parts(parts_SAK: Tensor, slots_N: Tensor | None, dtype: torch.dtype, out_NK: Tensor | None = None) -> Tensor:
    """Sums contiguous fp32 parts in a fixed order, rounds to `dtype`, and scatters rows if slots are given."""
    if out_NK is None:
        num_rows = parts_SAK.shape[1] if slots_N is None else len(slots_N)
        out_NK = parts_SAK.new_empty(num_rows, parts_SAK.shape[2], dtype=dtype)
    return _scatter(parts_SAK, slots_N, out_NK)


def _scatter(parts_SAK: Tensor, slots_N: Tensor | None, out_NK: Tensor) -> Tensor:
    block_rows = FEW_BLOCK_ROWS if len(out_NK) <= FEW_ROWS else BLOCK_ROWS
    if len(out_NK):
        _scatter_rows_kernel[_grid(out_NK, block_rows)](
            parts_SAK,
            slots_N,
            out_NK,
            *out_NK.shape,
            parts_SAK.stride(0),
            parts_SAK.stride(1),
            NUM_PARTS=len(parts_SAK),
            BLOCK_ROWS=block_rows,
            BLOCK_COLUMNS=BLOCK_COLUMNS,
        )
    return out_NK


def _grid(out: Tensor, block_rows: int = BLOCK_ROWS) -> tuple[int, int]:
    return triton.cdiv(out.shape[0], block_rows), triton.cdiv(out.shape[1], BLOCK_COLUMNS)


def in_parts(matrix: Tensor) -> Tensor:
    """The parts whose sum is a matrix, [S, N, K], given them or the matrix itself."""
    return matrix if matrix.dim() == 3 else matrix[None]


def with_contiguous_rows(matrix: Tensor) -> Tensor:
    """The matrix itself if each row's elements are contiguous, else a copy in which they are."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()
