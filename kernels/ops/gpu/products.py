"""The products of a linear layer's backward pass, on rows that are not gathered first, in Triton.

    dx         dX[ids[a]] = dY[ids[a]] W        every other row of dX is zero                    [N, K]
    dweight    dW = sum over a of dY[ids[a]]ᵀ X[a]        db = sum over a of dY[ids[a]]      [M, K], [M]

Products read rows through their ids, and dX is written once: active rows by the programs of the product, zeros by extra
programs of the same launch. If only the device knows the number of rows, programs beyond it return, and sums over rows
stop there.

If the output has too few tiles to fill a GPU, the contraction is split; the parts are added in fp32 in a fixed order,
so that two runs are bitwise equal. Shapes: N rows, A active rows, K inputs, M outputs, S splits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..rows import ActiveRows
from ..tiles import Tiles
from .move_rows import load_count, sum_parts, with_contiguous_rows

# Neighbouring tiles share their rows of dY in the L2 cache.
GROUP = 8
ZERO_ROWS, ZERO_COLUMNS = 128, 256


@triton.jit
def _tile_of(program, num_tiles_0, num_tiles_1, GROUP: tl.constexpr):
    """The tile of a program: GROUP tiles down, then the next column."""
    group = program // (GROUP * num_tiles_1)
    height = tl.minimum(num_tiles_0 - group * GROUP, GROUP)
    within = program % (GROUP * num_tiles_1)
    return group * GROUP + within % height, within // height


@triton.jit(do_not_specialize=["num_active", "num_rows", "num_programs", "splits"])
def _dx_kernel(
    dout_ptr,
    weight_ptr,
    ids_ptr,
    slots_ptr,
    count_ptr,
    out_ptr,
    num_active,
    num_rows,
    num_inputs,
    num_outputs,
    num_programs,
    splits,
    stride_dn,
    stride_wm,
    IS_SPLIT: tl.constexpr,
    IS_EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ZERO_ROWS: tl.constexpr,
    ZERO_COLUMNS: tl.constexpr,
):
    program = tl.program_id(0)
    if program >= num_programs:
        # Only without splits: these programs write zeros to the rows that are not active.
        num_zero_columns = tl.cdiv(num_inputs, ZERO_COLUMNS)
        rows = (program - num_programs) // num_zero_columns * ZERO_ROWS + tl.arange(0, ZERO_ROWS)
        columns = (program - num_programs) % num_zero_columns * ZERO_COLUMNS + tl.arange(0, ZERO_COLUMNS)
        slots = tl.load(slots_ptr + rows, mask=rows < num_rows, other=0)
        zeros = tl.zeros((ZERO_ROWS, ZERO_COLUMNS), out_ptr.dtype.element_ty)
        zero_ptrs = out_ptr + rows.to(tl.int64)[:, None] * num_inputs + columns[None, :]
        tl.store(zero_ptrs, zeros, mask=(slots < 0)[:, None] & (columns < num_inputs)[None, :])
        return

    count = load_count(count_ptr, num_active)
    num_tiles_a, num_tiles_k = tl.cdiv(count, BLOCK_A), tl.cdiv(num_inputs, BLOCK_K)
    if program >= num_tiles_a * num_tiles_k * splits:
        return
    split = program // (num_tiles_a * num_tiles_k)
    tile_a, tile_k = _tile_of(program % (num_tiles_a * num_tiles_k), num_tiles_a, num_tiles_k, GROUP)
    active = tile_a * BLOCK_A + tl.arange(0, BLOCK_A)
    columns = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    terms = tl.arange(0, BLOCK_M)
    share = tl.cdiv(tl.cdiv(num_outputs, BLOCK_M), splits) * BLOCK_M
    begin = split * share
    end = tl.minimum(begin + share, num_outputs)
    # Slots beyond the count recompute row 0, which is not stored. 64 bits: offsets may pass 2^31.
    rows = tl.load(ids_ptr + active, mask=active < count, other=0).to(tl.int64)
    dout_ptrs = dout_ptr + begin + rows[:, None] * stride_dn + terms[None, :]
    weight_ptrs = weight_ptr + begin.to(tl.int64) * stride_wm + terms[:, None] * stride_wm + columns[None, :]
    total = tl.zeros((BLOCK_A, BLOCK_K), tl.float32)
    for term in range(begin, end, BLOCK_M):
        if IS_EVEN:
            dout = tl.load(dout_ptrs)
            weight = tl.load(weight_ptrs)
        else:
            dout = tl.load(dout_ptrs, mask=(terms < end - term)[None, :], other=0.0)
            inside = (terms < end - term)[:, None] & (columns < num_inputs)[None, :]
            weight = tl.load(weight_ptrs, mask=inside, other=0.0)
        total = tl.dot(dout, weight, total, input_precision=PRECISION)
        dout_ptrs += BLOCK_M
        weight_ptrs += BLOCK_M * stride_wm
    out_rows = active.to(tl.int64) + split.to(tl.int64) * num_active if IS_SPLIT else rows
    out_ptrs = out_ptr + out_rows[:, None] * num_inputs + columns[None, :]
    tl.store(
        out_ptrs,
        total.to(out_ptr.dtype.element_ty),
        mask=(active < count)[:, None] & (columns < num_inputs)[None, :],
    )


@triton.jit
def _store_dbias(
    dout_ptr,
    ids_ptr,
    dbias_ptr,
    begin,
    end,
    tile_k,
    outputs,
    out_offsets,
    num_outputs,
    stride_dn,
    BLOCK_A: tl.constexpr,
):
    """Sums dY's columns `outputs`, in the program of their first tile."""
    if tile_k == 0:
        sums = tl.zeros(outputs.shape, tl.float32)
        for first in range(begin, end, BLOCK_A):
            active = first + tl.arange(0, BLOCK_A)
            rows = tl.load(ids_ptr + active, mask=active < end, other=0).to(tl.int64)
            mask = (active < end)[:, None] & (outputs < num_outputs)[None, :]
            dout = tl.load(dout_ptr + rows[:, None] * stride_dn + outputs[None, :], mask=mask, other=0.0)
            sums += tl.sum(dout.to(tl.float32), axis=0)
        tl.store(dbias_ptr + out_offsets, sums.to(dbias_ptr.dtype.element_ty), mask=outputs < num_outputs)


