"""What is left of a group of LoRA projections after the products with its joined weight, in Triton: a launch a pass.

    add_lora            out[n, m] = X Wᵀ[n, m] + s sum over r of D[n, i R + r] B[m, r] + b[m]     i: the projection of m
    joined_backward     dX = dY W + U A        dA = Uᵀ X        dB_i = s dY_iᵀ D_i

`ops/joined_weight.py` says what the products hold. A program that sums over rows has a tile of columns and all rows, so
that two runs are bitwise equal.

If rows have owners, a program computes for one adapter, and reads and writes only the rows of that adapter, which it
looks for where they lie. So no number of another one can reach them, not even NaN. Parts of D and U that are not the
owner's are never read.

Gradients of an adapter may have a place each, to which they are added: A_1, B_1, A_2 and so on, in fp32.

Shapes: N rows, K inputs, M columns of at most three projections, R rank; P pads the ranks of all adapters.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .lora import ends_of, num_tiles, rank_block, tile_columns
from .move_rows import with_contiguous_rows
from .owners import add_at, own_range, own_rows

# The fastest on an H100 for 96 to 832 rows.
ADD_TILES = {"BLOCK_N": 16, "BLOCK_M": 256, "num_warps": 4}
BACKWARD_TILES = {"BLOCK_N": 64, "BLOCK_K": 64, "BLOCK_M": 64, "num_warps": 4, "num_stages": 3}


@triton.jit(do_not_specialize=["num_rows"])
def _add_lora_kernel(
    product_ptr,
    owners_ptr,
    ranges_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    down_ptr,
    num_rows,
    rank,
    num_ranks,
    num_columns,
    stride_pn,
    stride_dn,
    scaling,
    end_0,
    end_1,
    end_2,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    projection, begin, end = tile_columns(tl.program_id(1), end_0, end_1, end_2, BLOCK_M)
    adapter = tl.program_id(2)
    own_begin, own_end = own_range(ranges_ptr, adapter, num_rows)
    first_row = own_begin + tl.program_id(0) * BLOCK_N
    if first_row >= own_end:
        return
    rows = (first_row + tl.arange(0, BLOCK_N)).to(tl.int64)
    columns = begin + tl.arange(0, BLOCK_M)
    ranks = tl.arange(0, BLOCK_R)
    first_rank = projection * rank
    if owners_ptr is not None:
        first_rank += adapter * num_ranks
        weight_ptr += adapter * num_columns * rank
    has_row = own_rows(owners_ptr, adapter, rows, own_end)
    has_column, has_rank = columns < end, ranks < rank
    mask = has_row[:, None] & has_column[None, :]
    mask_of_down = has_row[:, None] & has_rank[None, :]
    product_ptrs = product_ptr + rows[:, None] * stride_pn
    down = tl.load(product_ptrs + num_columns + first_rank + ranks[None, :], mask=mask_of_down, other=0.0)
    weight = tl.load(
        weight_ptr + columns[None, :] * rank + ranks[:, None], mask=has_column[None, :] & has_rank[:, None], other=0.0
    )
    values = scaling * tl.dot(down, weight, input_precision="ieee")
    values += tl.load(product_ptrs + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        values += tl.load(bias_ptr + columns, mask=has_column, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + rows[:, None] * num_columns + columns[None, :], values.to(out_ptr.dtype.element_ty), mask=mask)
    if begin == tl.where(projection == 0, 0, tl.where(projection == 1, end_0, end_1)):
        tl.store(down_ptr + rows[:, None] * stride_dn + first_rank + ranks[None, :], down, mask=mask_of_down)


@triton.jit
def _add_up(
    product_ptr,
    owners_ptr,
    adapter,
    own_begin,
    own_end,
    scales_ptr,
    up_ptr,
    lora_a_ptr,
    dx_ptr,
    row_block,
    tile,
    num_inputs,
    num_ranks,
    stride_pn,
    stride_un,
    stride_ar,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
):
    rows = (own_begin + row_block * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    columns, ranks = tile * BLOCK_K + tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_RANKS)
    has_row = own_rows(owners_ptr, adapter, rows, own_end)
    has_column, has_rank = columns < num_inputs, ranks < num_ranks
    mask = has_row[:, None] & has_column[None, :]
    lora_a_ptrs = lora_a_ptr + ranks[:, None] * stride_ar + columns[None, :]
    lora_a = tl.load(lora_a_ptrs, mask=has_rank[:, None] & has_column[None, :], other=0.0)
    up_ptrs = up_ptr + rows[:, None] * stride_un + ranks[None, :]
    up = tl.load(up_ptrs, mask=has_row[:, None] & has_rank[None, :], other=0.0)
    dx = tl.load(product_ptr + rows[:, None] * stride_pn + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    if scales_ptr is not None:
        dx *= tl.load(scales_ptr + rows, mask=has_row, other=0.0)[:, None]
    dx = tl.dot(up, lora_a, dx, input_precision="ieee")
    tl.store(dx_ptr + rows[:, None] * num_inputs + columns[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sum_over_rows(
    wide_ptr,
    narrow_ptr,
    owners_ptr,
    adapter,
    own_begin,
    own_end,
    columns,
    has_column,
    ranks,
    has_rank,
    stride_w,
    stride_n,
    BLOCK_N: tl.constexpr,
):
    """The sum over all rows, or those of the adapter, of wide[:, column] narrow[:, rank], [columns, ranks]."""
    total = tl.zeros((columns.shape[0], ranks.shape[0]), tl.float32)
    for begin in range(own_begin, own_end, BLOCK_N):
        rows = (begin + tl.arange(0, BLOCK_N)).to(tl.int64)
        has_row = own_rows(owners_ptr, adapter, rows, own_end)
        wide_ptrs, narrow_ptrs = wide_ptr + rows[:, None] * stride_w, narrow_ptr + rows[:, None] * stride_n
        wide = tl.load(wide_ptrs + columns[None, :], mask=has_row[:, None] & has_column[None, :], other=0.0)
        narrow = tl.load(narrow_ptrs + ranks[None, :], mask=has_row[:, None] & has_rank[None, :], other=0.0)
        total = tl.dot(tl.trans(wide), narrow, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _joined_backward_kernel(
    product_ptr,
    owners_ptr,
    ranges_ptr,
    places_ptr,
    scales_ptr,
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
    num_kept,
    rank,
    num_ranks,
    stride_pn,
    stride_un,
    stride_dout,
    stride_xn,
    stride_dn,
    stride_ar,
    scaling,
    end_0,
    end_1,
    end_2,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
):
    # The programs that sum over rows take longest, so they begin first.
    adapter, program, tiles_of_inputs = tl.program_id(0), tl.program_id(1), tl.cdiv(num_inputs, BLOCK_K)
    own_begin, own_end = own_range(ranges_ptr, adapter, num_rows)
    if owners_ptr is not None:
        up_ptr += adapter * num_ranks
        down_ptr += adapter * num_ranks
        lora_a_ptr += adapter * num_ranks * stride_ar
        if places_ptr is None:
            dlora_a_ptr += adapter * num_ranks * num_inputs
            dlora_b_ptr += adapter * end_2 * rank
    tiles_of_outputs = tl.cdiv(end_0, BLOCK_M) + tl.cdiv(end_1 - end_0, BLOCK_M) + tl.cdiv(end_2 - end_1, BLOCK_M)
    if program < tiles_of_outputs:
        projection, begin, end = tile_columns(program, end_0, end_1, end_2, BLOCK_M)
        outputs, own_ranks = begin + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
        has_output, has_own_rank = outputs < end, own_ranks < rank
        own_down_ptr = down_ptr + projection * rank
        dlora_b = _sum_over_rows(
            dout_ptr,
            own_down_ptr,
            owners_ptr,
            adapter,
            own_begin,
            own_end,
            outputs,
            has_output,
            own_ranks,
            has_own_rank,
            stride_dout,
            stride_dn,
            BLOCK_N,
        )
        dlora_b *= scaling
        elements_of_b = outputs[:, None] * rank + own_ranks[None, :]
        mask_of_b = has_output[:, None] & has_own_rank[None, :]
        if places_ptr is None:
            tl.store(dlora_b_ptr + elements_of_b, dlora_b, mask=mask_of_b)
        else:
            add_at(places_ptr + adapter, elements_of_b + (projection + 1) * rank * num_kept, dlora_b, mask_of_b)
    elif program < tiles_of_outputs + tiles_of_inputs:
        inputs = (program - tiles_of_outputs) * BLOCK_K + tl.arange(0, BLOCK_K)
        ranks = tl.arange(0, BLOCK_RANKS)
        has_input, has_rank = inputs < num_inputs, ranks < num_ranks
        dlora_a = _sum_over_rows(
            x_ptr,
            up_ptr,
            owners_ptr,
            adapter,
            own_begin,
            own_end,
            inputs,
            has_input,
            ranks,
            has_rank,
            stride_xn,
            stride_un,
            BLOCK_N,
        )
        elements_of_a = ranks[None, :] * num_inputs + inputs[:, None]
        mask_of_a = has_input[:, None] & has_rank[None, :]
        if places_ptr is None:
            tl.store(dlora_a_ptr + elements_of_a, dlora_a, mask=mask_of_a)
        else:
            columns_before = tl.where(ranks < rank, 0, tl.where(ranks < 2 * rank, end_0, end_1))
            add_at(places_ptr + adapter, elements_of_a + columns_before[None, :] * rank, dlora_a, mask_of_a)
    else:
        # Programs are as many as if all rows were this adapter's; those that find none read and write nothing.
        part = program - tiles_of_outputs - tiles_of_inputs
        _add_up(
            product_ptr,
            owners_ptr,
            adapter,
            own_begin,
            own_end,
            scales_ptr,
            up_ptr,
            lora_a_ptr,
            dx_ptr,
            part // tiles_of_inputs,
            part % tiles_of_inputs,
            num_inputs,
            num_ranks,
            stride_pn,
            stride_un,
            stride_ar,
            BLOCK_N,
            BLOCK_K,
            BLOCK_RANKS,
        )


def add_lora(
    product_NP: Tensor,
    weight_MR: Tensor,
    bias_M: Tensor | None,
    columns: tuple[int, ...],
    scaling: float,
    owners: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The outputs [N, M], and D [N, n R], copied so that the product can be freed.

    Args:
        owners: the rows' `Owners`; None for one adapter. With several, B and D have the parts of all: those of B one
            above the other, those of D side by side.
    """
    num_rows, num_columns, rank = len(product_NP), sum(columns), weight_MR.shape[1]
    num_adapters = len(weight_MR) // num_columns
    num_ranks = len(columns) * rank
    out_NM = product_NP.new_empty(num_rows, num_columns)
    down_NR = product_NP.new_empty(num_rows, num_adapters * num_ranks)
    if num_rows:
        grid = triton.cdiv(num_rows, ADD_TILES["BLOCK_N"]), num_tiles(columns, ADD_TILES["BLOCK_M"]), num_adapters
        _add_lora_kernel[grid](
            product_NP,
            *(owners or (None, None)),
            weight_MR,
            # A placeholder that the kernel does not read.
            weight_MR if bias_M is None else bias_M,
            out_NM,
            down_NR,
            num_rows,
            rank,
            num_ranks,
            num_columns,
            product_NP.stride(0),
            down_NR.stride(0),
            scaling,
            *ends_of(columns),
            HAS_BIAS=bias_M is not None,
            BLOCK_R=rank_block(rank),
            **ADD_TILES,
        )
    return out_NM, down_NR


