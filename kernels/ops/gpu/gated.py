"""The gate of an MLP and its gradient, in Triton: one pass each; the backward pass recomputes the activation.

With a LoRA adapter after the gate, the same pass adds the adapter's part of dy, U A, and computes dA = Uᵀ y, with y
recomputed tile by tile. A program has a tile of columns and a share of the rows; the shares' sums of dA are added in a
fixed order, so that two runs are bitwise equal. Where U comes with dy (`ops/joined_weight.py`), further programs
compute dB = s dYᵀ D; dY is the gradient of what the adapter's projection gives.

`ops/gated.py` has the formulas. Shapes: N rows, M columns, R rank, P outputs of the adapter.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from .lora import place_of, rank_block, sum_over_rows
from .move_rows import in_parts, load_sum, with_contiguous_rows

BLOCK_M = 1024
# A column of A. A program holds it for each of its columns, and more would not fit into 99 KB of shared memory.
MAX_RANK_BYTES = 512
# Tile and most programs of the kernel with an adapter: the fastest on an H100. Fewer rows in a share would save less
# time than the sum of the shares takes.
LORA_TILES, MAX_PROGRAMS, MIN_SHARE = {"BLOCK_N": 32, "BLOCK_M": 32, "num_warps": 4, "num_stages": 2}, 1024, 128
# Of at most FEW_ROWS, whose sums over rows have programs of their own, so that the others need not go through all rows.
FEW_ROWS, LORA_TILES_OF_FEW_ROWS = 128, {"BLOCK_N": 32, "BLOCK_M": 32, "num_warps": 4, "num_stages": 1}


@triton.jit
def sigmoid_and_its_slope(gate, IS_GELU: tl.constexpr):
    """σ(z), and the derivative of its logarithm, (1 - σ(z)) z'."""
    if IS_GELU:
        square = gate * gate
        z = 1.5957691216057308 * gate * (1.0 + 0.044715 * square)
        dz = 1.5957691216057308 * (1.0 + 0.134145 * square)
    else:
        z = gate
        dz = 1.0
    # Neither overflows, and neither cancels. A power of two and a squared root take fewer instructions than an
    # exponential and two divisions.
    small = tl.exp2(-1.4426950408889634 * tl.abs(z))
    root = tl.rsqrt(1.0 + small)
    inverse = root * root
    return tl.where(z >= 0.0, 1.0, small) * inverse, tl.where(z >= 0.0, small, 1.0) * inverse * dz


@triton.jit
def _gate_up_gradients(dout, gate, up, sigmoid, slope):
    return dout * up * sigmoid * (1.0 + gate * slope), dout * gate * sigmoid


@triton.jit
def _gated_kernel(
    gate_ptr, up_ptr, out_ptr, num_columns, stride_gate, stride_up, IS_GELU: tl.constexpr, BLOCK_M: tl.constexpr
):
    # 64 bits: an offset may pass 2^31 elements.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = columns < num_columns
    gate = tl.load(gate_ptr + row * stride_gate + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + columns, mask=mask, other=0.0).to(tl.float32)
    sigmoid, _ = sigmoid_and_its_slope(gate, IS_GELU)
    out = (gate * sigmoid * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * num_columns + columns, out, mask=mask)


