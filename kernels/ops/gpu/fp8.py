"""Products with weights in FP8, in three launches: rows are quantised, cuBLASLt multiplies, and a kernel finishes.

    P = X₈ Cᵀ                                           out = s diag(t) P + the small product + b

Scales stay outside of the product, since cuBLASLt takes one for each row on Hopper only.
Shapes: N rows, K terms of the contraction, M columns of the product, R rank.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from ..quantised import MAX_COLUMNS, Fp8Rows
from . import gemm
from .lora import BLOCK_M, MAX_PROJECTIONS, ends_of, num_tiles, rank_block, tile_columns
from .move_rows import with_contiguous_rows

# Of e4m3; and the least magnitude that a scale stands for, so that no row divides by zero.
LARGEST, LEAST = tl.constexpr(448.0), tl.constexpr(2.0**-100)
# Rows that a program finishes; of few rows fewer, so that there are enough programs. More would leave too few at once.
FEW_ROWS, FEW_BLOCK_N, BLOCK_N, MAX_BLOCK_R = 128, 16, 32, 64


@triton.jit
def scale_and_inverse(largest):
    """The scale of rows by their largest magnitudes, and its inverse."""
    # Ignores NaN, which keeps its own code; the codes of a row with infinity are NaN and zero.
    largest = tl.maximum(largest, LEAST)
    return tl.div_rn(largest, LARGEST), tl.div_rn(LARGEST, largest)


@triton.jit
def _quantise_rows_kernel(
    x_ptr, codes_ptr, scales_ptr, num_columns, stride_xn, unit, BLOCK: tl.constexpr, FITS: tl.constexpr
):
    """Quantises one row; FITS if a block holds all of it."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xn
    codes_ptr += row * num_columns
    columns = tl.arange(0, BLOCK)
    values = tl.load(x_ptr + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
    magnitudes = tl.abs(values)
    if not FITS:
        for begin in range(BLOCK, num_columns, BLOCK):
            more = tl.load(x_ptr + begin + columns, mask=begin + columns < num_columns, other=0.0)
            magnitudes = tl.maximum(magnitudes, tl.abs(more.to(tl.float32)))
    scale, inverse = scale_and_inverse(tl.max(magnitudes, axis=0))
    tl.store(scales_ptr + row, scale * unit)
    tl.store(codes_ptr + columns, (values * inverse).to(codes_ptr.dtype.element_ty), mask=columns < num_columns)
    if not FITS:
        for begin in range(BLOCK, num_columns, BLOCK):
            more = tl.load(x_ptr + begin + columns, mask=begin + columns < num_columns, other=0.0).to(tl.float32)
            codes = (more * inverse).to(codes_ptr.dtype.element_ty)
            tl.store(codes_ptr + begin + columns, codes, mask=begin + columns < num_columns)


@triton.jit(do_not_specialize=["num_rows"])
def _finish_kernel(
    product_ptr,
    row_scales_ptr,
    left_ptr,
    right_ptr,
    bias_ptr,
    num_rows,
    num_columns,
    rank,
    stride_ln,
    stride_rm,
    stride_rr,
    scale,
    scaling,
    end_0,
    end_1,
    end_2,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Finishes a tile in place; BLOCK_R is 0 without a small product."""
    projection, begin, end = tile_columns(tl.program_id(1), end_0, end_1, end_2, BLOCK_M)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = begin + tl.arange(0, BLOCK_M)
    has_row, has_column = rows < num_rows, columns < end
    mask = has_row[:, None] & has_column[None, :]
    # 64 bits: an offset may pass 2^31 elements.
    product_ptrs = product_ptr + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    values = tl.load(product_ptrs, mask=mask, other=0.0).to(tl.float32)
    values *= (tl.load(row_scales_ptr + rows, mask=has_row, other=0.0) * scale)[:, None]
    if BLOCK_R:
        small = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        left_ptr += projection * rank
        for first in tl.range(0, rank, BLOCK_R, num_stages=1):
            ranks = first + tl.arange(0, BLOCK_R)
            has_rank = ranks < rank
            left = tl.load(
                left_ptr + rows.to(tl.int64)[:, None] * stride_ln + ranks[None, :],
                mask=has_row[:, None] & has_rank[None, :],
                other=0.0,
            )
            right = tl.load(
                right_ptr + columns[None, :] * stride_rm + ranks[:, None] * stride_rr,
                mask=has_column[None, :] & has_rank[:, None],
                other=0.0,
            )
            small = tl.dot(left, right, small, input_precision="ieee")
        values += scaling * small
    if bias_ptr is not None:
        values += tl.load(bias_ptr + columns, mask=has_column, other=0.0).to(tl.float32)[None, :]
    tl.store(product_ptrs, values.to(product_ptr.dtype.element_ty), mask=mask)


def quantise_rows(x_NK: Tensor, unit: float = 1.0) -> Fp8Rows:
    x_NK, (num_rows, num_columns) = with_contiguous_rows(x_NK), x_NK.shape
    codes_NK = torch.empty(num_rows, num_columns, dtype=torch.float8_e4m3fn, device=x_NK.device)
    scales_N = torch.empty(num_rows, dtype=torch.float32, device=x_NK.device)
    block = min(triton.next_power_of_2(num_columns), MAX_COLUMNS)
    if num_rows:
        _quantise_rows_kernel[(num_rows,)](
            x_NK,
            codes_NK,
            scales_N,
            num_columns,
            x_NK.stride(0),
            unit,
            BLOCK=block,
            FITS=num_columns <= block,
            num_warps=max(1, min(16, block // 1024)),
        )
    return Fp8Rows(codes_NK, scales_N)


def multiply_codes(x_codes_NK: Tensor, codes_MK: Tensor) -> Tensor:
    """Rounds to bf16, which has room for the largest sums."""
    product_NM = torch.empty(len(x_codes_NK), len(codes_MK), dtype=torch.bfloat16, device=codes_MK.device)
    if len(product_NM):
        gemm.multiply_(product_NM, x_codes_NK, codes_MK.T)
    return product_NM


def multiply_fp8_(
    out_NM: Tensor, x_in_fp8: Fp8Rows, codes_MK: Tensor, scale: float, small: tuple | None = None
) -> None:
    """`out` is contiguous, and in bf16."""
    left, right, bias, columns, scaling = small or (out_NM, out_NM, None, (len(codes_MK),), 1.0)
    if len(columns) > MAX_PROJECTIONS:
        reference.multiply_fp8_(out_NM, x_in_fp8, codes_MK, scale, small)
        return
    (x_codes_NK, x_scales_N), rank = x_in_fp8, right.shape[1]
    block_n = FEW_BLOCK_N if len(out_NM) <= FEW_ROWS else BLOCK_N
    if len(out_NM):
        gemm.multiply_(out_NM, x_codes_NK, codes_MK.T)
        _finish_kernel[triton.cdiv(len(out_NM), block_n), num_tiles(columns)](
            out_NM,
            x_scales_N,
            left,
            right,
            bias,
            *out_NM.shape,
            rank,
            left.stride(0),
            *right.stride(),
            scale,
            scaling,
            *ends_of(columns),
            BLOCK_N=block_n,
            BLOCK_M=BLOCK_M,
            BLOCK_R=0 if small is None else min(MAX_BLOCK_R, rank_block(rank)),
        )