@triton.jit(do_not_specialize=["num_active", "splits"])
def _dweight_kernel(
    dout_ptr,
    x_ptr,
    ids_ptr,
    count_ptr,
    dweight_ptr,
    dbias_ptr,
    num_active,
    num_inputs,
    num_outputs,
    splits,
    stride_dn,
    stride_xn,
    X_HAS_ALL_ROWS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_A: tl.constexpr,
):
    program = tl.program_id(0)
    num_tiles_m, num_tiles_k = tl.cdiv(num_outputs, BLOCK_M), tl.cdiv(num_inputs, BLOCK_K)
    split = program // (num_tiles_m * num_tiles_k)
    tile_m, tile_k = _tile_of(program % (num_tiles_m * num_tiles_k), num_tiles_m, num_tiles_k, GROUP)
    outputs = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    count = load_count(count_ptr, num_active)
    share = tl.cdiv(tl.cdiv(count, BLOCK_A), splits) * BLOCK_A
    begin = split * share
    end = tl.minimum(begin + share, count)
    total = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    active = begin + tl.arange(0, BLOCK_A)
    rows = tl.load(ids_ptr + active, mask=active < end, other=0).to(tl.int64)
    for _ in range(begin, end, BLOCK_A):
        inside = (active < end)[:, None]
        x_rows = rows if X_HAS_ALL_ROWS else active.to(tl.int64)
        dout_ptrs = dout_ptr + rows[:, None] * stride_dn + outputs[None, :]
        x_ptrs = x_ptr + x_rows[:, None] * stride_xn + columns[None, :]
        dout_mask = inside if IS_EVEN else inside & (outputs < num_outputs)[None, :]
        x_mask = inside if IS_EVEN else inside & (columns < num_inputs)[None, :]
        dout = tl.load(dout_ptrs, mask=dout_mask, other=0.0)
        x = tl.load(x_ptrs, mask=x_mask, other=0.0)
        total = tl.dot(tl.trans(dout), x, total, input_precision=PRECISION)
        # Load the next step's ids one step early: loads of tiles that wait for ids could not be kept in flight.
        active += BLOCK_A
        rows = tl.load(ids_ptr + active, mask=active < end, other=0).to(tl.int64)
    written = (outputs < num_outputs)[:, None] & (columns < num_inputs)[None, :]
    out_rows = outputs.to(tl.int64) + split.to(tl.int64) * num_outputs
    dweight_ptrs = dweight_ptr + out_rows[:, None] * num_inputs + columns[None, :]
    tl.store(dweight_ptrs, total.to(dweight_ptr.dtype.element_ty), mask=written)

    if dbias_ptr is not None:
        # A separate loop, so that the loop of the product is the same in all programs.
        _store_dbias(
            dout_ptr,
            ids_ptr,
            dbias_ptr,
            begin,
            end,
            tile_k,
            outputs,
            out_rows,
            num_outputs,
            stride_dn,
            BLOCK_A,
        )