@triton.jit
def _gated_backward_kernel(
    dout_ptr,
    gate_ptr,
    up_ptr,
    dgate_up_ptr,
    num_columns,
    stride_dout,
    stride_gate,
    stride_up,
    IS_GELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = columns < num_columns
    dout = tl.load(dout_ptr + row * stride_dout + columns, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * stride_gate + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + columns, mask=mask, other=0.0).to(tl.float32)
    sigmoid, slope = sigmoid_and_its_slope(gate, IS_GELU)
    dgate, dup = _gate_up_gradients(dout, gate, up, sigmoid, slope)
    dgate_up_ptrs = dgate_up_ptr + row * 2 * num_columns + columns
    tl.store(dgate_up_ptrs, dgate.to(dgate_up_ptr.dtype.element_ty), mask=mask)
    tl.store(dgate_up_ptrs + num_columns, dup.to(dgate_up_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_lora_backward_kernel(
    dout_ptr,
    place_ptr,
    lora_up_ptr,
    lora_a_ptr,
    gate_ptr,
    up_ptr,
    dgate_up_ptr,
    dloras_ptr,
    dnext_ptr,
    down_ptr,
    dlora_b_ptr,
    num_rows,
    num_columns,
    num_outputs,
    rank,
    rows_per_share,
    stride_dout_parts,
    stride_dout,
    stride_lora_up_parts,
    stride_lora_up,
    stride_lora_a,
    stride_gate,
    stride_up,
    stride_dnext,
    stride_down,
    scaling,
    NUM_PARTS: tl.constexpr,
    NUM_LORA_UP_PARTS: tl.constexpr,
    SUMS_APART: tl.constexpr,
    IS_GELU: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    ranks, tiles_of_outputs = tl.arange(0, BLOCK_R), tl.cdiv(num_outputs, BLOCK_M)
    has_rank = ranks < rank
    if tl.program_id(0) < tiles_of_outputs:
        if tl.program_id(1) == 0:
            outputs = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
            has_output = outputs < num_outputs
            elements_of_b = outputs[:, None] * rank + ranks[None, :]
            mask_of_b = has_output[:, None] & has_rank[None, :]
            dlora_b = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
            if place_ptr is None:
                to_b = dlora_b_ptr + elements_of_b
            else:
                to_b = place_of(place_ptr) + rank * num_columns + elements_of_b
                dlora_b = tl.load(to_b, mask=mask_of_b, other=0.0)
            dlora_b += scaling * sum_over_rows(
                tl.zeros((BLOCK_M, BLOCK_R), tl.float32),
                dnext_ptr,
                down_ptr,
                num_rows,
                outputs,
                has_output,
                ranks,
                has_rank,
                stride_dnext,
                0,
                stride_down,
                1,
                BLOCK_N,
            )
            tl.store(to_b, dlora_b, mask=mask_of_b)
        return

    tile, share, first = tl.program_id(0) - tiles_of_outputs, tl.program_id(1), tl.program_id(1) * rows_per_share
    sums, has_rows, end = True, True, tl.minimum(first + rows_per_share, num_rows)
    if SUMS_APART:
        # Then a program of the first share has all rows, and computes dA only.
        num_tiles = tl.cdiv(num_columns, BLOCK_M)
        sums, has_rows, tile = tile < num_tiles, tile >= num_tiles, tile % num_tiles
        if sums:
            if share > 0:
                return
            end = num_rows
    columns = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    has_column = columns < num_columns
    lora_ranks, lora_mask = ranks.to(tl.int64)[:, None], has_rank[:, None] & has_column[None, :]
    lora_a = tl.load(lora_a_ptr + lora_ranks * stride_lora_a + columns[None, :], mask=lora_mask, other=0.0)
    dlora = tl.zeros((BLOCK_R, BLOCK_M), tl.float32)
    if place_ptr is None:
        to_a = dloras_ptr + share.to(tl.int64) * rank * num_columns
        to_a += lora_ranks * num_columns + columns[None, :]
    else:
        to_a = place_of(place_ptr) + ranks[:, None] * num_columns + columns[None, :]
        dlora = tl.load(to_a, mask=lora_mask, other=0.0)
    for begin in range(first, end, BLOCK_N):
        # 64 bits: an offset may pass 2^31 elements.
        rows = (begin + tl.arange(0, BLOCK_N)).to(tl.int64)
        has_row = rows < num_rows
        mask = has_row[:, None] & has_column[None, :]
        lora_up = load_sum(
            lora_up_ptr + rows[:, None] * stride_lora_up + ranks[None, :],
            has_row[:, None] & has_rank[None, :],
            stride_lora_up_parts,
            NUM_LORA_UP_PARTS,
        ).to(lora_a.dtype)
        gate = tl.load(gate_ptr + rows[:, None] * stride_gate + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + rows[:, None] * stride_up + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        dout = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        if has_rows:
            dout_ptrs = dout_ptr + rows[:, None] * stride_dout + columns[None, :]
            dout = load_sum(dout_ptrs, mask, stride_dout_parts, NUM_PARTS).to(tl.float32)
            dout = tl.dot(lora_up, lora_a, dout, input_precision="ieee")
        sigmoid, slope = sigmoid_and_its_slope(gate, IS_GELU)
        if sums:
            out = gate * sigmoid * up
            dlora = tl.dot(tl.trans(lora_up), out.to(lora_up.dtype), dlora, input_precision="ieee")
        if has_rows:
            dgate, dup = _gate_up_gradients(dout, gate, up, sigmoid, slope)
            dgate_up_ptrs = dgate_up_ptr + rows[:, None] * 2 * num_columns + columns[None, :]
            tl.store(dgate_up_ptrs, dgate.to(dgate_up_ptr.dtype.element_ty), mask=mask)
            tl.store(dgate_up_ptrs + num_columns, dup.to(dgate_up_ptr.dtype.element_ty), mask=mask)
    if sums:
        tl.store(to_a, dlora, mask=lora_mask)


def gated(gate_NM: Tensor, up_NM: Tensor, activation: str) -> Tensor:
    out_NM = gate_NM.new_empty(gate_NM.shape)
    if out_NM.numel():
        gate_NM, up_NM = with_contiguous_rows(gate_NM), with_contiguous_rows(up_NM)
        _gated_kernel[_grid(gate_NM)](
            gate_NM, up_NM, out_NM, gate_NM.shape[1], gate_NM.stride(0), up_NM.stride(0), **_options(activation)
        )
    return out_NM


def gated_backward(dout_NM: Tensor, gate_NM: Tensor, up_NM: Tensor, activation: str) -> Tensor:
    num_rows, num_columns = gate_NM.shape
    dgate_up_N2M = gate_NM.new_empty(num_rows, 2 * num_columns)
    if dgate_up_N2M.numel():
        dout_NM, gate_NM, up_NM = (with_contiguous_rows(x) for x in (dout_NM, gate_NM, up_NM))
        _gated_backward_kernel[_grid(gate_NM)](
            dout_NM,
            gate_NM,
            up_NM,
            dgate_up_N2M,
            num_columns,
            dout_NM.stride(0),
            gate_NM.stride(0),
            up_NM.stride(0),
            **_options(activation),
        )
    return dgate_up_N2M


def gated_lora_backward(
    dout_NM: Tensor, up_NR: Tensor, lora_A: Tensor, gate_NM: Tensor, up_NM: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """dA comes in fp32, unless plain PyTorch computes it, as for high ranks."""
    if len(lora_A) * lora_A.element_size() > MAX_RANK_BYTES:
        return reference.gated_lora_backward(dout_NM, up_NR, lora_A, gate_NM, up_NM, activation)
    # Of no outputs the kernel reads nothing that dB takes.
    dout_NM, up, no_outputs = with_contiguous_rows(dout_NM), with_contiguous_rows(up_NR), up_NR[:, :0]
    return joined_gated_backward(dout_NM, up, lora_A, gate_NM, up_NM, activation, no_outputs, up_NR, 1.0)[:2]


def joined_gated_backward(
    product: Tensor,
    up: Tensor,
    lora_A: Tensor,
    gate_NM: Tensor,
    up_NM: Tensor,
    activation: str,
    dnext_NP: Tensor,
    down_NR: Tensor,
    scaling: float,
    place: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The same from dY W and U, both maybe in parts; and dB, [P, R] in fp32.

    Gradients take their place (see `joined_backward`) only if one program has all rows of a column.
    """
    (num_rows, num_columns), rank, num_outputs = gate_NM.shape, len(lora_A), dnext_NP.shape[1]
    dgate_up_N2M = gate_NM.new_empty(num_rows, 2 * num_columns)
    if dgate_up_N2M.numel() == 0:
        dlora_B = lora_A.new_zeros(num_outputs, rank, dtype=torch.float32)
        return dgate_up_N2M, lora_A.new_zeros(lora_A.shape, dtype=torch.float32), dlora_B
    lora_A, gate_NM, up_NM, dnext_NP = map(with_contiguous_rows, (lora_A, gate_NM, up_NM, dnext_NP))
    product_SNM, up_SNR = in_parts(product), in_parts(up)
    sums_apart = num_rows <= FEW_ROWS
    tiles = LORA_TILES_OF_FEW_ROWS if sums_apart else LORA_TILES
    num_tiles, tiles_of_outputs = (triton.cdiv(each, tiles["BLOCK_M"]) for each in (num_columns, num_outputs))
    most = triton.cdiv(MAX_PROGRAMS, num_tiles)
    num_shares = max(1, min(triton.cdiv(num_rows, MIN_SHARE), most))
    rows_per_share = triton.cdiv(triton.cdiv(num_rows, num_shares), tiles["BLOCK_N"]) * tiles["BLOCK_N"]
    if sums_apart:
        rows_per_share = tiles["BLOCK_N"]
    num_shares = triton.cdiv(num_rows, rows_per_share)
    num_sums = 1 if sums_apart else num_shares
    place, dloras, dlora_B = place if num_sums == 1 else None, None, None
    if place is None:
        dloras = lora_A.new_empty(num_sums, rank, num_columns, dtype=torch.float32)
        dlora_B = lora_A.new_empty(num_outputs, rank, dtype=torch.float32)
    _gated_lora_backward_kernel[tiles_of_outputs + num_tiles * (1 + sums_apart), num_shares](
        product_SNM,
        place,
        up_SNR,
        lora_A,
        gate_NM,
        up_NM,
        dgate_up_N2M,
        dloras,
        dnext_NP,
        down_NR,
        dlora_B,
        num_rows,
        num_columns,
        num_outputs,
        rank,
        rows_per_share,
        *product_SNM.stride()[:2],
        *up_SNR.stride()[:2],
        lora_A.stride(0),
        gate_NM.stride(0),
        up_NM.stride(0),
        dnext_NP.stride(0),
        down_NR.stride(0),
        scaling,
        NUM_PARTS=len(product_SNM),
        NUM_LORA_UP_PARTS=len(up_SNR),
        SUMS_APART=sums_apart,
        IS_GELU=activation == "gelu_tanh",
        BLOCK_R=rank_block(rank),
        **tiles,
    )
    dlora_A = None if dloras is None else dloras[0] if len(dloras) == 1 else dloras.sum(0)
    return dgate_up_N2M, dlora_A, dlora_B


def _grid(gate_NM: Tensor) -> tuple[int, int]:
    return len(gate_NM), triton.cdiv(gate_NM.shape[1], BLOCK_M)


def _options(activation: str) -> dict:
    return {"IS_GELU": activation == "gelu_tanh", "BLOCK_M": BLOCK_M}
