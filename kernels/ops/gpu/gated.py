"""The gate of an MLP and its gradient, in Triton: one pass each; the backward pass recomputes the activation.

    forward    y = g σ(z) u
    backward   du = dy g σ(z)            dg = dy u σ(z) (1 + g (1 - σ(z)) z')

With a LoRA adapter after the gate, the same pass adds the adapter's part of dy, U A, and computes dA = Uᵀ y, with y
recomputed tile by tile. A program has a tile of columns and a share of the rows of one adapter; the shares' sums of dA
are added in a fixed order, so that two runs are bitwise equal.

`ops/gated.py` defines z and z' of each activation. Shapes: N rows, M columns, R rank.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantised import Fp8Rows
from .fp8 import scale_and_inverse
from .move_rows import with_contiguous_rows
from .owners import own_range, place_of

BLOCK_M = 1024
# Tile and most programs of the kernel with an adapter: the fastest on an H100. Fewer rows in a share would save less
# time than the sum of the shares takes.
LORA_BLOCK_N, LORA_BLOCK_M, MAX_PROGRAMS, MIN_SHARE = 32, 32, 1024, 128


@triton.jit
def _sigmoid_and_its_slope(gate, IS_GELU: tl.constexpr):
    """σ(z), and the derivative of its logarithm, (1 - σ(z)) z'."""
    if IS_GELU:
        square = gate * gate
        z = 1.5957691216057308 * gate * (1.0 + 0.044715 * square)
        dz = 1.5957691216057308 * (1.0 + 0.134145 * square)
    else:
        z = gate
        dz = 1.0
    # Neither overflows, and neither cancels.
    small = tl.exp(-tl.abs(z))
    sigmoid = tl.where(z >= 0.0, 1.0, small) / (1.0 + small)
    return sigmoid, tl.where(z >= 0.0, small, 1.0) / (1.0 + small) * dz


@triton.jit
def _gate_up_gradients(dout, gate, up, sigmoid, slope):
    return dout * up * sigmoid * (1.0 + gate * slope), dout * gate * sigmoid


