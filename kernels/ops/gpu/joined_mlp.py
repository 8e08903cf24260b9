"""What is left of a gated MLP between the products with its joined weights, in Triton: a launch in each pass.

    gate            g, u = X Wᵀ + s D Bᵀ + b, half of the columns each        h = act(g) u
    gate_backward   dh = dY V + U A_V        dg, du from dh, with g and u computed again
                    dA_V = Uᵀ h        dB_V = s_V dYᵀ D_V

`ops/joined_mlp.py` says what is what. In the backward pass a program has a tile of columns and a share of the rows; the
shares' sums are added in a fixed order, so that two runs are bitwise equal. dB_V has programs of its own. dB of gate
and up would fit in, too, but takes so many registers that it costs more than a pass of its own.

Shapes: N rows, F columns of gate and of up, M outputs, R rank of W's adapters, S rank of V's.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gated import _gate_up_gradients, _sigmoid_and_its_slope
from .lora import rank_block, sum_over_rows
from .move_rows import with_contiguous_rows

# The fastest on an H200 for 96 and 864 rows.
GATE_TILES = {"BLOCK_N": 32, "BLOCK_F": 64, "num_warps": 8}
BACKWARD_TILES = {"BLOCK_N": 16, "BLOCK_F": 64, "num_warps": 4, "num_stages": 3}
FEW_ROWS, BACKWARD_TILES_OF_FEW = 256, BACKWARD_TILES | {"BLOCK_N": 32, "num_warps": 8}
OUTPUT_TILE = {"OUTPUT_N": 64, "OUTPUT_M": 64}
# Most programs that share the rows, and the fewest rows of a share.
MAX_PROGRAMS, MIN_SHARE = 512, 224


class GateUp(NamedTuple):
    """Gate and up before their adapters are added.

    Attributes:
        product: X Wᵀ, [N, 2 F].
        down: D, [N, 2 R], beside it.
        lora_B: [2 F, R].
        bias: [2 F], or None.
    """

    product: Tensor
    down: Tensor
    lora_B: Tensor
    bias: Tensor | None
    scaling: float


@triton.jit
def _load_tile(ptr, rows, columns, has_row, has_column, stride):
    mask = has_row[:, None] & has_column[None, :]
    return tl.load(ptr + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _add_lora(
    product_ptr, bias_ptr, down, weight, rows, columns, has_row, has_column, stride_pn, scaling, HAS_BIAS: tl.constexpr
):
    """A tile of gate or up in fp32; columns are those of both."""
    values = _load_tile(product_ptr, rows, columns, has_row, has_column, stride_pn).to(tl.float32)
    values += scaling * tl.dot(down, weight, input_precision="ieee")
    if HAS_BIAS:
        values += tl.load(bias_ptr + columns, mask=has_column, other=0.0).to(tl.float32)[None, :]
    return values


@triton.jit(do_not_specialize=["num_rows"])
def _gate_kernel(
    product_ptr,
    down_ptr,
    lora_b_ptr,
    bias_ptr,
    hidden_ptr,
    num_rows,
    num_columns,
    rank,
    stride_pn,
    scaling,
    IS_GELU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    rows = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    columns, ranks = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_R)
    has_row, has_column, has_rank = rows < num_rows, columns < num_columns, ranks < rank
    up_columns = num_columns + columns
    gate_down = _load_tile(down_ptr, rows, ranks, has_row, has_rank, stride_pn)
    up_down = _load_tile(down_ptr + rank, rows, ranks, has_row, has_rank, stride_pn)
    gate_weight = tl.trans(_load_tile(lora_b_ptr, columns, ranks, has_column, has_rank, rank))
    up_weight = tl.trans(_load_tile(lora_b_ptr, up_columns, ranks, has_column, has_rank, rank))
    gate = _add_lora(
        product_ptr, bias_ptr, gate_down, gate_weight, rows, columns, has_row, has_column, stride_pn, scaling, HAS_BIAS
    )
    up = _add_lora(
        product_ptr, bias_ptr, up_down, up_weight, rows, up_columns, has_row, has_column, stride_pn, scaling, HAS_BIAS
    )
    sigmoid, _ = _sigmoid_and_its_slope(gate, IS_GELU)
    hidden_ptrs = hidden_ptr + rows[:, None] * num_columns + columns[None, :]
    hidden = (gate * sigmoid * up).to(hidden_ptr.dtype.element_ty)
    tl.store(hidden_ptrs, hidden, mask=has_row[:, None] & has_column[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _gate_backward_kernel(
    dhidden_ptr,
    lora_up_ptr,
    lora_a_ptr,
    product_ptr,
    down_ptr,
    lora_b_ptr,
    bias_ptr,
    dout_ptr,
    out_down_ptr,
    dgate_up_ptr,
    dloras_ptr,
    dout_lora_b_ptr,
    num_rows,
    num_columns,
    num_outputs,
    rank,
    out_rank,
    rows_per_share,
    stride_dn,
    stride_un,
    stride_ar,
    stride_pn,
    stride_dout,
    stride_out_down,
    scaling,
    out_scaling,
    IS_GELU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    OUTPUT_N: tl.constexpr,
    OUTPUT_M: tl.constexpr,
):
    # The programs that sum over all rows take longest, so they begin first.
    program, output_tiles, tiles = tl.program_id(0), tl.cdiv(num_outputs, OUTPUT_M), tl.cdiv(num_columns, BLOCK_F)
    out_ranks = tl.arange(0, BLOCK_S)
    has_out_rank = out_ranks < out_rank
    if program < output_tiles:
        outputs = program * OUTPUT_M + tl.arange(0, OUTPUT_M)
        has_output = outputs < num_outputs
        dlora_b = sum_over_rows(
            dout_ptr,
            out_down_ptr,
            outputs,
            has_output,
            out_ranks,
            has_out_rank,
            num_rows,
            stride_dout,
            0,
            stride_out_down,
            1,
            OUTPUT_N,
        )
        dlora_b_ptrs = dout_lora_b_ptr + outputs[:, None] * out_rank + out_ranks[None, :]
        tl.store(dlora_b_ptrs, dlora_b * out_scaling, mask=has_output[:, None] & has_out_rank[None, :])
    else:
        columns = (program - output_tiles) % tiles * BLOCK_F + tl.arange(0, BLOCK_F)
        share = (program - output_tiles) // tiles
        ranks = tl.arange(0, BLOCK_R)
        has_column, has_rank = columns < num_columns, ranks < rank
        up_columns = num_columns + columns
        gate_weight = tl.trans(_load_tile(lora_b_ptr, columns, ranks, has_column, has_rank, rank))
        up_weight = tl.trans(_load_tile(lora_b_ptr, up_columns, ranks, has_column, has_rank, rank))
        lora_a = _load_tile(lora_a_ptr, out_ranks, columns, has_out_rank, has_column, stride_ar)
        dlora_a = tl.zeros((BLOCK_S, BLOCK_F), tl.float32)
        first = share * rows_per_share
        for begin in range(first, tl.minimum(first + rows_per_share, num_rows), BLOCK_N):
            rows = (begin + tl.arange(0, BLOCK_N)).to(tl.int64)
            has_row = rows < num_rows
            gate_down = _load_tile(down_ptr, rows, ranks, has_row, has_rank, stride_pn)
            up_down = _load_tile(down_ptr + rank, rows, ranks, has_row, has_rank, stride_pn)
            lora_up = _load_tile(lora_up_ptr, rows, out_ranks, has_row, has_out_rank, stride_un)
            dhidden = _load_tile(dhidden_ptr, rows, columns, has_row, has_column, stride_dn).to(tl.float32)
            dhidden += tl.dot(lora_up, lora_a, input_precision="ieee")
            gate = _add_lora(
                product_ptr,
                bias_ptr,
                gate_down,
                gate_weight,
                rows,
                columns,
                has_row,
                has_column,
                stride_pn,
                scaling,
                HAS_BIAS,
            )
            up = _add_lora(
                product_ptr,
                bias_ptr,
                up_down,
                up_weight,
                rows,
                up_columns,
                has_row,
                has_column,
                stride_pn,
                scaling,
                HAS_BIAS,
            )
            sigmoid, slope = _sigmoid_and_its_slope(gate, IS_GELU)
            hidden = (gate * sigmoid * up).to(lora_up.dtype)
            dlora_a = tl.dot(tl.trans(lora_up), hidden, dlora_a, input_precision="ieee")
            dgate, dup = _gate_up_gradients(dhidden, gate, up, sigmoid, slope)
            dgate_up_ptrs = dgate_up_ptr + rows[:, None] * 2 * num_columns + columns[None, :]
            mask = has_row[:, None] & has_column[None, :]
            tl.store(dgate_up_ptrs, dgate.to(dgate_up_ptr.dtype.element_ty), mask=mask)
            tl.store(dgate_up_ptrs + num_columns, dup.to(dgate_up_ptr.dtype.element_ty), mask=mask)
        dloras_ptr += share.to(tl.int64) * out_rank * num_columns
        dlora_a_ptrs = dloras_ptr + out_ranks[:, None] * num_columns + columns[None, :]
        tl.store(dlora_a_ptrs, dlora_a, mask=has_out_rank[:, None] & has_column[None, :])


def gate(gate_up: GateUp, activation: str) -> Tensor:
    """h, [N, F]."""
    (num_columns, rank), num_rows = gate_up.lora_B.shape, len(gate_up.product)
    hidden_NF = gate_up.product.new_empty(num_rows, num_columns // 2)
    grid = triton.cdiv(num_rows, GATE_TILES["BLOCK_N"]), triton.cdiv(hidden_NF.shape[1], GATE_TILES["BLOCK_F"])
    _gate_kernel[grid](
        gate_up.product,
        gate_up.down,
        gate_up.lora_B,
        gate_up.bias,
        hidden_NF,
        num_rows,
        hidden_NF.shape[1],
        rank,
        gate_up.product.stride(0),
        gate_up.scaling,
        IS_GELU=activation == "gelu_tanh",
        HAS_BIAS=gate_up.bias is not None,
        BLOCK_R=rank_block(rank),
        **GATE_TILES,
    )
    return hidden_NF


def gate_backward(
    dhidden_NF: Tensor,
    up_NS: Tensor,
    lora_A_SF: Tensor,
    gate_up: GateUp,
    dout_NM: Tensor,
    down_NS: Tensor,
    out_scaling: float,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dg and du side by side, [N, 2 F]; dA_V [S, F] and dB_V [M, S] in fp32."""
    (num_rows, num_columns), rank, out_rank = dhidden_NF.shape, gate_up.lora_B.shape[1], len(lora_A_SF)
    dout_NM, num_outputs = with_contiguous_rows(dout_NM), dout_NM.shape[1]
    dgate_up_N2F = dout_NM.new_empty(num_rows, 2 * num_columns)
    tiles_of = BACKWARD_TILES_OF_FEW if num_rows <= FEW_ROWS else BACKWARD_TILES
    tiles = triton.cdiv(num_columns, tiles_of["BLOCK_F"])
    num_shares = max(1, min(triton.cdiv(num_rows, MIN_SHARE), MAX_PROGRAMS // tiles))
    rows_per_share = triton.cdiv(triton.cdiv(num_rows, num_shares), tiles_of["BLOCK_N"]) * tiles_of["BLOCK_N"]
    num_shares = triton.cdiv(num_rows, rows_per_share)
    dloras_A = dout_NM.new_empty(num_shares, out_rank, num_columns, dtype=torch.float32)
    dlora_B = dloras_A.new_empty(num_outputs, out_rank)
    _gate_backward_kernel[triton.cdiv(num_outputs, OUTPUT_TILE["OUTPUT_M"]) + tiles * num_shares,](
        dhidden_NF,
        up_NS,
        lora_A_SF,
        gate_up.product,
        gate_up.down,
        gate_up.lora_B,
        gate_up.bias,
        dout_NM,
        down_NS,
        dgate_up_N2F,
        dloras_A,
        dlora_B,
        num_rows,
        num_columns,
        num_outputs,
        rank,
        out_rank,
        rows_per_share,
        dhidden_NF.stride(0),
        up_NS.stride(0),
        lora_A_SF.stride(0),
        gate_up.product.stride(0),
        dout_NM.stride(0),
        down_NS.stride(0),
        gate_up.scaling,
        out_scaling,
        IS_GELU=activation == "gelu_tanh",
        HAS_BIAS=gate_up.bias is not None,
        BLOCK_R=rank_block(rank),
        BLOCK_S=rank_block(out_rank),
        **tiles_of,
        **OUTPUT_TILE,
    )
    return dgate_up_N2F, dloras_A[0] if num_shares == 1 else dloras_A.sum(0), dlora_B