def joined_backward(
    product_NK: Tensor,
    scales_N: Tensor | None,
    up_NR: Tensor,
    dout_NM: Tensor,
    x_NK: Tensor,
    down_NR: Tensor,
    stacked_A: Tensor,
    columns: tuple[int, ...],
    scaling: float,
    owners: tuple[Tensor, Tensor] | None = None,
    places: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dX [N, K] in dY's dtype, dA [n R, K] and dB [M, R] in fp32; from dY W, whose rows may have scales, and U.

    Args:
        owners: see `add_lora`; U, dA and dB, too, then have the parts of all adapters.
        places: int64 [n], the address at which the gradients of each adapter are added; None to return them.
    """
    num_inputs = stacked_A.shape[1]
    dx_NK = x_NK.new_empty(len(x_NK), num_inputs)
    dstacked_A = None if places is not None else stacked_A.new_empty(stacked_A.shape, dtype=torch.float32)
    tensors = product_NK, scales_N, up_NR, dout_NM, x_NK, down_NR, stacked_A, dx_NK, dstacked_A
    return dx_NK, dstacked_A, _run_backward(*tensors, columns, scaling, num_inputs, num_inputs, owners, places)


def dlora_b(
    dout_NM: Tensor,
    down_NR: Tensor,
    columns: tuple[int, ...],
    scaling: float,
    owners: tuple[Tensor, Tensor] | None = None,
    places: Tensor | None = None,
    num_inputs: int = 0,
) -> Tensor | None:
    """dB alone, [M, R] in fp32; with places, it is added after K inputs' dA."""
    # Placeholders: of no inputs the kernel reads and writes nothing.
    unused = *[down_NR] * 4, down_NR if places is None else None
    return _run_backward(down_NR, None, down_NR, dout_NM, *unused, columns, scaling, 0, num_inputs, owners, places)


def _run_backward(
    product_NK,
    scales_N,
    up_NR,
    dout_NM,
    x_NK,
    down_NR,
    stacked_A,
    dx_NK,
    dstacked_A,
    columns,
    scaling,
    num_inputs,
    num_kept,
    owners,
    places,
) -> Tensor | None:
    """Writes dX and dA; returns dB, if there are no places to add to."""
    num_adapters = 1 if owners is None else len(owners[1])
    num_rows, num_ranks = len(dout_NM), down_NR.shape[1] // num_adapters
    rank = num_ranks // len(columns)
    dstacked_B = None
    if places is None:
        dstacked_B = down_NR.new_empty(num_adapters * sum(columns), rank, dtype=torch.float32)
    dout_NM, x_NK = with_contiguous_rows(dout_NM), with_contiguous_rows(x_NK)
    tiles = triton.cdiv(num_inputs, BACKWARD_TILES["BLOCK_K"])
    row_blocks = triton.cdiv(num_rows, BACKWARD_TILES["BLOCK_N"])
    num_programs = num_tiles(columns, BACKWARD_TILES["BLOCK_M"]) + tiles * (1 + row_blocks)
    _joined_backward_kernel[num_adapters, num_programs](
        product_NK,
        *(owners or (None, None)),
        places,
        scales_N,
        up_NR,
        dout_NM,
        x_NK,
        down_NR,
        stacked_A,
        dx_NK,
        dstacked_A,
        dstacked_B,
        num_rows,
        num_inputs,
        num_kept,
        rank,
        num_ranks,
        product_NK.stride(0),
        up_NR.stride(0),
        dout_NM.stride(0),
        x_NK.stride(0),
        down_NR.stride(0),
        stacked_A.stride(0),
        scaling,
        *ends_of(columns),
        BLOCK_R=rank_block(rank),
        BLOCK_RANKS=rank_block(num_ranks),
        **BACKWARD_TILES,
    )
    return dstacked_B
