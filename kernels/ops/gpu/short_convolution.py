"""The short convolution and its gradients, in Triton: one pass each; the backward pass recomputes the activation.

A program has a tile of rows and channels. It reads the rows around them again for each column of the weight, mostly
from cache. For dw and db each program sums its share of the rows, and a second launch their sums, in a fixed order, so
that two runs are bitwise equal.

`ops/short_convolution.py` has the formulas. Shapes: A rows, C channels, K columns of the weight.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gated import sigmoid_and_its_slope
from .move_rows import with_contiguous_rows

# Elements of a tile and most channels of it; most programs that share the rows of dw.
BLOCK_ELEMENTS, MAX_BLOCK_C, MAX_SHARES = 2048, 128, 256


@triton.jit
def _load_rows(ptr, rows, has_row, columns, has_column, stride):
    """Rows of a matrix in fp32; zero where there is none."""
    # 64 bits: an offset may pass 2^31 elements.
    offsets = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(ptr + offsets, mask=has_row[:, None] & has_column[None, :], other=0.0).to(tl.float32)


@triton.jit
def _convolved(
    x_ptr,
    weight_ptr,
    bias_ptr,
    rows,
    positions,
    columns,
    has_column,
    stride_x,
    HAS_BIAS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """z of these rows; `positions` is negative for those that do not exist."""
    z = tl.zeros((BLOCK_A, BLOCK_C), tl.float32)
    if HAS_BIAS:
        z += tl.load(bias_ptr + columns, mask=has_column, other=0.0).to(tl.float32)[None, :]
    for distance in tl.static_range(K):
        weight = tl.load(weight_ptr + columns * K + (K - 1 - distance), mask=has_column, other=0.0).to(tl.float32)
        x = _load_rows(x_ptr, rows - distance, positions >= distance, columns, has_column, stride_x)
        z += weight[None, :] * x
    return z


@triton.jit(do_not_specialize=["num_rows"])
def _short_convolution_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    positions_ptr,
    out_ptr,
    num_rows,
    num_channels,
    stride_x,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    K: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_A + tl.arange(0, BLOCK_A)
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    has_row, has_column = rows < num_rows, columns < num_channels
    positions = tl.load(positions_ptr + rows, mask=has_row, other=-1)
    out = _convolved(
        x_ptr, weight_ptr, bias_ptr, rows, positions, columns, has_column, stride_x, HAS_BIAS, K, BLOCK_A, BLOCK_C
    )
    if HAS_SILU:
        sigmoid, _ = sigmoid_and_its_slope(out, False)
        out *= sigmoid
    offsets = rows.to(tl.int64)[:, None] * num_channels + columns[None, :]
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=has_row[:, None] & has_column[None, :])


@triton.jit(do_not_specialize=["num_rows", "rows_per_share"])
def _short_convolution_backward_kernel(
    dout_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    positions_ptr,
    dx_ptr,
    dweights_ptr,
    num_rows,
    num_channels,
    rows_per_share,
    stride_dout,
    stride_x,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    NEEDS_DWEIGHT: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    has_column = columns < num_channels
    # The weight's columns from the last to the first; row K is the bias.
    sums = tl.arange(0, BLOCK_K)
    dweight = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
    first = tl.program_id(0) * rows_per_share
    for begin in range(first, tl.minimum(first + rows_per_share, num_rows), BLOCK_A):
        rows = begin + tl.arange(0, BLOCK_A)
        dx = tl.zeros((BLOCK_A, BLOCK_C), tl.float32)
        for distance in tl.static_range(K):
            # What the rows so far after these have read of them.
            readers = rows + distance
            positions = tl.load(positions_ptr + readers, mask=readers < num_rows, other=-1)
            reads = positions >= distance
            dz = _load_rows(dout_ptr, readers, reads, columns, has_column, stride_dout)
            if HAS_SILU:
                z = _convolved(
                    x_ptr,
                    weight_ptr,
                    bias_ptr,
                    readers,
                    tl.where(reads, positions, -1),
                    columns,
                    has_column,
                    stride_x,
                    HAS_BIAS,
                    K,
                    BLOCK_A,
                    BLOCK_C,
                )
                sigmoid, slope = sigmoid_and_its_slope(z, False)
                dz *= sigmoid * (1.0 + z * slope)
            weight = tl.load(weight_ptr + columns * K + (K - 1 - distance), mask=has_column, other=0.0)
            dx += weight.to(tl.float32)[None, :] * dz
            if NEEDS_DWEIGHT:
                x = _load_rows(x_ptr, rows, reads, columns, has_column, stride_x)
                dweight += tl.where(sums == distance, 1.0, 0.0)[:, None] * tl.sum(dz * x, axis=0)[None, :]
                if HAS_BIAS and distance == 0:
                    dweight += tl.where(sums == K, 1.0, 0.0)[:, None] * tl.sum(dz, axis=0)[None, :]
        offsets = rows.to(tl.int64)[:, None] * num_channels + columns[None, :]
        mask = (rows < num_rows)[:, None] & has_column[None, :]
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEEDS_DWEIGHT:
        to_share = dweights_ptr + tl.program_id(0).to(tl.int64) * (K + 1) * num_channels
        mask = (sums <= K)[:, None] & has_column[None, :]
        tl.store(to_share + sums[:, None] * num_channels + columns[None, :], dweight, mask=mask)


def _blocks(num_channels: int) -> dict[str, int]:
    block_channels = min(MAX_BLOCK_C, triton.next_power_of_2(num_channels))
    return {"BLOCK_A": min(64, BLOCK_ELEMENTS // block_channels), "BLOCK_C": block_channels, "num_warps": 8}


def short_convolution(
    x_AC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, positions_A: Tensor, activation: str | None
) -> Tensor:
    (num_rows, num_channels), x_AC = x_AC.shape, with_contiguous_rows(x_AC)
    out_AC = x_AC.new_empty(num_rows, num_channels)
    if out_AC.numel():
        blocks = _blocks(num_channels)
        grid = triton.cdiv(num_rows, blocks["BLOCK_A"]), triton.cdiv(num_channels, blocks["BLOCK_C"])
        _short_convolution_kernel[grid](
            x_AC,
            weight_CK.contiguous(),
            x_AC if bias_C is None else bias_C.contiguous(),
            positions_A,
            out_AC,
            num_rows,
            num_channels,
            x_AC.stride(0),
            HAS_BIAS=bias_C is not None,
            HAS_SILU=activation == "silu",
            K=weight_CK.shape[1],
            **blocks,
        )
    return out_AC


def short_convolution_backward(
    dout_AC: Tensor,
    x_AC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    positions_A: Tensor,
    activation: str | None,
    *,
    needs_dweight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    (num_rows, num_channels), num_columns = x_AC.shape, weight_CK.shape[1]
    dout_AC, x_AC = with_contiguous_rows(dout_AC), with_contiguous_rows(x_AC)
    dx_AC, blocks = x_AC.new_empty(num_rows, num_channels), _blocks(num_channels)
    rows_per_share = blocks["BLOCK_A"]
    if needs_dweight:
        rows_per_share *= triton.cdiv(triton.cdiv(num_rows, rows_per_share), MAX_SHARES)
    num_shares = triton.cdiv(num_rows, rows_per_share) if dx_AC.numel() else 0
    dweights = x_AC.new_empty(num_shares * needs_dweight, num_columns + 1, num_channels, dtype=torch.float32)
    if num_shares:
        _short_convolution_backward_kernel[(num_shares, triton.cdiv(num_channels, blocks["BLOCK_C"]))](
            dout_AC,
            x_AC,
            weight_CK.contiguous(),
            x_AC if bias_C is None else bias_C.contiguous(),
            positions_A,
            dx_AC,
            dweights,
            num_rows,
            num_channels,
            rows_per_share,
            dout_AC.stride(0),
            x_AC.stride(0),
            HAS_BIAS=bias_C is not None,
            HAS_SILU=activation == "silu",
            NEEDS_DWEIGHT=needs_dweight,
            K=num_columns,
            BLOCK_K=triton.next_power_of_2(num_columns + 1),
            **blocks,
        )
    if not needs_dweight:
        return dx_AC, None, None
    *dweight_KC, dbias_C = dweights.sum(dim=0)
    dweight_CK = torch.stack(dweight_KC[::-1], dim=1).to(weight_CK.dtype)
    return dx_AC, dweight_CK, None if bias_C is None else dbias_C.to(bias_C.dtype)
