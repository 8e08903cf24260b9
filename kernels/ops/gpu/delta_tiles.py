"""Tiles of the delta rule's programs: what they read and write of chunks, heads and states, and how they multiply.

Shapes: A rows; E and F, the sizes of keys and values.
"""

import triton
import triton.language as tl

from ..chunked_rule import EPSILON

EPS = tl.constexpr(EPSILON)


@triton.jit
def dot(a, b, IN_FP32: tl.constexpr):
    """The product of matrices of fp32 numbers, in fp32 or, if they are in its range, in fp16."""
    return tl.dot(a, b, input_precision="ieee") if IN_FP32 else tl.dot(a.to(tl.float16), b.to(tl.float16))


@triton.jit
def largest_of(a, b):
    """The largest magnitude in two matrices, or 1 if all is zero: divided by it, they are in fp16's range."""
    largest = tl.maximum(tl.max(tl.abs(a)), tl.max(tl.abs(b)))
    return tl.where(largest == 0.0, 1.0, largest)


@triton.jit
def load(x_ptr, rows, has_row, stride, num_columns, first, COLUMNS: tl.constexpr):
    """Some columns of a head's rows, fp32; zeros beyond."""
    columns = first + tl.arange(0, COLUMNS)
    mask = has_row[:, None] & (columns < num_columns)[None, :]
    return tl.load(x_ptr + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store(x_ptr, x, rows, has_row, stride, num_columns, first, COLUMNS: tl.constexpr):
    columns = first + tl.arange(0, COLUMNS)
    mask = has_row[:, None] & (columns < num_columns)[None, :]
    tl.store(x_ptr + rows[:, None] * stride + columns[None, :], x.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_unit(x_ptr, rows, has_row, stride, num_columns, COLUMNS: tl.constexpr):
    """A head's rows divided by their norms, and the reciprocals of these."""
    x = load(x_ptr, rows, has_row, stride, num_columns, 0, COLUMNS)
    reciprocals = tl.rsqrt(tl.sum(x * x, axis=1) + EPS)
    return x * reciprocals[:, None], reciprocals


@triton.jit
def load_number(x_ptr, rows, has_row, num_heads):
    """A head's number of each row, fp32."""
    return tl.load(x_ptr + rows * num_heads, mask=has_row, other=0.0).to(tl.float32)


@triton.jit
def decays_of(sums):
    """exp(c_i - c_j) from each row to later ones; 1 where that is above 0."""
    return tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0))


@triton.jit
def state_offsets(
    row, head, num_heads, key_size, value_size, first, CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr
):
    """Offsets of some columns of a head's state [E, F] before a row, and whether they are there.

    A text's second or a later chunk begins at that row. No two such rows are in the same CHUNK rows of the batch.
    """
    index = (row // CHUNK - 1) * num_heads + head
    rows, columns = tl.arange(0, KEYS), first + tl.arange(0, VALUES)
    offsets = rows[:, None] * value_size + columns[None, :]
    return index * key_size * value_size + offsets, (rows < key_size)[:, None] & (columns < value_size)[None, :]


@triton.jit
def square_offsets(index, CHUNK: tl.constexpr):
    """Offsets of a chunk's matrix [CHUNK, CHUNK] among others."""
    rows = tl.arange(0, CHUNK)
    return index * CHUNK * CHUNK + rows[:, None] * CHUNK + rows[None, :]


@triton.jit
def chunk_of(chunk, cu_seqlens_ptr, first_ptr, texts_ptr, num_texts, CHUNK: tl.constexpr):
    """The first row of a chunk, and its text's first row and end; an end of 0 for chunks that the texts do not have."""
    text = tl.load(texts_ptr + chunk)
    is_there = text < num_texts
    first = tl.load(cu_seqlens_ptr + text, mask=is_there, other=0).to(tl.int64)
    end = tl.load(cu_seqlens_ptr + text + 1, mask=is_there, other=0)
    return first + (chunk - tl.load(first_ptr + text, mask=is_there, other=0)) * CHUNK, first, end


@triton.jit
def store_undivided(x_ptr, dunit, unit, reciprocals, rows, has_row, stride, num_columns, COLUMNS: tl.constexpr):
    """Writes the gradients of rows from those of the rows divided by their norms."""
    dx = reciprocals[:, None] * (dunit - unit * tl.sum(unit * dunit, axis=1)[:, None])
    store(x_ptr, dx, rows, has_row, stride, num_columns, 0, COLUMNS)