@triton.jit
def _gated_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    codes_ptr,
    scales_ptr,
    num_columns,
    stride_gate,
    stride_up,
    IS_GELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    # 64 bits: an offset may pass 2^31 elements.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = columns < num_columns
    gate = tl.load(gate_ptr + row * stride_gate + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_up + columns, mask=mask, other=0.0).to(tl.float32)
    sigmoid, _ = _sigmoid_and_its_slope(gate, IS_GELU)
    out = (gate * sigmoid * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * num_columns + columns, out, mask=mask)
    if codes_ptr is not None:
        # A block has the whole row then.
        out = out.to(tl.float32)
        scale, inverse = scale_and_inverse(tl.max(tl.abs(out), axis=0))
        tl.store(scales_ptr + row, scale)
        codes = (out * inverse).to(codes_ptr.dtype.element_ty)
        tl.store(codes_ptr + row * num_columns + columns, codes, mask=mask)


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
    sigmoid, slope = _sigmoid_and_its_slope(gate, IS_GELU)
    dgate, dup = _gate_up_gradients(dout, gate, up, sigmoid, slope)
    dgate_up_ptrs = dgate_up_ptr + row * 2 * num_columns + columns
    tl.store(dgate_up_ptrs, dgate.to(dgate_up_ptr.dtype.element_ty), mask=mask)
    tl.store(dgate_up_ptrs + num_columns, dup.to(dgate_up_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_lora_backward_kernel(
    dout_ptr,
    scales_ptr,
    cu_owned_ptr,
    places_ptr,
    lora_up_ptr,
    lora_a_ptr,
    gate_ptr,
    up_ptr,
    dgate_up_ptr,
    dloras_ptr,
    num_rows,
    num_columns,
    rank,
    stride_dout,
    stride_lora_up,
    stride_lora_a,
    stride_gate,
    stride_up,
    IS_GELU: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    NUM_ADAPTERS: tl.constexpr,
    ADDS: tl.constexpr,
):
    columns = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    ranks = tl.arange(0, BLOCK_R)
    adapter, share, num_shares = tl.program_id(2), tl.program_id(1), tl.num_programs(1)
    has_column, has_rank = columns < num_columns, (ranks < rank) & (adapter < NUM_ADAPTERS)
    lora_up_ptr += adapter * rank
    lora_ranks = (adapter * rank + ranks).to(tl.int64)[:, None]
    lora_mask = has_rank[:, None] & has_column[None, :]
    lora_a = tl.load(lora_a_ptr + lora_ranks * stride_lora_a + columns[None, :], mask=lora_mask, other=0.0)
    if places_ptr is None:
        dlora_ptrs = dloras_ptr + share.to(tl.int64) * NUM_ADAPTERS * rank * num_columns
        dlora_ptrs += lora_ranks * num_columns + columns[None, :]
    else:
        dlora_ptrs = place_of(places_ptr, tl.minimum(adapter, NUM_ADAPTERS - 1))
        dlora_ptrs += ranks[:, None] * num_columns + columns[None, :]
    dlora = tl.zeros((BLOCK_R, BLOCK_M), tl.float32)
    if ADDS:
        dlora = tl.load(dlora_ptrs, mask=lora_mask, other=0.0)
    own_begin, own_end = own_range(cu_owned_ptr, adapter, NUM_ADAPTERS, num_rows)
    rows_per_share = tl.cdiv(tl.cdiv(own_end - own_begin, num_shares), BLOCK_N) * BLOCK_N
    first = own_begin + share * rows_per_share
    for begin in range(first, tl.minimum(first + rows_per_share, own_end), BLOCK_N):
        # 64 bits: an offset may pass 2^31 elements.
        rows = (begin + tl.arange(0, BLOCK_N)).to(tl.int64)
        has_row = rows < own_end
        mask = has_row[:, None] & has_column[None, :]
        lora_up = tl.load(
            lora_up_ptr + rows[:, None] * stride_lora_up + ranks[None, :],
            mask=has_row[:, None] & has_rank[None, :],
            other=0.0,
        )
        dout = tl.load(dout_ptr + rows[:, None] * stride_dout + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + rows[:, None] * stride_gate + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + rows[:, None] * stride_up + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        if scales_ptr is not None:
            dout *= tl.load(scales_ptr + rows, mask=has_row, other=0.0)[:, None]
        dout = tl.dot(lora_up, lora_a, dout, input_precision="ieee")
        sigmoid, slope = _sigmoid_and_its_slope(gate, IS_GELU)
        out = gate * sigmoid * up
        dlora = tl.dot(tl.trans(lora_up), out.to(lora_up.dtype), dlora, input_precision="ieee")
        dgate, dup = _gate_up_gradients(dout, gate, up, sigmoid, slope)
        dgate_up_ptrs = dgate_up_ptr + rows[:, None] * 2 * num_columns + columns[None, :]
        tl.store(dgate_up_ptrs, dgate.to(dgate_up_ptr.dtype.element_ty), mask=mask)
        tl.store(dgate_up_ptrs + num_columns, dup.to(dgate_up_ptr.dtype.element_ty), mask=mask)
    tl.store(dlora_ptrs, dlora, mask=lora_mask)


def gated(gate_NM: Tensor, up_NM: Tensor, activation: str, in_fp8: Fp8Rows | None = None) -> Tensor:
    out_NM = gate_NM.new_empty(gate_NM.shape)
    block = BLOCK_M if in_fp8 is None else triton.next_power_of_2(gate_NM.shape[1])
    if out_NM.numel():
        gate_NM, up_NM = with_contiguous_rows(gate_NM), with_contiguous_rows(up_NM)
        _gated_kernel[len(gate_NM), triton.cdiv(gate_NM.shape[1], block)](
            gate_NM,
            up_NM,
            out_NM,
            *(in_fp8 or (None, None)),
            gate_NM.shape[1],
            gate_NM.stride(0),
            up_NM.stride(0),
            **_options(activation) | {"BLOCK_M": block},
            num_warps=min(16, max(4, block // 1024)),
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
    dout_NM: Tensor,
    up_NR: Tensor,
    lora_A: Tensor,
    gate_NM: Tensor,
    up_NM: Tensor,
    activation: str,
    scales_N: Tensor | None = None,
    cu_owned: Tensor | None = None,
    places: tuple[Tensor, bool] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """dA comes in fp32; or it is put where `joined_backward` would, if one program has all rows of a column."""
    num_rows, num_columns = gate_NM.shape
    num_adapters = 1 if cu_owned is None else len(cu_owned) - 1
    rank = len(lora_A) // num_adapters
    dgate_up_N2M = gate_NM.new_empty(num_rows, 2 * num_columns)
    if dgate_up_N2M.numel() == 0:
        return dgate_up_N2M, lora_A.new_zeros(lora_A.shape, dtype=torch.float32)
    contiguous = map(with_contiguous_rows, (dout_NM, up_NR, lora_A, gate_NM, up_NM))
    dout_NM, up_NR, lora_A, gate_NM, up_NM = contiguous
    tiles = triton.cdiv(num_columns, LORA_BLOCK_M)
    most = triton.cdiv(MAX_PROGRAMS, num_adapters * tiles)
    num_shares = max(1, min(triton.cdiv(num_rows, num_adapters * MIN_SHARE), most))
    places = places if num_shares == 1 else None
    dloras, (addresses, adds) = None, places or (None, False)
    if places is None:
        dloras = lora_A.new_empty(num_shares, len(lora_A), num_columns, dtype=torch.float32)
    # One more for filler, which has no adapter.
    _gated_lora_backward_kernel[tiles, num_shares, num_adapters if cu_owned is None else num_adapters + 1](
        dout_NM,
        scales_N,
        cu_owned,
        addresses,
        up_NR,
        lora_A,
        gate_NM,
        up_NM,
        dgate_up_N2M,
        dloras,
        num_rows,
        num_columns,
        rank,
        dout_NM.stride(0),
        up_NR.stride(0),
        lora_A.stride(0),
        gate_NM.stride(0),
        up_NM.stride(0),
        IS_GELU=activation == "gelu_tanh",
        BLOCK_N=LORA_BLOCK_N,
        BLOCK_M=LORA_BLOCK_M,
        BLOCK_R=max(16, triton.next_power_of_2(rank)),
        NUM_ADAPTERS=num_adapters,
        ADDS=adds,
        num_stages=2,
    )
    if places is not None:
        return dgate_up_N2M, None
    return dgate_up_N2M, dloras[0] if num_shares == 1 else dloras.sum(0)


def _grid(gate_NM: Tensor) -> tuple[int, int]:
    return len(gate_NM), triton.cdiv(gate_NM.shape[1], BLOCK_M)


def _options(activation: str) -> dict:
    return {"IS_GELU": activation == "gelu_tanh", "BLOCK_M": BLOCK_M}
