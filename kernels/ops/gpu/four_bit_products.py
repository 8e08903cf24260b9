"""Products of few rows with weights in 4 bits, in Triton; the weights' matrices are never written.

    add_outputs_        Y += X Wᵀ                                W: all projections' weights, stacked
    inputs              dY W
    outputs_and_low     X Wᵀ and D = X Aᵀ, in parts
    inputs_and_low      dY W and U_i = s dY_i B_i, in parts

A program expands tiles of one weight to the values that `four_bits` writes (`four_bit_tiles`), and multiplies all rows
by them, so that each code is read once. For outputs of few rows these weights stay in registers, and a launch before
interleaves the terms of X. The contraction is split until the programs fill a GPU; a later launch adds the fp32 parts
in a fixed order, so that two runs are bitwise equal. D and U have programs of their own in the same launch; then
`joined_lora` and `gated` add all parts.

Shapes: N rows, K inputs, M_i outputs of n projections, M their sum, R rank, S parts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantised import FourBits
from .four_bit_tiles import (
    CHUNK,
    chunks_of,
    expand,
    factors_of,
    interleave,
    left_factor_of,
    load_scales,
    load_words,
    places_in_left_factor,
    places_in_order,
    put_in_order,
    transpose,
)
from .four_bits import tensors_of
from .lora import rank_block
from .move_rows import sum_parts, with_contiguous_rows


class FourBitTiles(NamedTuple):
    """How a product is split into programs."""

    columns: int  # of the result, in each program
    depth: int  # the step of the contraction
    programs: int  # how many to split the contraction for: about what a GPU runs at once
    num_warps: int
    num_stages: int
    # Whether expanded weights stay in registers; only for outputs, with a depth of four chunks.
    in_registers: bool = False


OUTPUT_TILES, INPUT_TILES = FourBitTiles(64, 256, 264, 4, 2, in_registers=True), FourBitTiles(128, 128, 264, 4, 2)
# Tiles of more rows of X leave one program to a multiprocessor, which is slower, or none where it has 99 KB of shared
# memory.
MAX_ROWS_BESIDE_REGISTERS, TILES_OF_MORE_OUTPUTS = 80, FourBitTiles(64, 128, 264, 4, 2)
# Rows that a program interleaves.
INTERLEAVED_ROWS = 8
# FourBitTiles of D and U, and the terms of a part: more would take longer than the products, fewer longer to add.
LOW = {"LOW_SHARE": 2048, "LOW_BLOCK_N": 16, "LOW_DEPTH": 128}
# Ranks whose tiles fit beside those of the products.
MAX_LOW_RANK = 64


@triton.jit
def _block_of_rows(
    first, num_rows, terms, stride_xn, INTERLEAVED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Rows, the places of their terms in a step's X, and their sums, [columns, rows]."""
    rows = first + tl.arange(0, BLOCK_N)
    if INTERLEAVED:
        # Without a sign they differ by constants, and take few registers.
        places = rows.to(tl.uint32)[:, None] * terms.shape[0] + terms.to(tl.uint32)[None, :]
    else:
        # Rows beyond the last repeat it, and are not stored.
        places = tl.minimum(rows, num_rows - 1)[:, None] * stride_xn + terms[None, :]
    return rows, places, tl.zeros((COLUMNS, BLOCK_N), tl.float32)


@triton.jit
def _add_product(block, tile_of_weight, step_ptr, has_x, is_step):
    """Adds the product of a step to a block."""
    rows, places, total = block
    x = tl.load(step_ptr + places, mask=has_x, other=None if has_x is None else 0.0)
    total = tl.dot(tile_of_weight, tl.trans(x), total, input_precision="ieee")
    # Always true. Triton would let products run on into the next step, where the assembler gives registers that they
    # still read to other values.
    return rows, places, tl.where(is_step, total, 0.0)


