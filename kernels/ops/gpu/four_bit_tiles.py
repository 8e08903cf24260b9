"""Tiles of weights in 4 bits, loaded and expanded in the registers of a Triton kernel; see `ops/quantised.py`.

A thread multiplies the code's 16 numbers by a scale, rounds them, and looks its weights up among these products by byte
permutations: 3 instructions a weight. Triton's interpreter has no PTX, so there the numbers are gathered, with the same
bits.

Tensor cores take a left factor from registers: four threads share rows r and r + 8 of 16, and each has a pair of 8
terms. So what they loaded stays where it is, without shared memory, if pairs of terms of four chunks are interleaved.
The other factor's terms must be interleaved, too.
"""

import triton
import triton.language as tl

# Weights that a thread expands together, from 32 bytes; they share a scale.
CHUNK = 64


def _tables(pack: str) -> str:
    """PTX that multiplies 16 numbers by a scale and rounds them; the low bytes, then the high ones, in 4 words each."""
    products = [f"mul.rn.f32 v{i}, $8, ${9 + i};" for i in range(16)]
    pairs = [f"cvt.rn.{pack}.f32 p{i}, v{2 * i + 1}, v{2 * i};" for i in range(8)]
    planes = [
        f"prmt.b32 ${4 * plane + i}, p{2 * i}, p{2 * i + 1}, {selector};"
        for plane, selector in enumerate(("0x6420", "0x7531"))
        for i in range(4)
    ]
    return "{ .reg .f32 v<16>; .reg .b32 p<8>; " + " ".join([*products, *pairs, *planes]) + " }"


def _look_ups() -> str:
    """PTX that looks 8 codes up in 16 numbers of 2 bytes, and gives them as 4 pairs."""
    lines = [
        "and.b32 low, $4, 0x77777777;",
        "shr.u32 high, $4, 1;",
        "lop3.b32 high, high, 0x44444444, 0x32103210, 0xEA;",
    ]
    for half in range(2):
        if half:
            lines += ["shr.u32 low, low, 16;", "shr.u32 high, high, 16;"]
        for plane, begin in (("l", 5), ("h", 9)):
            lines += [
                f"prmt.b32 a, ${begin}, ${begin + 1}, low;",
                f"prmt.b32 b, ${begin + 2}, ${begin + 3}, low;",
                f"prmt.b32 {plane}, a, b, high;",
            ]
        lines += [f"prmt.b32 ${2 * half}, l, h, 0x4051;", f"prmt.b32 ${2 * half + 1}, l, h, 0x6273;"]
    return "{ .reg .b32 low, high, a, b, l, h; " + " ".join(lines) + " }"


BF16_TABLES, FP16_TABLES = tl.constexpr(_tables("bf16x2")), tl.constexpr(_tables("f16x2"))
LOOK_UPS = tl.constexpr(_look_ups())


@triton.jit
def places_in_order(ROWS: tl.constexpr, CHUNKS: tl.constexpr):
    """The row and the chunk that each thread loads of a tile."""
    places = tl.arange(0, ROWS * CHUNKS)
    return places // CHUNKS, places % CHUNKS


@triton.jit
def places_in_left_factor(ROWS: tl.constexpr):
    """The same of a tile of four chunks a row that becomes a left factor: [2 halves, ROWS / 16, 8 rows, 4 chunks]."""
    places = tl.arange(0, ROWS * 4)
    return places // 32 % (ROWS // 16) * 16 + places // (ROWS * 2) * 8 + places // 4 % 8, places % 4


