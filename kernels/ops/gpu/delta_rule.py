"""The gated delta rule and its gradients on packed texts, in Triton: chunks of rows, multiplied by tensor cores.

Within a chunk that begins with state S, with c the sums of g up to each row, e = exp(c), d = exp(c_last - c), and D the
decays exp(c_i - c_j) from a row to a later one:

    A = beta k kᵀ ∘ D below the diagonal        T = (1 + A)⁻¹        r = v - e k S        w = T (beta r)
    P = q kᵀ ∘ D up to the diagonal             out = e q S + P w    S <- exp(c_last) S + (d k)ᵀ w

as Yang et al. (2024) do, but with S where they expand T. Backward, with dS the gradient of the chunk's last state:

    dw = Pᵀ do + d k dS        y = Tᵀ dw        dv = beta y        dS <- exp(c_last) dS + (e q)ᵀ do - (e k)ᵀ dv
    dP = do wᵀ                 dA = -y wᵀ       the rest are products of these, and sums of rows and columns

States pass from chunk to chunk in one program for each text, head and block of values' columns; all else is computed
for all chunks side by side. Every sum is in a fixed order, so two runs are bitwise equal. Models of bf16 multiply in
fp16, since bf16 is too coarse for keys that are alike; what has no bounds, such as a state, is divided by its largest
number before. T is nearly that of fp32, and other models multiply in fp32.

Without erasing, as linear attention with decays (and state spaces) writes, w = beta v, and T is not there.

Shapes: A rows, S texts, N chunks, G and H heads, E and F their sizes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..chunked_rule import CHUNK
from .delta_tiles import (
    chunk_of,
    decays_of,
    dot,
    largest_of,
    load,
    load_number,
    load_unit,
    square_offsets,
    state_offsets,
    store,
    store_undivided,
)

# Columns of values in programs for a text and for a chunk, in models of bf16, and in programs of other models, whose
# operands take twice the room and more.
VALUES_OF_TEXTS, VALUES_OF_CHUNKS, VALUES_IN_FP32 = 64, 32, 16


@triton.jit(do_not_specialize=["num_texts"])
def _invert_kernel(
    k_ptr,
    g_ptr,
    beta_ptr,
    cu_seqlens_ptr,
    first_ptr,
    texts_ptr,
    inverses_ptr,
    num_texts,
    num_heads,
    heads_per_key,
    key_size,
    stride_k,
    stride_k_head,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    """T of each chunk and head, from the inverses of blocks of 1, 2, 4, ... rows on the diagonal."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin, _, end = chunk_of(chunk, cu_seqlens_ptr, first_ptr, texts_ptr, num_texts, CHUNK)
    if end == 0:
        return
    places = tl.arange(0, CHUNK)
    rows = begin + places
    has_row = rows < end
    k, _ = load_unit(k_ptr + head // heads_per_key * stride_k_head, rows, has_row, stride_k, key_size, KEYS)
    beta = load_number(beta_ptr + head, rows, has_row, num_heads)
    decays = decays_of(tl.cumsum(load_number(g_ptr + head, rows, has_row, num_heads), axis=0))
    system = beta[:, None] * dot(k, tl.trans(k), IN_FP32) * decays
    row, column = places[:, None], places[None, :]
    inverse = tl.where(row == column, 1.0, 0.0)
    inverse -= tl.where((row == column + 1) & (row % 2 == 1), system, 0.0)
    for level in tl.static_range(1, CHUNK.bit_length() - 1):
        # The lower left quarter of each block of twice the size.
        quarter = (row >> level == (column >> level) + 1) & ((row >> level) % 2 == 1)
        part = tl.where(quarter, system, 0.0)
        part = tl.dot(tl.dot(inverse, part, input_precision="tf32x3"), inverse, input_precision="tf32x3")
        inverse -= part
    tl.store(inverses_ptr + square_offsets(chunk * num_heads + head, CHUNK), inverse)


@triton.jit
def _forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    cu_seqlens_ptr,
    first_ptr,
    inverses_ptr,
    out_ptr,
    states_ptr,
    written_ptr,
    num_heads,
    heads_per_key,
    key_size,
    value_size,
    scale,
    stride_q,
    stride_q_head,
    stride_k,
    stride_k_head,
    stride_v,
    stride_v_head,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    """Outputs of a text's chunks, one after the other; or, without those, w and the state before each later chunk."""
    text, head, column = tl.program_id(0) // num_heads, tl.program_id(0) % num_heads, tl.program_id(1) * VALUES
    begin, end = tl.load(cu_seqlens_ptr + text).to(tl.int64), tl.load(cu_seqlens_ptr + text + 1).to(tl.int64)
    index = tl.load(first_ptr + text).to(tl.int64) * num_heads + head
    q_ptr += head // heads_per_key * stride_q_head
    k_ptr += head // heads_per_key * stride_k_head
    places, stride = tl.arange(0, CHUNK), num_heads * value_size
    state = tl.zeros((KEYS, VALUES), tl.float32)
    for first in range(0, end - begin, CHUNK):
        rows = begin + first + places
        has_row = rows < end
        k, _ = load_unit(k_ptr, rows, has_row, stride_k, key_size, KEYS)
        v = load(v_ptr + head * stride_v_head, rows, has_row, stride_v, value_size, column, VALUES)
        g = load_number(g_ptr + head, rows, has_row, num_heads)
        beta = load_number(beta_ptr + head, rows, has_row, num_heads)
        sums, total = tl.cumsum(g, axis=0), tl.sum(g, axis=0)
        if inverses_ptr is None:
            v *= beta[:, None]
        largest = largest_of(v, state)
        small, written = state / largest, v / largest
        if inverses_ptr is not None:
            left = written - tl.exp(sums)[:, None] * dot(k, small, IN_FP32)
            inverse = tl.load(inverses_ptr + square_offsets(index, CHUNK))
            written = dot(inverse, beta[:, None] * left, IN_FP32)
        if out_ptr is None:
            if first > 0:
                before = begin + first
                offsets, mask = state_offsets(
                    before, head, num_heads, key_size, value_size, column, CHUNK, KEYS, VALUES
                )
                tl.store(states_ptr + offsets, state, mask=mask)
            store(written_ptr + head * value_size, largest * written, rows, has_row, stride, value_size, column, VALUES)
        else:
            q, _ = load_unit(q_ptr, rows, has_row, stride_q, key_size, KEYS)
            weights = dot(q, tl.trans(k), IN_FP32) * decays_of(sums)
            weights = tl.where(places[:, None] >= places[None, :], weights, 0.0)
            out = tl.exp(sums)[:, None] * dot(q, small, IN_FP32)
            out = scale * largest * (out + dot(weights, written, IN_FP32))
            store(out_ptr + head * value_size, out, rows, has_row, stride, value_size, column, VALUES)
        written *= tl.exp(total - sums)[:, None]
        state = largest * (tl.exp(total) * small + dot(tl.trans(k), written, IN_FP32))
        index += num_heads


@triton.jit
def _backward_kernel(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    dout_ptr,
    cu_seqlens_ptr,
    first_ptr,
    inverses_ptr,
    dstates_ptr,
    dwritten_ptr,
    num_heads,
    heads_per_key,
    key_size,
    value_size,
    scale,
    stride_q,
    stride_q_head,
    stride_k,
    stride_k_head,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    """y of a text's chunks, the last one first, and the gradient of the state before each later one."""
    text, head, column = tl.program_id(0) // num_heads, tl.program_id(0) % num_heads, tl.program_id(1) * VALUES
    begin, end = tl.load(cu_seqlens_ptr + text).to(tl.int64), tl.load(cu_seqlens_ptr + text + 1).to(tl.int64)
    num_chunks = (end - begin + CHUNK - 1) // CHUNK
    q_ptr += head // heads_per_key * stride_q_head
    k_ptr += head // heads_per_key * stride_k_head
    places, stride = tl.arange(0, CHUNK), num_heads * value_size
    dstate = tl.zeros((KEYS, VALUES), tl.float32)
    for done in range(0, num_chunks):
        chunk = num_chunks - 1 - done
        index = (tl.load(first_ptr + text) + chunk) * num_heads + head
        rows = begin + chunk * CHUNK + places
        has_row = rows < end
        dout = scale * load(dout_ptr + head * value_size, rows, has_row, stride, value_size, column, VALUES)
        if done > 0:
            after = begin + (chunk + 1) * CHUNK
            offsets, mask = state_offsets(after, head, num_heads, key_size, value_size, column, CHUNK, KEYS, VALUES)
            tl.store(dstates_ptr + offsets, dstate, mask=mask)
        largest = largest_of(dout, dstate)
        dout, dstate = dout / largest, dstate / largest
        g = load_number(g_ptr + head, rows, has_row, num_heads)
        sums, total = tl.cumsum(g, axis=0), tl.sum(g, axis=0)
        k, _ = load_unit(k_ptr, rows, has_row, stride_k, key_size, KEYS)
        dwritten = tl.exp(total - sums)[:, None] * dot(k, dstate, IN_FP32)
        q, _ = load_unit(q_ptr, rows, has_row, stride_q, key_size, KEYS)
        weights = dot(k, tl.trans(q), IN_FP32) * tl.trans(decays_of(sums))
        weights = tl.where(places[:, None] <= places[None, :], weights, 0.0)
        dwritten += dot(weights, dout, IN_FP32)
        early = tl.exp(sums)[:, None]
        dstate = tl.exp(total) * dstate + dot(tl.trans(q), early * dout, IN_FP32)
        if inverses_ptr is not None:
            inverse = tl.load(inverses_ptr + square_offsets(index, CHUNK))
            dwritten = dot(tl.trans(inverse), dwritten, IN_FP32)
        store(dwritten_ptr + head * value_size, largest * dwritten, rows, has_row, stride, value_size, column, VALUES)
        if inverses_ptr is not None:
            beta = load_number(beta_ptr + head, rows, has_row, num_heads)
            dstate -= dot(tl.trans(k), (early * beta[:, None]) * dwritten, IN_FP32)
        dstate *= largest


@triton.jit(do_not_specialize=["num_texts"])
def _gradients_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    dout_ptr,
    cu_seqlens_ptr,
    first_ptr,
    texts_ptr,
    states_ptr,
    dstates_ptr,
    written_ptr,
    dwritten_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    dg_ptr,
    dbeta_ptr,
    num_texts,
    num_heads,
    heads_per_key,
    key_size,
    value_size,
    scale,
    stride_q,
    stride_q_head,
    stride_k,
    stride_k_head,
    stride_v,
    stride_v_head,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    ERASES: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    """The gradients of a chunk's inputs, those of queries and keys for each head of values."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin, first_row, end = chunk_of(chunk, cu_seqlens_ptr, first_ptr, texts_ptr, num_texts, CHUNK)
    if end == 0:
        return
    places = tl.arange(0, CHUNK)
    rows = begin + places
    has_row = rows < end
    has_before, has_after = begin > first_row, begin + CHUNK < end
    q_ptr += head // heads_per_key * stride_q_head
    k_ptr += head // heads_per_key * stride_k_head
    k, _ = load_unit(k_ptr, rows, has_row, stride_k, key_size, KEYS)
    g = load_number(g_ptr + head, rows, has_row, num_heads)
    beta = load_number(beta_ptr + head, rows, has_row, num_heads)
    sums, total = tl.cumsum(g, axis=0), tl.sum(g, axis=0)
    early, late = tl.exp(sums), tl.exp(total - sums)

    dq, dk = tl.zeros((CHUNK, KEYS), tl.float32), tl.zeros((CHUNK, KEYS), tl.float32)
    dweights, dsystem = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    dbeta, dsums, dtotal = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32), 0.0
    stride = num_heads * value_size
    for column in range(0, value_size, VALUES):
        offsets, mask = state_offsets(begin, head, num_heads, key_size, value_size, column, CHUNK, KEYS, VALUES)
        state = tl.load(states_ptr + offsets, mask=mask & has_before, other=0.0)
        v = load(v_ptr + head * stride_v_head, rows, has_row, stride_v, value_size, column, VALUES)
        written = load(written_ptr + head * value_size, rows, has_row, stride, value_size, column, VALUES)
        dwritten = load(dwritten_ptr + head * value_size, rows, has_row, stride, value_size, column, VALUES)
        dout = scale * load(dout_ptr + head * value_size, rows, has_row, stride, value_size, column, VALUES)
        offsets += num_heads * key_size * value_size
        dstate = tl.load(dstates_ptr + offsets, mask=mask & has_after, other=0.0)
        dv = beta[:, None] * dwritten
        store(dv_ptr + head * value_size, dv, rows, has_row, stride, value_size, column, VALUES)
        dtotal += tl.exp(total) * tl.sum(state * dstate)
        largest = largest_of(state, written)
        state, written = state / largest, written / largest
        if ERASES:
            read = largest * early[:, None] * dot(k, state, IN_FP32)
            dsums -= tl.sum(dv * read, axis=1)
            v -= read
        dbeta += tl.sum(dwritten * v, axis=1)
        largest_gradient = tl.maximum(largest_of(dout, dstate), largest_of(dwritten, dv))
        dout, dstate = dout / largest_gradient, dstate / largest_gradient
        dwritten, dv = dwritten / largest_gradient, dv / largest_gradient
        largest *= largest_gradient
        dq += largest * dot(dout, tl.trans(state), IN_FP32)
        dweights += largest * dot(dout, tl.trans(written), IN_FP32)
        dlate = largest * late[:, None] * dot(written, tl.trans(dstate), IN_FP32)
        dk += dlate
        if ERASES:
            dsystem -= largest * dot(dwritten, tl.trans(written), IN_FP32)
            dk -= largest * early[:, None] * dot(dv, tl.trans(state), IN_FP32)
        of_late = tl.sum(k * dlate, axis=1)
        dsums -= of_late
        dtotal += tl.sum(of_late, axis=0)

    # Keys are read again, so that registers hold them once, as the operand of products, until here.
    q, q_reciprocals = load_unit(q_ptr, rows, has_row, stride_q, key_size, KEYS)
    k, k_reciprocals = load_unit(k_ptr, rows, has_row, stride_k, key_size, KEYS)
    dq *= early[:, None]
    dsums += tl.sum(q * dq, axis=1)
    decays = decays_of(sums)
    dweights = tl.where(places[:, None] >= places[None, :], dweights * decays, 0.0)
    products = dweights * dot(q, tl.trans(k), IN_FP32)
    dsums += tl.sum(products, axis=1) - tl.sum(products, axis=0)
    if ERASES:
        dsystem = tl.where(places[:, None] > places[None, :], dsystem * decays, 0.0)
        products = dsystem * dot(k, tl.trans(k), IN_FP32)
        dbeta += tl.sum(products, axis=1)
        products *= beta[:, None]
        dsums += tl.sum(products, axis=1) - tl.sum(products, axis=0)
        dsystem *= beta[:, None]
    largest = largest_of(dweights, dsystem)
    dweights, dsystem = dweights / largest, dsystem / largest
    dq += largest * dot(dweights, k, IN_FP32)
    dk += largest * dot(tl.trans(dweights), q, IN_FP32)
    if ERASES:
        dk += largest * dot(dsystem + tl.trans(dsystem), k, IN_FP32)

    head_rows, stride = rows * num_heads + head, num_heads * key_size
    tl.store(dbeta_ptr + head_rows, dbeta.to(dbeta_ptr.dtype.element_ty), mask=has_row)
    dg = tl.cumsum(dsums, axis=0, reverse=True) + dtotal
    tl.store(dg_ptr + head_rows, dg.to(dg_ptr.dtype.element_ty), mask=has_row)
    store_undivided(dq_ptr + head * key_size, dq, q, q_reciprocals, rows, has_row, stride, key_size, KEYS)
    store_undivided(dk_ptr + head * key_size, dk, k, k_reciprocals, rows, has_row, stride, key_size, KEYS)


class _Inputs:
    """The inputs of a rule, whose kernels read rows in place if their last dimension is contiguous."""

    def __init__(
        self, q_AGE: Tensor, k_AGE: Tensor, v_AHF: Tensor, g_AH: Tensor, beta_AH: Tensor, chunks: tuple[Tensor, ...]
    ):
        self.q, self.k, self.v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_AGE, k_AGE, v_AHF))
        self.g, self.beta, self.chunks = g_AH.contiguous(), beta_AH.contiguous(), chunks
        self.num_texts, (self.num_heads, self.value_size) = len(chunks[1]), v_AHF.shape[1:]
        self.key_size, self.heads_per_key = k_AGE.shape[2], self.num_heads // k_AGE.shape[1]
        self.sizes = self.num_heads, self.heads_per_key, self.key_size, self.value_size, self.key_size**-0.5
        self.strides = (*self.q.stride()[:2], *self.k.stride()[:2])
        self.of_chunks = len(chunks[2]), self.num_heads
        in_fp32 = v_AHF.dtype != torch.bfloat16
        keys = max(16, triton.next_power_of_2(self.key_size))
        self.options = {"KEYS": keys, "CHUNK": CHUNK, "IN_FP32": in_fp32, "num_warps": 4, "num_stages": 1}

    def values(self, most: int) -> int:
        """Columns of values in a program."""
        return max(
            16, min(VALUES_IN_FP32 if self.options["IN_FP32"] else most, triton.next_power_of_2(self.value_size))
        )

    @property
    def by_text(self) -> tuple[tuple[int, int], dict]:
        """The grid and the options of kernels with a program for each text, head and block of values' columns."""
        values = self.values(VALUES_OF_TEXTS)
        grid = self.num_texts * self.num_heads, triton.cdiv(self.value_size, values)
        return grid, self.options | {"VALUES": values}

    def new_states(self) -> Tensor:
        """Room for the states before chunks, [(A - 1) // CHUNK, H, E, F]; before a text's first one they are empty."""
        shape = (len(self.v) - 1) // CHUNK, self.num_heads, self.key_size, self.value_size
        return self.v.new_empty(shape, dtype=torch.float32)

    def invert(self, erases: bool) -> Tensor | None:
        """T of each chunk and head, [N, H, CHUNK, CHUNK]; None if the rule erases nothing."""
        if not erases:
            return None
        inverses = self.v.new_empty(*self.of_chunks, CHUNK, CHUNK, dtype=torch.float32)
        _invert_kernel[self.of_chunks](
            *(self.k, self.g, self.beta, *self.chunks, inverses, self.num_texts),
            *(*self.sizes[:3], *self.k.stride()[:2]),
            **self.options,
        )
        return inverses

    def go_forward(
        self, inverses: Tensor | None, out: Tensor | None, states: Tensor | None, written: Tensor | None
    ) -> None:
        """Writes the outputs, or the states before chunks and what is written to them, w [A, H, F]."""
        grid, options = self.by_text
        _forward_kernel[grid](
            *(self.q, self.k, self.v, self.g, self.beta, *self.chunks[:2], inverses, out, states, written),
            *(*self.sizes, *self.strides, *self.v.stride()[:2]),
            **options,
        )


def gated_delta_rule(
    q_AGE: Tensor, k_AGE: Tensor, v_AHF: Tensor, g_AH: Tensor, beta_AH: Tensor, chunks: tuple[Tensor, ...], erases: bool
) -> Tensor:
    out = v_AHF.new_empty(v_AHF.shape, dtype=v_AHF.dtype if erases else torch.float32)
    if out.numel():
        inputs = _Inputs(q_AGE, k_AGE, v_AHF, g_AH, beta_AH, chunks)
        inputs.go_forward(inputs.invert(erases), out, None, None)
    return out


def gated_delta_rule_backward(
    dout: Tensor,
    q_AGE: Tensor,
    k_AGE: Tensor,
    v_AHF: Tensor,
    g_AH: Tensor,
    beta_AH: Tensor,
    chunks: tuple[Tensor, ...],
    erases: bool,
) -> tuple[Tensor, ...]:
    dv, dg, dbeta = (x.new_empty(x.shape) for x in (v_AHF, g_AH, beta_AH))
    if dv.numel() == 0:
        return q_AGE.new_empty(q_AGE.shape), k_AGE.new_empty(k_AGE.shape), dv, dg, dbeta
    inputs, dout = _Inputs(q_AGE, k_AGE, v_AHF, g_AH, beta_AH, chunks), dout.contiguous()
    inverses, of_rows = inputs.invert(erases), (inputs.g, inputs.beta, dout)
    states, dstates = (inputs.new_states() for _ in range(2))
    written, dwritten = (dv.new_empty(dv.shape, dtype=torch.float32) for _ in range(2))
    inputs.go_forward(inverses, None, states, written)
    grid, options = inputs.by_text
    _backward_kernel[grid](
        *(inputs.q, inputs.k, *of_rows, *chunks[:2], inverses, dstates, dwritten),
        *(*inputs.sizes, *inputs.strides),
        **options,
    )
    # Heads of values that read one head of keys have gradients of their own, which are summed.
    shape = (*v_AHF.shape[:2], inputs.key_size)
    dq, dk = (x.new_empty(shape, dtype=x.dtype if inputs.heads_per_key == 1 else torch.float32) for x in (q_AGE, k_AGE))
    _gradients_kernel[inputs.of_chunks](
        *(inputs.q, inputs.k, inputs.v, *of_rows, *chunks, states, dstates, written, dwritten),
        *(dq, dk, dv, dg, dbeta, inputs.num_texts),
        *(*inputs.sizes, *inputs.strides, *inputs.v.stride()[:2]),
        **inputs.options | {"VALUES": inputs.values(VALUES_OF_CHUNKS), "ERASES": erases},
    )
    if inputs.heads_per_key > 1:
        dq, dk = (x.unflatten(1, (-1, inputs.heads_per_key)).sum(2).to(q_AGE.dtype) for x in (dq, dk))
    return dq, dk, dv, dg, dbeta
