"""RMSNorm and its gradient, in Triton: a program holds a whole row, or several short ones, in registers.

For dw each program sums its share of the rows, and a second launch their sums, in a fixed order, so that two runs are
bitwise equal. Two strides address the rows, as a view [A, H, E] into a wider [A, M] needs.
Shapes: N rows, D columns.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements per program if rows are short; most programs that share the rows of dw.
BLOCK_ELEMENTS, MAX_SHARES = 1024, 256


@triton.jit
def _row_offsets(rows, inner, stride_outer, stride_inner):
    # 64 bits: an offset may pass 2^31 elements.
    return (rows // inner).to(tl.int64)[:, None] * stride_outer + (rows % inner).to(tl.int64)[:, None] * stride_inner


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    rstd_ptr,
    num_rows,
    num_columns,
    x_inner,
    stride_x_outer,
    stride_x_inner,
    eps,
    offset,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    x_offsets = _row_offsets(rows, x_inner, stride_x_outer, stride_x_inner) + columns[None, :]
    x = tl.load(x_ptr + x_offsets, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < num_columns, other=0.0).to(tl.float32) + offset
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / num_columns + eps)
    out = x * rstd[:, None] * weight[None, :]
    tl.store(rstd_ptr + rows, rstd, mask=rows < num_rows)
    out_offsets = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_backward_kernel(
    dout_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    dweights_ptr,
    num_rows,
    num_columns,
    rows_per_share,
    dout_inner,
    stride_dout_outer,
    stride_dout_inner,
    x_inner,
    stride_x_outer,
    stride_x_inner,
    offset,
    NEEDS_DWEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    columns = tl.arange(0, BLOCK_D)
    has_column = columns < num_columns
    weight = tl.load(weight_ptr + columns, mask=has_column, other=0.0).to(tl.float32) + offset
    dweight = tl.zeros((BLOCK_D,), tl.float32)
    first = tl.program_id(0) * rows_per_share
    for begin in range(first, tl.minimum(first + rows_per_share, num_rows), BLOCK_N):
        rows = begin + tl.arange(0, BLOCK_N)
        mask = (rows < num_rows)[:, None] & has_column[None, :]
        dout_offsets = _row_offsets(rows, dout_inner, stride_dout_outer, stride_dout_inner) + columns[None, :]
        x_offsets = _row_offsets(rows, x_inner, stride_x_outer, stride_x_inner) + columns[None, :]
        dout = tl.load(dout_ptr + dout_offsets, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + x_offsets, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < num_rows, other=0.0)
        normal = x * rstd[:, None]
        if NEEDS_DWEIGHT:
            dweight += tl.sum(dout * normal, axis=0)
        dnormal = dout * weight[None, :]
        mean = tl.sum(dnormal * normal, axis=1) / num_columns
        dx = (dnormal - normal * mean[:, None]) * rstd[:, None]
        dx_offsets = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
        tl.store(dx_ptr + dx_offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEEDS_DWEIGHT:
        dweight_ptrs = dweights_ptr + tl.program_id(0).to(tl.int64) * num_columns + columns
        tl.store(dweight_ptrs, dweight, mask=has_column)


class _Rows(NamedTuple):
    """A tensor whose row n begins at (n // inner) * stride_outer + (n % inner) * stride_inner."""

    tensor: Tensor
    inner: int
    stride_outer: int
    stride_inner: int


def _rows(x: Tensor) -> _Rows:
    """x's rows, in place if two strides can address them, else of a contiguous copy."""
    # (size, stride) from the inside out; dimensions that one stride runs through are merged.
    levels: list[tuple[int, int]] = []
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if levels and stride == levels[-1][0] * levels[-1][1]:
            levels[-1] = (levels[-1][0] * size, levels[-1][1])
        elif size > 1:
            levels.append((size, stride))
    if len(levels) > 2 or (x.stride(-1) != 1 and x.shape[-1] > 1):
        return _rows(x.contiguous())
    if len(levels) == 2:
        return _Rows(x, levels[0][0], levels[1][1], levels[0][1])
    return _Rows(x, 1, levels[0][1] if levels else 0, 0)


def _blocks(num_columns: int) -> dict[str, int]:
    block_columns = triton.next_power_of_2(num_columns)
    return {
        "BLOCK_N": max(1, BLOCK_ELEMENTS // block_columns),
        "BLOCK_D": block_columns,
        "num_warps": min(16, max(4, block_columns // 512)),
    }


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    out, rstd = x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)
    num_rows, num_columns = rstd.numel(), x.shape[-1]
    if num_rows:
        blocks = _blocks(num_columns)
        rows = _rows(x)
        _rms_norm_kernel[(triton.cdiv(num_rows, blocks["BLOCK_N"]),)](
            rows.tensor, weight_D.contiguous(), out, rstd, num_rows, num_columns, *rows[1:], eps, offset, **blocks
        )
    return out, rstd


def rms_norm_backward(
    dout: Tensor, x: Tensor, weight_D: Tensor, rstd: Tensor, offset: float, *, needs_dweight: bool
) -> tuple[Tensor, Tensor | None]:
    dx = x.new_empty(x.shape)
    num_rows, num_columns = rstd.numel(), x.shape[-1]
    if num_rows == 0:
        return dx, torch.zeros_like(weight_D) if needs_dweight else None
    blocks = _blocks(num_columns)
    rows_per_share = blocks["BLOCK_N"]
    if needs_dweight:
        rows_per_share *= triton.cdiv(triton.cdiv(num_rows, rows_per_share), MAX_SHARES)
    num_shares = triton.cdiv(num_rows, rows_per_share)
    dweights = x.new_empty(num_shares, num_columns, dtype=torch.float32) if needs_dweight else rstd
    dout_rows, x_rows = _rows(dout), _rows(x)
    _rms_norm_backward_kernel[(num_shares,)](
        dout_rows.tensor,
        x_rows.tensor,
        weight_D.contiguous(),
        rstd,
        dx,
        dweights,
        num_rows,
        num_columns,
        rows_per_share,
        *dout_rows[1:],
        *x_rows[1:],
        offset,
        NEEDS_DWEIGHT=needs_dweight,
        **blocks,
    )
    return dx, dweights.sum(dim=0).to(weight_D.dtype) if needs_dweight else None