@triton.jit
def left_factor_of(chunks, ROWS: tl.constexpr):
    """The tile of these chunks, [rows, interleaved terms]."""
    tile = tl.permute(tl.reshape(chunks, (2, ROWS // 16, 8, 256)), (1, 0, 2, 3))
    return interleave(tl.reshape(tile, (ROWS, 256)))


@triton.jit
def interleave(tile):
    """Interleaves the pairs of four chunks: [rows, terms]."""
    pairs = tl.permute(tl.reshape(tile, (tile.shape[0], 4, 32, 2)), (0, 2, 1, 3))
    return tl.reshape(pairs, tile.shape)


@triton.jit
def chunks_of(place, weight, step, DEPTH: tl.constexpr, OF_INPUTS: tl.constexpr, IS_EVEN: tl.constexpr):
    """The numbers of a step's chunks in their weight: fewer than 2^31.

    Beyond the weight they are those at its end, which meet zeros of X, or columns that are not stored.
    """
    rows, chunks = place
    num_outputs, num_chunks, end = weight
    # Beyond the last step nothing is multiplied.
    step = tl.minimum(step, end - 1)
    first_row, first_chunk = (step * DEPTH, 0) if OF_INPUTS else (0, step * (DEPTH // 64))
    if IS_EVEN:
        return rows * num_chunks + chunks + (first_row * num_chunks + first_chunk)
    rows, chunks = tl.minimum(rows + first_row, num_outputs - 1), tl.minimum(chunks + first_chunk, num_chunks - 1)
    return rows * num_chunks + chunks


@triton.jit
def load_words(packed_ptr, chunks):
    """Words of chunks, and those four further on, [chunks, 4] each."""
    # 16 bytes each; the compiler does not see it through the choice of a projection.
    words_ptr = tl.multiple_of(packed_ptr, 16).to(tl.pointer_type(tl.int32))
    word_ptrs = words_ptr + (chunks.to(tl.int64)[:, None] * 8 + tl.arange(0, 4)[None, :])
    return tl.load(word_ptrs), tl.load(word_ptrs + 4)


@triton.jit
def load_scales(scale_ptrs, chunks, BLOCK: tl.constexpr, SCALE_BLOCK: tl.constexpr):
    """The scales of chunks, and what these are multiplied by."""
    scales_ptr, second_scales_ptr = scale_ptrs
    # Without a sign a division is a shift.
    blocks = chunks.to(tl.uint32) // (BLOCK // 64)
    scales = tl.load(scales_ptr + blocks)
    second_scales = tl.load(second_scales_ptr + blocks // SCALE_BLOCK) if SCALE_BLOCK else scales
    return scales, second_scales


@triton.jit
def factors_of(scales, second_scales, scale_code_ptr, offset, SCALE_BLOCK: tl.constexpr):
    """What the scales stand for."""
    if SCALE_BLOCK:
        scales = tl.load(scale_code_ptr + scales.to(tl.int32)) * second_scales + offset
    return scales


@triton.jit
def _look_up(words, tables):
    """Pairs of weights, [chunks, 4, 2, 2]."""
    of_words = (words,)
    first, second, third, fourth = tl.inline_asm_elementwise(
        LOOK_UPS,
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
        of_words + tables,
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )
    return tl.join(tl.join(first, third), tl.join(second, fourth))


@triton.jit
def expand(words, more_words, factors, code, dtype: tl.constexpr, IN_PTX: tl.constexpr):
    """Weights, [chunks, 64], from the words of chunks and their factors."""
    CHUNKS: tl.constexpr = words.shape[0]
    if IN_PTX:
        of_factors = (factors[:, None],)
        tables = tl.inline_asm_elementwise(
            BF16_TABLES if dtype == tl.bfloat16 else FP16_TABLES,
            "=r,=r,=r,=r,=r,=r,=r,=r,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f",
            of_factors + code,
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        pairs = tl.join(_look_up(words, tables), _look_up(more_words, tables))
        low = pairs.to(tl.int16).to(dtype, bitcast=True)
        high = (pairs >> 16).to(tl.int16).to(dtype, bitcast=True)
        values = tl.permute(tl.join(low, high), (0, 4, 1, 2, 3, 5))
    else:
        words = tl.reshape(tl.permute(tl.join(words, more_words), (0, 2, 1)), (CHUNKS, 8, 1))
        # Two codes of each byte, the first in its high half.
        shifts = tl.arange(0, 4)[:, None] * 8 + (4 - tl.arange(0, 2)[None, :] * 4)
        codes = words >> tl.reshape(shifts, (1, 1, 8)) & 15
        values = tl.reshape(tl.gather(code, tl.reshape(codes, (codes.numel,)), 0), codes.shape)
        values = (values * factors[:, None, None]).to(dtype)
    return tl.reshape(values, (CHUNKS, 64))


@triton.jit
def transpose(tile):
    """Transposes a tile to [inputs, rows]; interleaves parts of chunks, so that threads write to different banks."""
    CHUNKS: tl.constexpr = tile.shape[1] // 64
    parts = tl.reshape(tile, (tile.shape[0], CHUNKS, CHUNKS, 64 // CHUNKS))
    return tl.reshape(tl.permute(parts, (2, 1, 3, 0)), (tile.shape[1], tile.shape[0]))


@triton.jit
def put_in_order(total):
    """Undoes the interleaving of `transpose`: [inputs, ..]."""
    CHUNKS: tl.constexpr = total.shape[0] // 64
    parts = tl.reshape(total, (CHUNKS, CHUNKS, 64 // CHUNKS, total.shape[1]))
    return tl.reshape(tl.permute(parts, (1, 0, 2, 3)), (total.shape[0], total.shape[1]))
