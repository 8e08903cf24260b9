"""Attention of short sequences that lie one after the other, with rotary embedding, in Triton: one launch per pass.

    forward    s = scale q kᵀ where a query sees a key        p = softmax(s)        o = p v        q is rotated in place
    backward   dv = pᵀ do        ds = p (do vᵀ - sum(do o))        dq = scale ds k        dk = scale dsᵀ q

The heads that share a key/value head are rows of one matrix, query by query, so that their sum in dk and dv is part of
a product. A forward program has a tile of these rows. A backward program has a block of positions: dk and dv of its
keys come from all queries that see them (causal: their own and later ones), dq of its queries from all keys that they
see (causal: their own and earlier ones), so that nothing is summed in memory and two runs are bitwise equal. Keys are
rotated in registers wherever they are read. The softmax over blocks of keys, and its gradient from the logarithm of its
sum, are Dao's (2023).

A sequence that continues a prefix sees the prefix's keys, then its own. The sequences that continue a prefix lie right
after it, so the queries that see the prefix's keys are one range of rows: its own and theirs.

Shapes: A rows of all sequences, H heads, G key/value heads, E head size, S sequences.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Below any score, but finite: infinities would cancel to NaN.
LOWEST = tl.constexpr(-1.0e30)
LOG2_E = 1.4426950408889634


@triton.jit
def _load_heads(x_ptr, rows, has_row, HALF: tl.constexpr):
    """Whole heads, zeros where there is no row."""
    return tl.load(x_ptr + rows[:, None] + tl.arange(0, 2 * HALF)[None, :], mask=has_row[:, None], other=0.0)


@triton.jit
def _load_angles(cos_ptr, sin_ptr, positions, mask, HALF: tl.constexpr):
    """Cosines and sines of both halves of heads, fp32."""
    offsets = positions[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    cos_1 = tl.load(cos_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos_ptr + HALF + offsets, mask=mask, other=0.0).to(tl.float32)
    sin_1 = tl.load(sin_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin_ptr + HALF + offsets, mask=mask, other=0.0).to(tl.float32)
    return cos_1, cos_2, sin_1, sin_2


@triton.jit
def _load_rotated(x_ptr, rows, cos_ptr, sin_ptr, positions, has_row, HALF: tl.constexpr):
    """Whole heads, rotated if there are angles; zeros where there is no row."""
    if cos_ptr is None:
        x = _load_heads(x_ptr, rows, has_row, HALF)
    else:
        mask = has_row[:, None]
        offsets = rows[:, None] + tl.arange(0, HALF)[None, :]
        x_1 = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        x_2 = tl.load(x_ptr + HALF + offsets, mask=mask, other=0.0).to(tl.float32)
        cos_1, cos_2, sin_1, sin_2 = _load_angles(cos_ptr, sin_ptr, positions, mask, HALF)
        first = (x_1 * cos_1 - x_2 * sin_1).to(x_ptr.dtype.element_ty)
        second = (x_2 * cos_2 + x_1 * sin_2).to(x_ptr.dtype.element_ty)
        x = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (rows.shape[0], 2 * HALF))
    return x


@triton.jit
def _store_rotated_back(x_ptr, rows, x, cos_ptr, sin_ptr, positions, has_row, HALF: tl.constexpr):
    """Writes the gradients of heads from those of rotated heads, by the transpose of the rotation."""
    mask = has_row[:, None]
    if cos_ptr is None:
        tl.store(x_ptr + rows[:, None] + tl.arange(0, 2 * HALF)[None, :], x.to(x_ptr.dtype.element_ty), mask=mask)
    else:
        x_1, x_2 = tl.split(tl.permute(tl.reshape(x, (rows.shape[0], 2, HALF)), (0, 2, 1)))
        cos_1, cos_2, sin_1, sin_2 = _load_angles(cos_ptr, sin_ptr, positions, mask, HALF)
        first = x_1 * cos_1 + x_2 * sin_2
        second = x_2 * cos_2 - x_1 * sin_1
        offsets = rows[:, None] + tl.arange(0, HALF)[None, :]
        tl.store(x_ptr + offsets, first.to(x_ptr.dtype.element_ty), mask=mask)
        tl.store(x_ptr + HALF + offsets, second.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sees(query, key, length, window, CAUSAL: tl.constexpr):
    """Whether a query sees a key. Causal: its own and the `window - 1` before it, or all before it; else every key."""
    # Causal queries never see keys beyond the end of the sequence, which come after all of them.
    sees = key <= query if CAUSAL else (key < length) & (query >= 0)
    if window is not None:
        sees = sees & (query - key < window)
    return sees


@triton.jit
def _first_block(query, window, KEYS: tl.constexpr):
    """The start of the block that holds the first key that a query sees."""
    if window is None:
        return 0
    else:
        return tl.maximum(query - window + 1, 0) // KEYS * KEYS


@triton.jit
def _part_of_sequence(cu_seqlens_ptr, num_parts, num_kv_heads):
    """A program's part of a sequence, its key/value head, and the index, begin and length of the sequence."""
    program = tl.program_id(0)
    sequence = program // num_parts // num_kv_heads
    begin = tl.load(cu_seqlens_ptr + sequence)
    length = tl.load(cu_seqlens_ptr + sequence + 1) - begin
    # 64 bits: an offset may pass 2^31 elements.
    return program % num_parts, program // num_parts % num_kv_heads, sequence, begin.to(tl.int64), length


