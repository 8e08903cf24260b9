"""What is left of a group of LoRA projections after the products with its joined weight, in Triton: a launch a pass.

    add_lora            out[n, m] = X Wᵀ[n, m] + s sum over r of D[n, i R + r] B[m, r] + b[m]     i: the projection of m
    joined_backward     dX = dY W + U A        dA = Uᵀ X        dB_i = s dY_iᵀ D_i

`ops/joined_weight.py` says what the products hold; those of weights in 4 bits come in parts, which are added in a fixed
order. A program that sums over rows has a tile of columns and all rows. So two runs are bitwise equal.

Gradients may have a place, A_1, B_1, A_2 and so on in fp32: they are added to what is there.

Shapes: N rows, K inputs, M columns of at most three projections, R rank; P pads their ranks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .lora import ends_of, num_tiles, place_of, rank_block, sum_over_rows, tile_columns
from .move_rows import in_parts, load_sum, with_contiguous_rows

# The fastest on an H100 for 96 to 832 rows.
ADD_TILES = {"BLOCK_N": 16, "BLOCK_M": 256, "num_warps": 4}
BACKWARD_TILES = {"BLOCK_N": 64, "BLOCK_SUM": 64, "BLOCK_K": 64, "BLOCK_M": 64, "num_warps": 4, "num_stages": 3}
# Of at most 128 rows, whose products come in parts: the fastest on an H200 for 80.
ADD_TILES_OF_PARTS = {"BLOCK_N": 16, "BLOCK_M": 32, "num_warps": 4}
BACKWARD_TILES_OF_PARTS = BACKWARD_TILES | {"BLOCK_N": 16, "num_stages": 1}


@triton.jit(do_not_specialize=["num_rows"])
def _add_lora_kernel(
    product_ptr,
    low_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    down_ptr,
    num_rows,
    rank,
    num_columns,
    stride_ps,
    stride_pn,
    stride_ls,
    stride_ln,
    stride_dn,
    stride_wm,
    scaling,
    end_0,
    end_1,
    end_2,
    NUM_PARTS: tl.constexpr,
    NUM_LOW_PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    projection, begin, end = tile_columns(tl.program_id(1), end_0, end_1, end_2, BLOCK_M)
    rows = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    columns = begin + tl.arange(0, BLOCK_M)
    ranks = tl.arange(0, BLOCK_R)
    has_row, has_column, has_rank = rows < num_rows, columns < end, ranks < rank
    mask = has_row[:, None] & has_column[None, :]
    mask_of_down = has_row[:, None] & has_rank[None, :]
    first_rank = projection * rank
    low_ptrs = low_ptr + rows[:, None] * stride_ln + first_rank + ranks[None, :]
    down = load_sum(low_ptrs, mask_of_down, stride_ls, NUM_LOW_PARTS).to(down_ptr.dtype.element_ty)
    weight_ptrs = weight_ptr + columns.to(tl.int64)[None, :] * stride_wm + ranks[:, None]
    weight = tl.load(weight_ptrs, mask=has_column[None, :] & has_rank[:, None], other=0.0)
    # Loaded before the product, which would wait for it.
    product_ptrs = product_ptr + rows[:, None] * stride_pn + columns[None, :]
    values = load_sum(product_ptrs, mask, stride_ps, NUM_PARTS).to(tl.float32)
    values += scaling * tl.dot(down, weight, input_precision="ieee")
    if HAS_BIAS:
        values += tl.load(bias_ptr + columns, mask=has_column, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + rows[:, None] * num_columns + columns[None, :], values.to(out_ptr.dtype.element_ty), mask=mask)
    if begin == tl.where(projection == 0, 0, tl.where(projection == 1, end_0, end_1)):
        tl.store(down_ptr + rows[:, None] * stride_dn + first_rank + ranks[None, :], down, mask=mask_of_down)


@triton.jit
def _add_up(
    product_ptr,
    up_ptr,
    lora_a_ptr,
    dx_ptr,
    row_block,
    tile,
    num_rows,
    num_inputs,
    num_ranks,
    stride_ps,
    stride_pn,
    stride_us,
    stride_un,
    stride_ar,
    NUM_PARTS: tl.constexpr,
    NUM_UP_PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
):
    rows = (row_block * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    columns, ranks = tile * BLOCK_K + tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_RANKS)
    has_row, has_column, has_rank = rows < num_rows, columns < num_inputs, ranks < num_ranks
    mask = has_row[:, None] & has_column[None, :]
    lora_a_ptrs = lora_a_ptr + ranks[:, None] * stride_ar + columns[None, :]
    lora_a = tl.load(lora_a_ptrs, mask=has_rank[:, None] & has_column[None, :], other=0.0)
    up_ptrs = up_ptr + rows[:, None] * stride_un + ranks[None, :]
    up = load_sum(up_ptrs, has_row[:, None] & has_rank[None, :], stride_us, NUM_UP_PARTS).to(lora_a.dtype)
    product_ptrs = product_ptr + rows[:, None] * stride_pn + columns[None, :]
    dx = load_sum(product_ptrs, mask, stride_ps, NUM_PARTS).to(tl.float32)
    dx = tl.dot(up, lora_a, dx, input_precision="ieee")
    tl.store(dx_ptr + rows[:, None] * num_inputs + columns[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _joined_backward_kernel(
    product_ptr,
    place_ptr,
    up_ptr,
    dout_ptr,
    x_ptr,
    down_ptr,
    lora_a_ptr,
    dx_ptr,
    dlora_a_ptr,
    dlora_b_ptr,
    num_rows,
    num_inputs,
    rank,
    num_ranks,
    stride_ps,
    stride_pn,
    stride_us,
    stride_un,
    stride_dout,
    stride_xn,
    stride_dn,
    stride_ar,
    scaling,
    end_0,
    end_1,
    end_2,
    NUM_PARTS: tl.constexpr,
    NUM_UP_PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SUM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
):
    # The programs that sum over rows take longest, so they begin first.
    program, tiles_of_inputs = tl.program_id(0), tl.cdiv(num_inputs, BLOCK_K)
    tiles_of_outputs = tl.cdiv(end_0, BLOCK_M) + tl.cdiv(end_1 - end_0, BLOCK_M) + tl.cdiv(end_2 - end_1, BLOCK_M)
    sums = tiles_of_outputs + tiles_of_inputs
    if program < tiles_of_outputs:
        projection, begin, end = tile_columns(program, end_0, end_1, end_2, BLOCK_M)
        outputs, own_ranks = begin + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
        has_output, has_own_rank = outputs < end, own_ranks < rank
        elements_of_b = outputs[:, None] * rank + own_ranks[None, :]
        mask_of_b = has_output[:, None] & has_own_rank[None, :]
        dlora_b = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        if place_ptr is None:
            to_b = dlora_b_ptr + elements_of_b
        else:
            to_b = place_of(place_ptr) + (projection + 1) * rank * num_inputs + elements_of_b
            dlora_b = tl.load(to_b, mask=mask_of_b, other=0.0)
        dlora_b += scaling * sum_over_rows(
            tl.zeros((BLOCK_M, BLOCK_R), tl.float32),
            dout_ptr,
            down_ptr + projection * rank,
            num_rows,
            outputs,
            has_output,
            own_ranks,
            has_own_rank,
            stride_dout,
            0,
            stride_dn,
            1,
            BLOCK_SUM,
        )
        tl.store(to_b, dlora_b, mask=mask_of_b)
    elif program < sums:
        inputs = (program - tiles_of_outputs) * BLOCK_K + tl.arange(0, BLOCK_K)
        ranks = tl.arange(0, BLOCK_RANKS)
        has_input, has_rank = inputs < num_inputs, ranks < num_ranks
        elements_of_a = ranks[None, :] * num_inputs + inputs[:, None]
        mask_of_a = has_input[:, None] & has_rank[None, :]
        dlora_a = tl.zeros((BLOCK_K, BLOCK_RANKS), tl.float32)
        if place_ptr is None:
            to_a = dlora_a_ptr + elements_of_a
        else:
            columns_before = tl.where(ranks < rank, 0, tl.where(ranks < 2 * rank, end_0, end_1))
            to_a = place_of(place_ptr) + elements_of_a + columns_before[None, :] * rank
            dlora_a = tl.load(to_a, mask=mask_of_a, other=0.0)
        dlora_a = sum_over_rows(
            dlora_a,
            x_ptr,
            up_ptr,
            num_rows,
            inputs,
            has_input,
            ranks,
            has_rank,
            stride_xn,
            stride_us,
            stride_un,
            NUM_UP_PARTS,
            BLOCK_SUM,
        )
        tl.store(to_a, dlora_a, mask=mask_of_a)
    else:
        _add_up(
            product_ptr,
            up_ptr,
            lora_a_ptr,
            dx_ptr,
            (program - sums) // tiles_of_inputs,
            (program - sums) % tiles_of_inputs,
            num_rows,
            num_inputs,
            num_ranks,
            stride_ps,
            stride_pn,
            stride_us,
            stride_un,
            stride_ar,
            NUM_PARTS,
            NUM_UP_PARTS,
            BLOCK_N,
            BLOCK_K,
            BLOCK_RANKS,
        )


def add_lora(
    product: Tensor, low: Tensor, weight_MR: Tensor, bias_M: Tensor | None, columns: tuple[int, ...], scaling: float
) -> tuple[Tensor, Tensor]:
    """The outputs [N, M], and D [N, n R], copied so that the product can be freed; from X Wᵀ and D, maybe in parts."""
    product_SNM, low_SNR, (num_columns, rank) = in_parts(product), in_parts(low), weight_MR.shape
    num_rows, tiles = product_SNM.shape[1], ADD_TILES if product.dim() == 2 else ADD_TILES_OF_PARTS
    out_NM, down_NR = weight_MR.new_empty(num_rows, num_columns), weight_MR.new_empty(num_rows, rank * len(columns))
    if num_rows:
        grid = triton.cdiv(num_rows, tiles["BLOCK_N"]), num_tiles(columns, tiles["BLOCK_M"])
        _add_lora_kernel[grid](
            product_SNM,
            low_SNR,
            weight_MR,
            # A placeholder that the kernel does not read.
            weight_MR if bias_M is None else bias_M,
            out_NM,
            down_NR,
            num_rows,
            rank,
            num_columns,
            *product_SNM.stride()[:2],
            *low_SNR.stride()[:2],
            down_NR.stride(0),
            weight_MR.stride(0),
            scaling,
            *ends_of(columns),
            NUM_PARTS=len(product_SNM),
            NUM_LOW_PARTS=len(low_SNR),
            HAS_BIAS=bias_M is not None,
            BLOCK_R=rank_block(rank),
            **tiles,
        )
    return out_NM, down_NR


def joined_backward(
    product: Tensor,
    up: Tensor,
    dout_NM: Tensor,
    x_NK: Tensor,
    down_NR: Tensor,
    stacked_A: Tensor,
    columns: tuple[int, ...],
    scaling: float,
    place: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dX [N, K] in dY's dtype, dA [n R, K] and dB [M, R] in fp32.

    They are computed from dY W and U, both maybe in parts. Gradients that have a place (`LoraGroup.place`) are None.
    """
    num_rows, (num_ranks, num_inputs) = len(dout_NM), stacked_A.shape
    rank = num_ranks // len(columns)
    dx_NK, dstacked_A, dstacked_B = x_NK.new_empty(num_rows, num_inputs), None, None
    if place is None:
        dstacked_A = stacked_A.new_empty(stacked_A.shape, dtype=torch.float32)
        dstacked_B = down_NR.new_empty(sum(columns), rank, dtype=torch.float32)
    dout_NM, x_NK = with_contiguous_rows(dout_NM), with_contiguous_rows(x_NK)
    product_SNK, up_SNR, tiles = in_parts(product), in_parts(up), BACKWARD_TILES
    if product.dim() == 3:
        tiles = BACKWARD_TILES_OF_PARTS
    tiles_of_inputs, row_blocks = triton.cdiv(num_inputs, tiles["BLOCK_K"]), triton.cdiv(num_rows, tiles["BLOCK_N"])
    num_programs = num_tiles(columns, tiles["BLOCK_M"]) + tiles_of_inputs * (1 + row_blocks)
    _joined_backward_kernel[num_programs,](
        product_SNK,
        place,
        up_SNR,
        dout_NM,
        x_NK,
        down_NR,
        stacked_A,
        dx_NK,
        dstacked_A,
        dstacked_B,
        num_rows,
        num_inputs,
        rank,
        num_ranks,
        *product_SNK.stride()[:2],
        *up_SNR.stride()[:2],
        dout_NM.stride(0),
        x_NK.stride(0),
        down_NR.stride(0),
        stacked_A.stride(0),
        scaling,
        *ends_of(columns),
        NUM_PARTS=len(product_SNK),
        NUM_UP_PARTS=len(up_SNR),
        BLOCK_R=rank_block(rank),
        BLOCK_RANKS=rank_block(num_ranks),
        **tiles,
    )
    return dx_NK, dstacked_A, dstacked_B
