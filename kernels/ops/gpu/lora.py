"""The rank-R products of a group of LoRA projections, in Triton: one launch for all of them.

    lora_up             out[n, m] = s sum over r of D[n, i R + r] B[m, r] + b[m]     i: the projection of column m
    lora_up_backward    U[a, i R + r] = s sum over m of dY[a, m] B[m, r]              m: the columns of projection i
                        dB[m, r] = s sum over a of dY[a, m] D[a, i R + r]

The backward kernel reads dY once for both. A program has a tile of columns and a share of the rows; its parts of U and,
if there are several shares, of dB go into workspaces that a second launch sums in a fixed order, so that two runs are
bitwise equal. Groups of more than three projections, and high ranks, run in plain PyTorch.

Shapes: N rows, A active rows, M columns of at most three projections, R rank.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from .move_rows import load_sum, with_contiguous_rows

MAX_PROJECTIONS = 3
# Tiles that fit into 99 KB of shared memory. Large ones of high ranks, or of fp32, would not, or spill kilobytes of
# registers, as small ones of yet higher ranks do.
MAX_RANK, MAX_RANK_OF_LARGE_TILES, MAX_RANK_OF_FP32 = 256, 64, 32
TILES, SMALL_TILES = {"BLOCK_N": 64, "BLOCK_M": 128}, {"BLOCK_N": 32, "BLOCK_M": 64}
SUM_BLOCK_N, SUM_BLOCK_E = 8, 1024


@triton.jit
def tile_columns(tile, end_0, end_1, end_2, BLOCK_M: tl.constexpr):
    """The projection of a tile, its first column and the end of its projection."""
    tiles_0 = tl.cdiv(end_0, BLOCK_M)
    tiles_1 = tl.cdiv(end_1 - end_0, BLOCK_M)
    projection = tl.where(tile < tiles_0, 0, tl.where(tile < tiles_0 + tiles_1, 1, 2))
    begin = tl.where(projection == 0, 0, tl.where(projection == 1, end_0, end_1))
    end = tl.where(projection == 0, end_0, tl.where(projection == 1, end_1, end_2))
    first = tl.where(projection == 0, 0, tl.where(projection == 1, tiles_0, tiles_0 + tiles_1))
    return projection, begin + (tile - first) * BLOCK_M, end


@triton.jit
def place_of(place_ptr):
    """Where the gradients of an adapter begin, at a multiple of 16 bytes."""
    return tl.multiple_of(tl.load(place_ptr).to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def sum_over_rows(
    total,
    wide_ptr,
    narrow_ptr,
    num_rows,
    columns,
    has_column,
    ranks,
    has_rank,
    stride_w,
    stride_ns,
    stride_n,
    NUM_PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Adds the sum over all rows of wide[:, column] narrow[:, rank] to the total, [columns, ranks]."""
    for first in range(0, num_rows, BLOCK_N):
        rows = (first + tl.arange(0, BLOCK_N)).to(tl.int64)
        has_row = rows < num_rows
        wide_ptrs, narrow_ptrs = wide_ptr + rows[:, None] * stride_w, narrow_ptr + rows[:, None] * stride_n
        wide = tl.load(wide_ptrs + columns[None, :], mask=has_row[:, None] & has_column[None, :], other=0.0)
        mask = has_row[:, None] & has_rank[None, :]
        narrow = load_sum(narrow_ptrs + ranks[None, :], mask, stride_ns, NUM_PARTS).to(wide.dtype)
        total = tl.dot(tl.trans(wide), narrow, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _lora_up_kernel(
    down_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    rank,
    num_columns,
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
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = begin + tl.arange(0, BLOCK_M)
    ranks = tl.arange(0, BLOCK_R)
    has_rank = ranks < rank
    down = tl.load(
        down_ptr + rows.to(tl.int64)[:, None] * stride_dn + projection * rank + ranks[None, :],
        mask=(rows < num_rows)[:, None] & has_rank[None, :],
        other=0.0,
    )
    weight = tl.load(
        weight_ptr + columns[None, :] * rank + ranks[:, None],
        mask=(columns < end)[None, :] & has_rank[:, None],
        other=0.0,
    )
    values = scaling * tl.dot(down, weight, input_precision="ieee")
    if HAS_BIAS:
        values += tl.load(bias_ptr + columns, mask=columns < end, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out_ptr + rows.to(tl.int64)[:, None] * num_columns + columns[None, :],
        values.to(out_ptr.dtype.element_ty),
        mask=(rows < num_rows)[:, None] & (columns < end)[None, :],
    )


@triton.jit(do_not_specialize=["num_rows"])
def _lora_up_backward_kernel(
    dout_ptr,
    down_ptr,
    weight_ptr,
    up_ptr,
    dweight_ptr,
    num_rows,
    rank,
    num_columns,
    rows_per_share,
    stride_dout,
    stride_dn,
    scaling,
    end_0,
    end_1,
    end_2,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    tile = tl.program_id(0)
    projection, begin, end = tile_columns(tile, end_0, end_1, end_2, BLOCK_M)
    columns = begin + tl.arange(0, BLOCK_M)
    ranks = tl.arange(0, BLOCK_R)
    has_column, has_rank = columns < end, ranks < rank
    weight = tl.load(
        weight_ptr + columns[:, None] * rank + ranks[None, :], mask=has_column[:, None] & has_rank[None, :], other=0.0
    )
    dweight = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    first = tl.program_id(1) * rows_per_share
    for begin_row in range(first, tl.minimum(first + rows_per_share, num_rows), BLOCK_N):
        rows = begin_row + tl.arange(0, BLOCK_N)
        has_row = rows < num_rows
        dout = tl.load(
            dout_ptr + rows.to(tl.int64)[:, None] * stride_dout + columns[None, :],
            mask=has_row[:, None] & has_column[None, :],
            other=0.0,
        )
        down = tl.load(
            down_ptr + rows.to(tl.int64)[:, None] * stride_dn + projection * rank + ranks[None, :],
            mask=has_row[:, None] & has_rank[None, :],
            other=0.0,
        )
        dweight = tl.dot(tl.trans(dout), down, dweight, input_precision="ieee")
        up = tl.dot(dout, weight, input_precision="ieee")
        tl.store(
            up_ptr + (tile.to(tl.int64) * num_rows + rows[:, None]) * rank + ranks[None, :],
            up,
            mask=has_row[:, None] & has_rank[None, :],
        )
    tl.store(
        dweight_ptr + (tl.program_id(1).to(tl.int64) * num_columns + columns[:, None]) * rank + ranks[None, :],
        dweight * scaling,
        mask=has_column[:, None] & has_rank[None, :],
    )


@triton.jit(do_not_specialize=["num_rows", "num_shares"])
def _sum_kernel(
    parts_ptr,
    up_ptr,
    dweights_ptr,
    dweight_ptr,
    num_rows,
    rank,
    num_columns,
    num_shares,
    stride_un,
    scaling,
    end_0,
    end_1,
    end_2,
    PROJECTIONS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    projection = tl.program_id(1)
    if projection == PROJECTIONS:
        # dB over the shares of rows.
        elements = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
        has_element = elements < num_columns * rank
        dweight = tl.zeros((BLOCK_E,), tl.float32)
        pointers = dweights_ptr + elements
        for _ in range(num_shares):
            dweight += tl.load(pointers, mask=has_element, other=0.0)
            pointers += num_columns * rank
        tl.store(dweight_ptr + elements, dweight, mask=has_element)
    elif tl.program_id(0) * BLOCK_N < num_rows:
        # U over the tiles of columns.
        tiles_0 = tl.cdiv(end_0, BLOCK_M)
        tiles_1 = tl.cdiv(end_1 - end_0, BLOCK_M)
        tiles_2 = tl.cdiv(end_2 - end_1, BLOCK_M)
        first = tl.where(projection == 0, 0, tl.where(projection == 1, tiles_0, tiles_0 + tiles_1))
        count = tl.where(projection == 0, tiles_0, tl.where(projection == 1, tiles_1, tiles_2))
        rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        ranks = tl.arange(0, BLOCK_R)
        mask = (rows < num_rows)[:, None] & (ranks < rank)[None, :]
        offsets = rows.to(tl.int64)[:, None] * rank + ranks[None, :]
        total = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
        for begin in range(0, count, BLOCK_T):
            tiles = begin + tl.arange(0, BLOCK_T)
            values = tl.load(
                parts_ptr + (first + tiles).to(tl.int64)[:, None, None] * num_rows * rank + offsets[None, :, :],
                mask=(tiles < count)[:, None, None] & mask[None, :, :],
                other=0.0,
            )
            total += tl.sum(values, axis=0)
        tl.store(
            up_ptr + rows.to(tl.int64)[:, None] * stride_un + projection * rank + ranks[None, :],
            (total * scaling).to(up_ptr.dtype.element_ty),
            mask=mask,
        )


def lora_up(
    down_NR: Tensor, weight_MR: Tensor, bias_M: Tensor | None, columns: tuple[int, ...], scaling: float
) -> Tensor:
    if not _has_tiles(columns, weight_MR):
        return reference.lora_up(down_NR, weight_MR, bias_M, columns, scaling)
    num_rows, (num_columns, rank) = down_NR.shape[0], weight_MR.shape
    out_NM = down_NR.new_empty(num_rows, num_columns)
    if num_rows:
        blocks = _blocks(weight_MR)
        _lora_up_kernel[triton.cdiv(num_rows, blocks["BLOCK_N"]), num_tiles(columns, blocks["BLOCK_M"])](
            down_NR,
            weight_MR,
            bias_M if bias_M is not None else down_NR,
            out_NM,
            num_rows,
            rank,
            num_columns,
            down_NR.stride(0),
            scaling,
            *ends_of(columns),
            HAS_BIAS=bias_M is not None,
            **blocks,
        )
    return out_NM


def lora_up_backward(
    dout_AM: Tensor, down_AR: Tensor, weight_MR: Tensor, columns: tuple[int, ...], scaling: float
) -> tuple[Tensor, Tensor]:
    """dB is in fp32, unless plain PyTorch computes it."""
    if not _has_tiles(columns, weight_MR):
        return reference.lora_up_backward(dout_AM, down_AR, weight_MR, columns, scaling)
    num_rows, (num_columns, rank) = dout_AM.shape[0], weight_MR.shape
    up_AR = torch.empty_like(down_AR)
    if num_rows == 0:
        return up_AR, weight_MR.new_zeros(weight_MR.shape, dtype=torch.float32)
    dout_AM = with_contiguous_rows(dout_AM)
    blocks, ends = _blocks(weight_MR), ends_of(columns)
    tiles, block = num_tiles(columns, blocks["BLOCK_M"]), blocks["BLOCK_N"]
    # About two programs per multiprocessor of a large GPU; a share is a whole number of blocks.
    num_shares = max(1, min(triton.cdiv(num_rows, 4 * block), 256 // tiles))
    rows_per_share = triton.cdiv(triton.cdiv(num_rows, num_shares), block) * block
    num_shares = triton.cdiv(num_rows, rows_per_share)
    parts = dout_AM.new_empty(tiles, num_rows, rank, dtype=torch.float32)
    dweights = dout_AM.new_empty(num_shares, num_columns, rank, dtype=torch.float32)
    _lora_up_backward_kernel[tiles, num_shares](
        dout_AM,
        down_AR,
        weight_MR,
        parts,
        dweights,
        num_rows,
        rank,
        num_columns,
        rows_per_share,
        dout_AM.stride(0),
        down_AR.stride(0),
        scaling,
        *ends,
        **blocks,
    )
    # With a single share the kernel has written dB itself.
    programs = triton.cdiv(num_rows, SUM_BLOCK_N)
    dweight_MR = dweights[0]
    if num_shares > 1:
        programs = max(programs, triton.cdiv(dweight_MR.numel(), SUM_BLOCK_E))
        dweight_MR = torch.empty_like(dweight_MR)
    _sum_kernel[programs, len(columns) + (num_shares > 1)](
        parts,
        up_AR,
        dweights,
        dweight_MR,
        num_rows,
        rank,
        num_columns,
        num_shares,
        up_AR.stride(0),
        scaling,
        *ends,
        **(blocks | {"BLOCK_N": SUM_BLOCK_N}),
        PROJECTIONS=len(columns),
        BLOCK_T=16,
        BLOCK_E=SUM_BLOCK_E,
    )
    return up_AR, dweight_MR


def num_tiles(columns: tuple[int, ...], block: int) -> int:
    """The tiles of all projections' columns, as `tile_columns` numbers them."""
    return sum(triton.cdiv(count, block) for count in columns)


def ends_of(columns: tuple[int, ...]) -> list[int]:
    """Where each projection's columns end; missing projections end with the last."""
    ends = [sum(columns[: number + 1]) for number in range(len(columns))]
    return ends + [ends[-1]] * (MAX_PROJECTIONS - len(ends))


def rank_block(rank: int) -> int:
    """The smallest block of ranks that tensor cores take."""
    return max(16, triton.next_power_of_2(rank))


def _has_tiles(columns: tuple[int, ...], weight_MR: Tensor) -> bool:
    max_rank = MAX_RANK if weight_MR.element_size() == 2 else MAX_RANK_OF_FP32
    return len(columns) <= MAX_PROJECTIONS and weight_MR.shape[1] <= max_rank


def _blocks(weight_MR: Tensor) -> dict[str, int]:
    rank = rank_block(weight_MR.shape[1])
    are_large = weight_MR.element_size() == 2 and rank <= MAX_RANK_OF_LARGE_TILES
    return (TILES if are_large else SMALL_TILES) | {"BLOCK_R": rank}