def dx(dout_NM: Tensor, weight_MK: Tensor, rows: ActiveRows, tiles: Tiles) -> Tensor:
    """dX of the active rows, zero elsewhere; [N, K] in weight's dtype."""
    dout_NM, weight_MK = with_contiguous_rows(dout_NM), with_contiguous_rows(weight_MK)
    (num_rows, num_outputs), num_inputs, num_active = dout_NM.shape, weight_MK.shape[1], len(rows.ids)
    if tiles.splits == 1:
        out = weight_MK.new_empty(num_rows, num_inputs)
    else:
        out = weight_MK.new_empty(tiles.splits, num_active, num_inputs, dtype=torch.float32)
    num_programs = triton.cdiv(num_active, tiles.rows) * triton.cdiv(num_inputs, tiles.columns) * tiles.splits
    num_zero_programs = triton.cdiv(num_rows, ZERO_ROWS) * triton.cdiv(num_inputs, ZERO_COLUMNS)
    grid = num_programs + (num_zero_programs if tiles.splits == 1 else 0)
    if grid:
        _dx_kernel[(grid,)](
            dout_NM,
            weight_MK,
            rows.ids,
            rows.slots,
            rows.count,
            out,
            num_active,
            num_rows,
            num_inputs,
            num_outputs,
            num_programs,
            tiles.splits,
            dout_NM.stride(0),
            weight_MK.stride(0),
            IS_SPLIT=tiles.splits > 1,
            IS_EVEN=num_outputs % tiles.depth == 0 and num_inputs % tiles.columns == 0,
            PRECISION=_precision(),
            GROUP=GROUP,
            BLOCK_A=tiles.rows,
            BLOCK_K=tiles.columns,
            BLOCK_M=tiles.depth,
            ZERO_ROWS=ZERO_ROWS,
            ZERO_COLUMNS=ZERO_COLUMNS,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    return out if tiles.splits == 1 else sum_parts(out, rows.slots, weight_MK.dtype)


class ParameterGradients(NamedTuple):
    """Gradients of a layer's parameters; dbias is None unless requested."""

    dweight: Tensor
    dbias: Tensor | None


def dweight(
    dout_NM: Tensor, x: Tensor, rows: ActiveRows, tiles: Tiles, *, x_has_all_rows: bool, with_bias: bool
) -> ParameterGradients:
    """dW [M, K] and maybe db [M], in the dtype of X, which has the active rows only, [A, K], or all, [N, K]."""
    dout_NM, x = with_contiguous_rows(dout_NM), with_contiguous_rows(x)
    num_outputs, num_inputs = dout_NM.shape[1], x.shape[1]
    dtype = x.dtype if tiles.splits == 1 else torch.float32
    parts_SMK = x.new_empty(tiles.splits, num_outputs, num_inputs, dtype=dtype)
    bias_parts_S1M = x.new_empty(tiles.splits, 1, num_outputs, dtype=dtype) if with_bias else None
    grid = triton.cdiv(num_outputs, tiles.rows) * triton.cdiv(num_inputs, tiles.columns) * tiles.splits
    _dweight_kernel[(grid,)](
        dout_NM,
        x,
        rows.ids,
        rows.count,
        parts_SMK,
        bias_parts_S1M,
        len(rows.ids),
        num_inputs,
        num_outputs,
        tiles.splits,
        dout_NM.stride(0),
        x.stride(0),
        X_HAS_ALL_ROWS=x_has_all_rows,
        IS_EVEN=num_outputs % tiles.rows == 0 and num_inputs % tiles.columns == 0,
        PRECISION=_precision(),
        GROUP=GROUP,
        BLOCK_M=tiles.rows,
        BLOCK_K=tiles.columns,
        BLOCK_A=tiles.depth,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if tiles.splits == 1:
        return ParameterGradients(parts_SMK[0], bias_parts_S1M[0, 0] if with_bias else None)
    dbias = sum_parts(bias_parts_S1M, None, x.dtype)[0] if with_bias else None
    return ParameterGradients(sum_parts(parts_SMK, None, x.dtype), dbias)


def _precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