@triton.jit
def _prefix_of(prefix_begins_ptr, prefix_lengths_ptr, sequence, begin):
    """The length of the prefix that a sequence continues, and its first row, counted from the sequence's own."""
    length, first_row = 0, begin * 0
    if prefix_begins_ptr is not None:
        length = tl.load(prefix_lengths_ptr + sequence)
        first_row = tl.load(prefix_begins_ptr + sequence) - begin
    return length, first_row


@triton.jit
def _rows_of_keys(keys, prefix, prefix_row, prefix_begins_ptr):
    """The rows of keys that a sequence sees, counted from its own first row: its prefix's, then its own."""
    rows = keys
    if prefix_begins_ptr is not None:
        rows = tl.where(keys < prefix, keys + prefix_row, keys - prefix)
    return rows


@triton.jit(do_not_specialize=["num_parts"])
def _short_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    cu_seqlens_ptr,
    prefix_begins_ptr,
    prefix_lengths_ptr,
    out_ptr,
    logsumexp_ptr,
    num_parts,
    num_kv_heads,
    exp2_scale,
    window,
    stride_qa,
    stride_qh,
    stride_ka,
    stride_kh,
    stride_va,
    stride_vh,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    tile, kv_head, sequence, begin, length = _part_of_sequence(cu_seqlens_ptr, num_parts, num_kv_heads)
    if tile * ROWS >= length * GROUP:
        return
    prefix, prefix_row = _prefix_of(prefix_begins_ptr, prefix_lengths_ptr, sequence, begin)
    # From here on pointers are to the sequence's first row.
    num_heads = num_kv_heads * GROUP
    q_ptr += begin * stride_qa + kv_head * GROUP * stride_qh
    k_ptr += begin * stride_ka + kv_head * stride_kh
    v_ptr += begin * stride_va + kv_head * stride_vh
    out_ptr += (begin * num_heads + kv_head * GROUP) * (2 * HALF)
    logsumexp_ptr += begin * num_heads + kv_head * GROUP
    if cos_ptr is not None:
        cos_ptr += begin * (2 * HALF)
        sin_ptr += begin * (2 * HALF)

    rows = tile * ROWS + tl.arange(0, ROWS)
    queries, heads, has_row = rows // GROUP, rows % GROUP, rows < length * GROUP
    q_rows = queries * stride_qa + heads * stride_qh
    q = _load_rotated(q_ptr, q_rows, cos_ptr, sin_ptr, queries, has_row, HALF)
    if cos_ptr is not None:
        # No other program reads these, and every thread of this one has read them.
        tl.debug_barrier()
        tl.store(q_ptr + q_rows[:, None] + tl.arange(0, 2 * HALF)[None, :], q, mask=has_row[:, None])
    # Rows beyond the end see what the last query sees, so that no softmax is over nothing.
    seeing = prefix + tl.minimum(queries, length - 1)
    highest = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, 2 * HALF), tl.float32)
    end = length
    if CAUSAL:
        end = tl.minimum(length, (tile * ROWS + ROWS - 1) // GROUP + 1)
    for first in range(_first_block(prefix + tile * ROWS // GROUP, window, KEYS), prefix + end, KEYS):
        keys = first + tl.arange(0, KEYS)
        has_key = keys < prefix + length
        key_rows = _rows_of_keys(keys, prefix, prefix_row, prefix_begins_ptr)
        k = _load_rotated(k_ptr, key_rows * stride_ka, cos_ptr, sin_ptr, key_rows, has_key, HALF)
        v = _load_heads(v_ptr, key_rows * stride_va, has_key, HALF)
        sees = _sees(seeing[:, None], keys[None, :], prefix + length, window, CAUSAL)
        scores = tl.where(sees, tl.dot(q, tl.trans(k), input_precision="ieee") * exp2_scale, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_highest[:, None])
        rescale = tl.exp2(highest - new_highest)
        total = total * rescale + tl.sum(weights, axis=1)
        out = tl.dot(weights.to(v.dtype), v, out * rescale[:, None], input_precision="ieee")
        highest = new_highest
    out_rows = queries * num_heads + heads
    offsets = (out_rows * (2 * HALF))[:, None] + tl.arange(0, 2 * HALF)[None, :]
    tl.store(out_ptr + offsets, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=has_row[:, None])
    tl.store(logsumexp_ptr + out_rows, highest + tl.log2(total), mask=has_row)


@triton.jit
def _load_tile(q_ptr, q_rows, dout_ptr, dout_rows, out_ptr, logsumexp_ptr, out_rows, has_row, HALF: tl.constexpr):
    """Rotated queries, dO, the logarithms of the softmax's sums, and sum(dO O) of a tile of rows."""
    q = _load_heads(q_ptr, q_rows, has_row, HALF)
    dout = _load_heads(dout_ptr, dout_rows, has_row, HALF)
    out = _load_heads(out_ptr, out_rows * (2 * HALF), has_row, HALF)
    logsumexp = tl.load(logsumexp_ptr + out_rows, mask=has_row, other=0.0)
    return q, dout, logsumexp, tl.sum(dout.to(tl.float32) * out.to(tl.float32), axis=1)


@triton.jit
def _gradients_of_scores(q, k, v, dout, logsumexp, delta, queries, keys, length, scale, window, CAUSAL: tl.constexpr):
    """P and dS / scale of a tile of rows and a block of keys, in the inputs' dtype."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    sees = _sees(queries[:, None], keys[None, :], length, window, CAUSAL)
    weights = tl.where(sees, tl.exp2(scores - logsumexp[:, None]), 0.0)
    dweights = tl.dot(dout, tl.trans(v), input_precision="ieee")
    return weights.to(v.dtype), (weights * (dweights - delta[:, None])).to(v.dtype)


@triton.jit
def _short_attention_backward_kernel(
    dout_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    cu_seqlens_ptr,
    prefix_begins_ptr,
    prefix_lengths_ptr,
    readers_end_ptr,
    positions_ptr,
    out_ptr,
    logsumexp_ptr,
    gradients_ptr,
    num_parts,
    num_kv_heads,
    scale,
    exp2_scale,
    window,
    stride_da,
    stride_dh,
    stride_qa,
    stride_qh,
    stride_ka,
    stride_kh,
    stride_va,
    stride_vh,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    FIRST_BLOCK_SEES_ITSELF: tl.constexpr,
):
    block, kv_head, sequence, begin, length = _part_of_sequence(cu_seqlens_ptr, num_parts, num_kv_heads)
    first_key = block * KEYS
    if first_key >= length:
        return
    prefix, prefix_row = _prefix_of(prefix_begins_ptr, prefix_lengths_ptr, sequence, begin)
    # From here on pointers are to the sequence's first row.
    num_heads = num_kv_heads * GROUP
    stride_ga = (num_heads + 2 * num_kv_heads) * (2 * HALF)
    dout_ptr += begin * stride_da + kv_head * GROUP * stride_dh
    q_ptr += begin * stride_qa + kv_head * GROUP * stride_qh
    k_ptr += begin * stride_ka + kv_head * stride_kh
    v_ptr += begin * stride_va + kv_head * stride_vh
    out_ptr += (begin * num_heads + kv_head * GROUP) * (2 * HALF)
    logsumexp_ptr += begin * num_heads + kv_head * GROUP
    dq_ptr = gradients_ptr + begin * stride_ga + kv_head * GROUP * (2 * HALF)
    dk_ptr = gradients_ptr + begin * stride_ga + (num_heads + kv_head) * (2 * HALF)
    dv_ptr = dk_ptr + num_kv_heads * (2 * HALF)
    if cos_ptr is not None:
        cos_ptr += begin * (2 * HALF)
        sin_ptr += begin * (2 * HALF)

    keys = first_key + tl.arange(0, KEYS)
    has_key = keys < length
    k = _load_rotated(k_ptr, keys * stride_ka, cos_ptr, sin_ptr, keys, has_key, HALF)
    v = _load_heads(v_ptr, keys * stride_va, has_key, HALF)
    dk = tl.zeros((KEYS, 2 * HALF), tl.float32)
    dv = tl.zeros((KEYS, 2 * HALF), tl.float32)
    end = tl.minimum(length, first_key + KEYS)
    # The queries that see these keys, and the end of the keys that this block's queries see.
    first_query, end_query, end_key = 0, length, length
    if CAUSAL:
        first_query, end_key = first_key, end
    if window is not None:
        end_query = tl.minimum(length, first_key + KEYS - 1 + window)
    if readers_end_ptr is not None:
        # Sequences that continue this one lie after it; which of their queries see a key, only a window decides.
        readers_end = tl.load(readers_end_ptr + sequence) - begin.to(tl.int32)
        end_query = tl.where(readers_end > length, readers_end, end_query)
    for first_row in range(first_query * GROUP, end_query * GROUP, ROWS):
        rows = first_row + tl.arange(0, ROWS)
        queries, heads, has_row = rows // GROUP, rows % GROUP, rows < end_query * GROUP
        q_rows, dout_rows = queries * stride_qa + heads * stride_qh, queries * stride_da + heads * stride_dh
        out_rows, dq_rows = queries * num_heads + heads, queries * stride_ga + heads * (2 * HALF)
        q, dout, logsumexp, delta = _load_tile(
            q_ptr, q_rows, dout_ptr, dout_rows, out_ptr, logsumexp_ptr, out_rows, has_row, HALF
        )
        seeing = queries
        if window is not None and positions_ptr is not None:
            seeing = tl.load(positions_ptr + begin + queries, mask=has_row, other=0) - prefix
        weights, dscores = _gradients_of_scores(
            q, k, v, dout, logsumexp, delta, seeing, keys, length, exp2_scale, window, CAUSAL
        )
        dv = tl.dot(tl.trans(weights), dout, dv, input_precision="ieee")
        dk = tl.dot(tl.trans(dscores), q, dk, input_precision="ieee")
        if FIRST_BLOCK_SEES_ITSELF and (prefix + first_key == 0) & (first_row < end * GROUP):
            dq = tl.dot(dscores, k, input_precision="ieee") * scale
            _store_rotated_back(dq_ptr, dq_rows, dq, cos_ptr, sin_ptr, queries, rows < end * GROUP, HALF)
    dk_rows = keys * stride_ga
    offsets = dk_rows[:, None] + tl.arange(0, 2 * HALF)[None, :]
    tl.store(dv_ptr + offsets, dv.to(dv_ptr.dtype.element_ty), mask=has_key[:, None])
    _store_rotated_back(dk_ptr, dk_rows, dk * scale, cos_ptr, sin_ptr, keys, has_key, HALF)

    # With a single part the compiler leaves out what follows, unless there are prefixes.
    if num_parts == 1 and prefix_begins_ptr is None:
        return
    # Queries that see other blocks of keys: dk and dv are stored, so there are registers to accumulate dq.
    if prefix + first_key > 0 or not FIRST_BLOCK_SEES_ITSELF:
        for first_row in range(first_key * GROUP, end * GROUP, ROWS):
            rows = first_row + tl.arange(0, ROWS)
            queries, heads, has_row = rows // GROUP, rows % GROUP, rows < end * GROUP
            q_rows, dout_rows = queries * stride_qa + heads * stride_qh, queries * stride_da + heads * stride_dh
            out_rows, dq_rows = queries * num_heads + heads, queries * stride_ga + heads * (2 * HALF)
            q, dout, logsumexp, delta = _load_tile(
                q_ptr, q_rows, dout_ptr, dout_rows, out_ptr, logsumexp_ptr, out_rows, has_row, HALF
            )
            dq = tl.zeros((ROWS, 2 * HALF), tl.float32)
            for first in range(_first_block(prefix + first_row // GROUP, window, KEYS), prefix + end_key, KEYS):
                keys = first + tl.arange(0, KEYS)
                has_key = keys < prefix + length
                key_rows = _rows_of_keys(keys, prefix, prefix_row, prefix_begins_ptr)
                k = _load_rotated(k_ptr, key_rows * stride_ka, cos_ptr, sin_ptr, key_rows, has_key, HALF)
                v = _load_heads(v_ptr, key_rows * stride_va, has_key, HALF)
                seeing, length_seen = prefix + queries, prefix + length
                _, dscores = _gradients_of_scores(
                    q, k, v, dout, logsumexp, delta, seeing, keys, length_seen, exp2_scale, window, CAUSAL
                )
                dq = tl.dot(dscores, k, dq, input_precision="ieee")
            _store_rotated_back(dq_ptr, dq_rows, dq * scale, cos_ptr, sin_ptr, queries, has_row, HALF)


class _StepTiles(NamedTuple):
    """What one step of a program reads: rows (queries of one key/value head's heads), and keys."""

    rows: int
    keys: int
    num_warps: int


def _forward_tiles(head_size: int) -> _StepTiles:
    if head_size == 512:
        return _StepTiles(32, 16, 8)
    return _StepTiles(64, 64, 4) if head_size <= 128 else _StepTiles(64, 32, 8)


def _backward_tiles(head_size: int, states: Tensor) -> _StepTiles:
    """The largest that fit into registers and shared memory: 227 KB on Hopper, 99 KB on any GPU since Ampere."""
    is_hopper = states.is_cuda and torch.cuda.get_device_capability(states.device)[0] == 9
    if head_size == 512:
        return _StepTiles(16, 16, 8)
    if head_size == 256:
        return _StepTiles(64, 16, 4) if is_hopper else _StepTiles(32, 32, 8)
    return _StepTiles(128, 64, 8) if is_hopper else _StepTiles(32, 64, 8)


def _fitted(tiles: _StepTiles, max_len: int, group: int) -> _StepTiles:
    """Trims tiles to the longest sequence; products need at least 16 of everything."""
    keys = min(tiles.keys, max(16, triton.next_power_of_2(max_len)))
    rows = min(tiles.rows, max(16, triton.next_power_of_2(max_len * group)))
    return _StepTiles(rows, keys, tiles.num_warps)


def _angles(rotary: tuple[Tensor, Tensor] | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if rotary is None else (rotary[0].contiguous(), rotary[1].contiguous())


def short_attention_(
    q_AHE: Tensor,
    k_AGE: Tensor,
    v_AGE: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    cu_seqlens: Tensor,
    max_len: int,
    scale: float,
    window: int | None,
    causal: bool,
    prefixes: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, Tensor]:
    """The outputs [A, H, E], and log2 of the softmax's sums, fp32 [A, H]; may rotate `q` in place."""
    num_rows, num_heads, head_size = q_AHE.shape
    num_kv_heads, num_sequences = k_AGE.shape[1], len(cu_seqlens) - 1
    out_AHE = q_AHE.new_empty(q_AHE.shape)
    logsumexp_AH = q_AHE.new_empty(num_rows, num_heads, dtype=torch.float32)
    if num_rows:
        group = num_heads // num_kv_heads
        tiles = _fitted(_forward_tiles(head_size), max_len, group)
        num_parts = triton.cdiv(max_len * group, tiles.rows)
        _short_attention_kernel[(num_parts * num_kv_heads * num_sequences,)](
            q_AHE,
            k_AGE,
            v_AGE,
            *_angles(rotary),
            cu_seqlens,
            *(prefixes or (None,) * 4)[:2],
            out_AHE,
            logsumexp_AH,
            num_parts,
            num_kv_heads,
            scale * LOG2_E,
            window,
            *q_AHE.stride()[:2],
            *k_AGE.stride()[:2],
            *v_AGE.stride()[:2],
            GROUP=group,
            HALF=head_size // 2,
            ROWS=tiles.rows,
            KEYS=tiles.keys,
            CAUSAL=causal,
            num_warps=tiles.num_warps,
            num_stages=1,
        )
    return out_AHE, logsumexp_AH


def short_attention_backward(
    dout_AHE: Tensor,
    q_AHE: Tensor,
    k_AGE: Tensor,
    v_AGE: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    cu_seqlens: Tensor,
    out_AHE: Tensor,
    logsumexp_AH: Tensor,
    max_len: int,
    scale: float,
    window: int | None,
    causal: bool,
    prefixes: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv as parts of one new matrix, from what the forward pass left in `q` and returned."""
    num_rows, num_heads, head_size = q_AHE.shape
    num_kv_heads, num_sequences = k_AGE.shape[1], len(cu_seqlens) - 1
    gradients = q_AHE.new_empty(num_rows, num_heads + 2 * num_kv_heads, head_size)
    if num_rows:
        group = num_heads // num_kv_heads
        tiles = _fitted(_backward_tiles(head_size, q_AHE), max_len, group)
        num_parts = triton.cdiv(max_len, tiles.keys)
        _short_attention_backward_kernel[(num_parts * num_kv_heads * num_sequences,)](
            dout_AHE,
            q_AHE,
            k_AGE,
            v_AGE,
            *_angles(rotary),
            cu_seqlens,
            *(prefixes or (None,) * 4),
            out_AHE,
            logsumexp_AH,
            gradients,
            num_parts,
            num_kv_heads,
            scale,
            scale * LOG2_E,
            window,
            *dout_AHE.stride()[:2],
            *q_AHE.stride()[:2],
            *k_AGE.stride()[:2],
            *v_AGE.stride()[:2],
            GROUP=group,
            HALF=head_size // 2,
            ROWS=tiles.rows,
            KEYS=tiles.keys,
            CAUSAL=causal,
            # Whether queries of the first block see no other block of keys.
            FIRST_BLOCK_SEES_ITSELF=causal or num_parts == 1,
            num_warps=tiles.num_warps,
            num_stages=1,
        )
    return gradients.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