@triton.jit
def _low_product(
    program,
    x_ptr,
    factor_ptr,
    low_ptr,
    outs,
    num_rows,
    num_inputs,
    rank,
    scaling,
    stride_xn,
    stride_ft,
    stride_fr,
    OF_INPUTS: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Writes one part of D_i, or of U_i, for BLOCK_N rows; zeros where a projection has fewer outputs than others."""
    row_blocks = tl.cdiv(num_rows, BLOCK_N)
    rows, projection = program % row_blocks * BLOCK_N + tl.arange(0, BLOCK_N), program // row_blocks % len(outs)
    part = program // row_blocks // len(outs)
    ranks, first_rank = tl.arange(0, BLOCK_R), projection * rank
    has_row, has_rank = (rows < num_rows)[:, None], (ranks < rank)[None, :]
    num_terms = num_inputs
    if OF_INPUTS:
        num_terms, before, first = 0, 0, 0
        for number in tl.static_range(len(outs)):
            first = tl.where(projection == number, before, first)
            num_terms = tl.where(projection == number, outs[number], num_terms)
            before += outs[number]
        x_ptr += first
        factor_ptr += first * stride_ft
    else:
        factor_ptr += first_rank * stride_fr
    total = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    for begin in tl.range(part * SHARE, tl.minimum((part + 1) * SHARE, num_terms), DEPTH):
        terms = begin + tl.arange(0, DEPTH)
        has_term = terms < num_terms
        x = tl.load(x_ptr + rows[:, None] * stride_xn + terms[None, :], mask=has_row & has_term[None, :], other=0.0)
        factor_ptrs = factor_ptr + terms[:, None] * stride_ft + ranks[None, :] * stride_fr
        factor = tl.load(factor_ptrs, mask=has_term[:, None] & has_rank, other=0.0)
        total = tl.dot(x, factor, total, input_precision="ieee")
    num_ranks = rank * len(outs)
    low_ptrs = low_ptr + (part * num_rows + rows[:, None]) * num_ranks + first_rank + ranks[None, :]
    tl.store(low_ptrs, total * scaling, mask=has_row & has_rank)


@triton.jit(do_not_specialize=["num_rows"])
def _interleave_kernel(
    x_ptr, interleaved_ptr, num_rows, num_terms, stride_xn, ROWS: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes some rows of a step's tile of X, interleaved."""
    step, rows = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    places = tl.arange(0, DEPTH)[None, :]
    terms = step * DEPTH + places
    x = tl.load(x_ptr + rows * stride_xn + terms, mask=(rows < num_rows) & (terms < num_terms), other=0.0)
    tl.store(interleaved_ptr + (step * ROWS + rows) * DEPTH + places, interleave(x))


@triton.jit(do_not_specialize=["num_rows", "num_chunks", "num_low_programs", "share"])
def _four_bit_product_kernel(
    x_ptr,
    interleaved_ptr,
    packed_ptrs,
    code_ptrs,
    scales_ptrs,
    scale_code_ptrs,
    second_scales_ptrs,
    offset_ptrs,
    outs,
    factor_ptr,
    out_ptr,
    low_ptr,
    num_rows,
    num_chunks,
    num_low_programs,
    share,
    rank,
    scaling,
    stride_xn,
    stride_ft,
    stride_fr,
    stride_on,
    stride_os,
    OF_INPUTS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    IN_PTX: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    LOW_SHARE: tl.constexpr,
    LOW_BLOCK_N: tl.constexpr,
    LOW_BLOCK_R: tl.constexpr,
    LOW_DEPTH: tl.constexpr,
):
    """Writes COLUMNS columns of one part of the result, for rows in BLOCKS of these sizes."""
    # A tile of a weight: its rows, and the chunks of its columns.
    TILE_M: tl.constexpr = DEPTH if OF_INPUTS else COLUMNS
    TILE_C: tl.constexpr = (COLUMNS if OF_INPUTS else DEPTH) // 64
    num_inputs = num_chunks * 64

    # The programs of D or U come last: they are short, and run while the longer ones end.
    first_low = tl.num_programs(0) - num_low_programs
    if tl.program_id(0) >= first_low:
        _low_product(
            tl.program_id(0) - first_low,
            x_ptr,
            factor_ptr,
            low_ptr,
            outs,
            num_rows,
            num_inputs,
            rank,
            scaling,
            stride_xn,
            stride_ft,
            stride_fr,
            OF_INPUTS,
            LOW_SHARE,
            LOW_BLOCK_N,
            LOW_BLOCK_R,
            LOW_DEPTH,
        )
        return

    # The projection of this program. `left` is below zero from there on.
    left = tl.program_id(0)
    packed_ptr, code_ptr, scales_ptr = packed_ptrs[0], code_ptrs[0], scales_ptrs[0]
    scale_code_ptr, second_scales_ptr, offset_ptr = scale_code_ptrs[0], second_scales_ptrs[0], offset_ptrs[0]
    slab, split, tile, before, num_outputs, projection = 0, 0, 0, 0, 0, 0
    outs_before, slabs_before = 0, 0
    for number in tl.static_range(len(outs)):
        if OF_INPUTS:
            num_tiles, num_splits = tl.cdiv(num_inputs, COLUMNS), tl.cdiv(tl.cdiv(outs[number], DEPTH), share)
        else:
            num_tiles, num_splits = tl.cdiv(outs[number], COLUMNS), tl.cdiv(tl.cdiv(num_inputs, DEPTH), share)
        is_here = (left >= 0) & (left < num_tiles * num_splits)
        packed_ptr = tl.where(is_here, packed_ptrs[number], packed_ptr)
        code_ptr = tl.where(is_here, code_ptrs[number], code_ptr)
        scales_ptr = tl.where(is_here, scales_ptrs[number], scales_ptr)
        scale_code_ptr = tl.where(is_here, scale_code_ptrs[number], scale_code_ptr)
        second_scales_ptr = tl.where(is_here, second_scales_ptrs[number], second_scales_ptr)
        offset_ptr = tl.where(is_here, offset_ptrs[number], offset_ptr)
        split = tl.where(is_here, left // num_tiles, split)
        slab = tl.where(is_here, slabs_before + left // num_tiles, slab)
        tile = tl.where(is_here, left % num_tiles, tile)
        before = tl.where(is_here, outs_before, before)
        num_outputs = tl.where(is_here, outs[number], num_outputs)
        projection = tl.where(is_here, number, projection)
        left -= num_tiles * num_splits
        outs_before += outs[number]
        if OF_INPUTS:
            slabs_before += num_splits

    if OF_INPUTS:
        num_terms, first_column = num_outputs, 0
        has_column = tile * COLUMNS + tl.arange(0, COLUMNS) < num_inputs
        x_ptr += before
    else:
        num_terms, first_column = num_inputs, before
        has_column = tile * COLUMNS + tl.arange(0, COLUMNS) < num_outputs
    columns = first_column + tile * COLUMNS + tl.arange(0, COLUMNS)
    begin, end = split * share, tl.minimum((split + 1) * share, tl.cdiv(num_terms, DEPTH))

    INTERLEAVED: tl.constexpr = interleaved_ptr is not None
    terms = tl.arange(0, DEPTH)
    blocks, num_placed = (), 0
    for number in tl.static_range(len(BLOCKS)):
        blocks += (_block_of_rows(num_placed, num_rows, terms, stride_xn, INTERLEAVED, COLUMNS, BLOCKS[number]),)
        num_placed += BLOCKS[number]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    weight = num_outputs, num_chunks, end
    first_row, first_chunk = (0, tile * TILE_C) if OF_INPUTS else (tile * COLUMNS, 0)
    # In one dimension, so that Triton spreads scales over threads as it does the words.
    if INTERLEAVED:
        of_rows, of_chunks = places_in_left_factor(TILE_M)
    else:
        of_rows, of_chunks = places_in_order(TILE_M, TILE_C)
    place = first_row + of_rows, first_chunk + of_chunks
    if IN_PTX:
        code = [tl.load(code_ptr + number) for number in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)]
    else:
        code = tl.load(code_ptr + tl.arange(0, 16))
    offset = tl.load(offset_ptr)
    scale_ptrs = scales_ptr, second_scales_ptr
    chunks = chunks_of(place, weight, begin, DEPTH, OF_INPUTS, IS_EVEN)
    words, more_words = load_words(packed_ptr, chunks)
    scales, second_scales = load_scales(scale_ptrs, chunks, BLOCK, SCALE_BLOCK)
    factors = factors_of(scales, second_scales, scale_code_ptr, offset, SCALE_BLOCK)
    chunks = chunks_of(place, weight, begin + 1, DEPTH, OF_INPUTS, IS_EVEN)
    scales, second_scales = load_scales(scale_ptrs, chunks, BLOCK, SCALE_BLOCK)
    for step in range(begin, end):
        tile_of_weight = expand(words, more_words, factors, code, dtype, IN_PTX)
        if OF_INPUTS:
            tile_of_weight = transpose(tl.reshape(tile_of_weight, (DEPTH, COLUMNS)))
        elif INTERLEAVED:
            tile_of_weight = left_factor_of(tile_of_weight, COLUMNS)
        else:
            tile_of_weight = tl.reshape(tile_of_weight, (COLUMNS, DEPTH))
        # Ahead: words by a step, their scales by two.
        chunks = chunks_of(place, weight, step + 1, DEPTH, OF_INPUTS, IS_EVEN)
        words, more_words = load_words(packed_ptr, chunks)
        factors = factors_of(scales, second_scales, scale_code_ptr, offset, SCALE_BLOCK)
        chunks = chunks_of(place, weight, step + 2, DEPTH, OF_INPUTS, IS_EVEN)
        scales, second_scales = load_scales(scale_ptrs, chunks, BLOCK, SCALE_BLOCK)
        if INTERLEAVED:
            step_ptr, has_x = interleaved_ptr + step * (num_placed * DEPTH), None
        else:
            step_ptr, has_x = x_ptr + step * DEPTH, None if IS_EVEN else (step * DEPTH + terms < num_terms)[None, :]
        is_step = step < end
        blocks = [_add_product(block, tile_of_weight, step_ptr, has_x, is_step) for block in blocks]

    out_ptrs = out_ptr + slab.to(tl.int64) * stride_os + columns[:, None]
    for number in tl.static_range(len(BLOCKS)):
        rows, _, total = blocks[number]
        if OF_INPUTS:
            total = put_in_order(total)
        mask = has_column[:, None] & (rows < num_rows)[None, :]
        tl.store(out_ptrs + rows[None, :] * stride_on, total, mask=mask)


def add_outputs_(
    out_NM: Tensor, x_NK: Tensor, weights: Sequence[FourBits], columns: Sequence[int], tiles: FourBitTiles | None = None
) -> None:
    """Adds X Wᵀ to the outputs of all projections, side by side."""
    if len(x_NK):
        tiles = tiles or _output_tiles(len(x_NK))
        parts, _ = _launch(x_NK, weights, columns, x_NK.shape[1], None, tiles, of_inputs=False)
        out_NM.add_(parts.sum(0))


def inputs(
    dout_NM: Tensor,
    weights: Sequence[FourBits],
    columns: Sequence[int],
    num_inputs: int,
    tiles: FourBitTiles | None = None,
) -> Tensor:
    """dY W, [N, K]."""
    if len(dout_NM) == 0:
        return dout_NM.new_empty(0, num_inputs)
    parts, _ = _launch(dout_NM, weights, columns, num_inputs, None, tiles or INPUT_TILES, of_inputs=True)
    return sum_parts(parts, None, dout_NM.dtype)


def outputs_and_low(
    x_NK: Tensor,
    weights: Sequence[FourBits],
    columns: Sequence[int],
    stacked_A: Tensor,
    tiles: FourBitTiles | None = None,
) -> tuple[Tensor, Tensor]:
    """The fp32 parts of X Wᵀ, [S, N, M], and of D, [S, N, n R]."""
    low = stacked_A.T, len(stacked_A) // len(columns), 1.0
    tiles = tiles or _output_tiles(len(x_NK))
    return _launch(x_NK, weights, columns, x_NK.shape[1], low, tiles, of_inputs=False)


def inputs_and_low(
    dout_NM: Tensor,
    weights: Sequence[FourBits],
    columns: Sequence[int],
    num_inputs: int,
    stacked_B: Tensor,
    scaling: float,
    tiles: FourBitTiles | None = None,
) -> tuple[Tensor, Tensor]:
    """The fp32 parts of dY W, [S, N, K], and of U, [S, N, n R]."""
    low = stacked_B, stacked_B.shape[1], scaling
    return _launch(dout_NM, weights, columns, num_inputs, low, tiles or INPUT_TILES, of_inputs=True)


def _launch(
    x: Tensor,
    weights: Sequence[FourBits],
    columns: Sequence[int],
    num_inputs: int,
    low: tuple[Tensor, int, float] | None,
    tiles: FourBitTiles,
    *,
    of_inputs: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the fp32 parts of the product, [S, N, ..], and those of D or U.

    Args:
        low: the factor of D or U, [terms, ranks], the rank of each projection, and the scaling; or None.
    """
    x = with_contiguous_rows(x)
    wholes = [num_inputs] if of_inputs else columns
    terms = columns if of_inputs else [num_inputs]
    num_tiles = sum(triton.cdiv(whole, tiles.columns) for whole in wholes)
    steps = [triton.cdiv(each, tiles.depth) for each in terms]
    share = _share(steps, tiles.programs // num_tiles)
    num_parts = sum(triton.cdiv(each, share) for each in steps)
    parts = x.new_empty(num_parts, len(x), sum(wholes), dtype=torch.float32)
    first = weights[0]
    # Without D and U any pointers will do.
    factor, rank, scaling, low_parts, num_low_programs = x, 0, 1.0, parts, 0
    if low is not None:
        factor, rank, scaling = low
        num_low_parts = triton.cdiv(max(terms), LOW["LOW_SHARE"])
        low_parts = x.new_empty(num_low_parts, len(x), rank * len(columns), dtype=torch.float32)
        num_low_programs = triton.cdiv(len(x), LOW["LOW_BLOCK_N"]) * len(columns) * num_low_parts
    blocks = _row_blocks(len(x), of_inputs=of_inputs)
    interleaved = _interleave(x, sum(blocks), tiles.depth) if tiles.in_registers else None
    is_even = all(whole % tiles.columns == 0 for whole in wholes) and all(each % tiles.depth == 0 for each in terms)
    _four_bit_product_kernel[(num_tiles * num_parts + num_low_programs,)](
        x,
        interleaved,
        *tensors_of(weights),
        tuple(columns),
        factor,
        parts,
        low_parts,
        len(x),
        num_inputs // CHUNK,
        num_low_programs,
        share,
        rank,
        scaling,
        x.stride(0),
        *factor.stride(),
        parts.stride(1),
        parts.stride(0),
        OF_INPUTS=of_inputs,
        IS_EVEN=is_even,
        BLOCK=first.block,
        SCALE_BLOCK=first.of_scales.block if first.of_scales else 0,
        IN_PTX=x.is_cuda,
        COLUMNS=tiles.columns,
        DEPTH=tiles.depth,
        BLOCKS=blocks,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **LOW,
        LOW_BLOCK_R=16 if low is None else rank_block(rank),
        enable_fp_fusion=False,
    )
    return parts, low_parts


def _interleave(x: Tensor, block: int, depth: int) -> Tensor:
    """X with the terms of `left_factor_of`: a tile for each step, [block, depth]; zeros beyond rows and terms."""
    num_rows, num_terms = x.shape
    interleaved = x.new_empty(triton.cdiv(num_terms, depth), block, depth)
    grid = len(interleaved), block // INTERLEAVED_ROWS
    _interleave_kernel[grid](
        x, interleaved, num_rows, num_terms, x.stride(0), ROWS=block, DEPTH=depth, BLOCK=INTERLEAVED_ROWS
    )
    return interleaved


def _output_tiles(num_rows: int) -> FourBitTiles:
    return OUTPUT_TILES if num_rows <= MAX_ROWS_BESIDE_REGISTERS else TILES_OF_MORE_OUTPUTS


def _row_blocks(num_rows: int, *, of_inputs: bool) -> tuple[int, ...]:
    """The sizes of blocks that hold all rows."""
    if of_inputs and num_rows > 64:
        # Of one size, since the expanded tile is read from shared memory for each size.
        return (32,) * triton.cdiv(num_rows, 32)
    if 64 < num_rows <= 96:
        return 64, 16 if num_rows <= 80 else 32
    return (max(16, triton.next_power_of_2(num_rows)),)


def _share(steps: list[int], most_parts: int) -> int:
    """The fewest steps in a part for at most so many parts, or one of each contraction."""
    share = triton.cdiv(sum(steps), max(1, most_parts))
    while sum(triton.cdiv(each, share) for each in steps) > max(most_parts, len(steps)):
        share += 1
    return share
