"""Attention within each of several sequences that lie one after the other, rotary embedding included on request.

    forward    q, k rotated in place       o = softmax(scale q kᵀ + mask) v
    backward   dq, dk, dv                  dq and dk rotated back, all three written side by side

On an NVIDIA GPU in bf16 or fp16 one Function includes the rotation (Su et al. 2021): only rotated queries and keys are
kept, and the projections' backward pass finds dq, dk and dv as one matrix. Short sequences take our own kernels, one
launch forward and one backward, which rotate keys in registers and only queries in place. Longer ones, and all with
dropout, take torch's variable-length flash attention (Dao 2023), whose backward pass gets a few heads at a time if
memory is short. Elsewhere, and with a softcap, torch attends sequence by sequence, which waits for a GPU.

A sequence may continue another one, its prefix, so that what several begin with is computed once. Our own kernels take
these at any length, since flash attention's sequences have their own keys only; and heads of 512, which are too large
for it.

Shapes: A rows, H heads, G key/value heads, E head size, S sequences, L rows of one sequence.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sebp_edge.basics.flash_attention import MAX_SHORT_LENGTH, dq_buffer_bytes

from . import backend, reference


class Scores(NamedTuple):
    """Options of the scores before the softmax, and of the weights after it.

    Attributes:
        scale: factor; None for 1 / sqrt(E).
        window: a query sees itself and the `window - 1` keys before it; None for all before it.
        softcap: if given, scores are softcap * tanh(scores / softcap) (Gemma 2).
        causal: whether a query sees no later key; else it sees all of its sequence, and no window is allowed.
        dropout: probability of zeroing a weight, by the device's default generator; the others are divided by
            1 - dropout.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    causal: bool = True
    dropout: float = 0.0


class Prefixes(NamedTuple):
    """Which sequences continue others: such a sequence sees the keys of its prefix, then its own.

    A prefix continues no sequence itself, and those that continue it lie right after it.

    Attributes:
        begins, lengths: int32 [S], the first row of each sequence's prefix, and its number of rows; 0 for no prefix.
        readers_end: int32 [S], the end of the last sequence that sees the keys of each one, at least its own.
        positions: int32 [A], the number of keys before each row's, those of the prefix included.
    """

    begins: Tensor
    lengths: Tensor
    readers_end: Tensor
    positions: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor, continues: Tensor) -> "Prefixes":
        """The prefixes of sequences that begin at `cu_seqlens`, int32 [S + 1]; on the host.

        Each continues the sequence in `continues`, int64 [S], or none if that is -1.
        """
        begins, ends, own = cu_seqlens[:-1], cu_seqlens[1:], cu_seqlens.diff()
        has_prefix = continues >= 0
        lengths = own[continues] * has_prefix
        readers_end = ends.clone().scatter_reduce_(0, continues[has_prefix], ends[has_prefix], "amax")
        shifts = torch.repeat_interleave(lengths - begins, own.long())
        positions = torch.arange(len(shifts), dtype=torch.int32) + shifts
        return cls(begins[continues] * has_prefix, lengths, readers_end, positions)

    def filled(self, cu_seqlens: Tensor) -> "Prefixes":
        """The same prefixes, with the sequences that `cu_seqlens` has in addition, which continue none; on the host."""
        num_sequences, begins = len(self.begins), cu_seqlens[:-1]
        num_rows, added = len(self.positions), cu_seqlens.diff()[num_sequences:].long()
        begins_of_rows = torch.repeat_interleave(begins[num_sequences:], added)
        positions = torch.arange(num_rows, num_rows + len(begins_of_rows), dtype=torch.int32) - begins_of_rows
        return Prefixes(
            F.pad(self.begins, (0, len(added))),
            F.pad(self.lengths, (0, len(added))),
            torch.cat([self.readers_end, cu_seqlens[1 + num_sequences :]]),
            torch.cat([self.positions, positions]),
        )

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Prefixes":
        """The same prefixes on `device`."""
        return Prefixes(*(part.to(device, non_blocking=non_blocking) for part in self))


def sequence_attention_(
    q_AHE: Tensor,
    k_AGE: Tensor,
    v_AGE: Tensor,
    cu_seqlens: Tensor,
    max_len: int,
    scores: Scores,
    rotary: tuple[Tensor, Tensor] | None = None,
    max_dq_bytes: int | None = None,
    prefixes: Prefixes | None = None,
) -> Tensor:
    """Attention of sequences that lie one after the other; may rotate `q` and `k` in place.

    Args:
        q_AHE, k_AGE, v_AGE: heads may be parts of wider rows. G divides H.
        cu_seqlens: int32 [S + 1], where each sequence begins; every row must be in one. Sequences may be empty.
        max_len: of the longest sequence, or more.
        scores: scale, window, softcap, mask and dropout.
        rotary: cosine and sine of each row's angles, [A, E], if q and k are not rotated yet.
        max_dq_bytes: most bytes in which flash attention's backward pass accumulates dq, but never less than one
            key/value head's; None for no limit.
        prefixes: the sequences that continue others; None if none does.

    Returns:
        [A, H, E]. First-order gradients only, on a GPU.

    Raises:
        ValueError: a window, or prefixes, without causal attention; angles of another size than heads.
    """
    if rotary is not None and rotary[0].shape[-1] != q_AHE.shape[-1]:
        raise ValueError(f"Got {rotary[0].shape[-1]} angles of each row; expected {q_AHE.shape[-1]}, a head's size.")
    if scores.window is not None and not scores.causal:
        raise ValueError(f"A window of {scores.window} needs causal attention; leave it out, or ask for causal=True.")
    if prefixes is not None and not scores.causal:
        raise ValueError("Prefixes need causal attention: without it their rows would see what continues them.")
    if rotary is None and q_AHE.shape[-1] != v_AGE.shape[-1] and backend.runs_flash_attention(q_AHE):
        return _attention_of_wide_values(q_AHE, k_AGE, v_AGE, cu_seqlens, max_len, scores, max_dq_bytes, prefixes)
    cos, sin = rotary or (None, None)
    if scores.softcap is None:
        runs_flash = prefixes is None and backend.runs_flash_attention(q_AHE)
        is_ours = not scores.dropout and (max_len <= MAX_SHORT_LENGTH or not runs_flash)
        if is_ours and backend.runs_short_attention(q_AHE, k_AGE, v_AGE):
            return _ShortAttention.apply(q_AHE, k_AGE, v_AGE, cos, sin, cu_seqlens, max_len, scores, prefixes)
        if runs_flash:
            return _FlashAttention.apply(q_AHE, k_AGE, v_AGE, cos, sin, cu_seqlens, max_len, scores, max_dq_bytes)
    dtype = q_AHE.dtype
    if q_AHE.device.type == "cpu" and dtype == torch.bfloat16:
        # torch's backward pass takes four times as long in bf16 there.
        q_AHE, k_AGE, v_AGE = q_AHE.float(), k_AGE.float(), v_AGE.float()
    if rotary is not None:
        q_AHE, k_AGE = reference.rotate(q_AHE, cos, sin), reference.rotate(k_AGE, cos, sin)
    return _attention_by_sequence(q_AHE, k_AGE, v_AGE, cu_seqlens, scores, prefixes).to(dtype)


def _attention_of_wide_values(q_AHE, k_AGE, v_AGE, cu_seqlens, max_len, scores: Scores, *options) -> Tensor:
    """Attention whose values have another size than its keys, which kernels do not take: zeros fill up the smaller."""
    sizes = q_AHE.shape[-1], v_AGE.shape[-1]
    if scores.scale is None:
        scores = scores._replace(scale=sizes[0] ** -0.5)
    wide = (F.pad(x, (0, max(sizes) - x.shape[-1])) for x in (q_AHE, k_AGE, v_AGE))
    out_AHE = sequence_attention_(*wide, cu_seqlens, max_len, scores, None, *options)
    return out_AHE[..., : sizes[1]]


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_AHE, k_AGE, v_AGE, cos_AE, sin_AE, cu_seqlens, max_len, scores, prefixes):
        rotary = None if cos_AE is None else (cos_AE, sin_AE)
        scale = q_AHE.shape[-1] ** -0.5 if scores.scale is None else scores.scale
        ctx.options = (max_len, scale, scores.window, scores.causal)
        out_AHE, logsumexp_AH = backend.kernels("short_attention").short_attention_(
            q_AHE, k_AGE, v_AGE, rotary, cu_seqlens, *ctx.options, prefixes
        )
        ctx.save_for_backward(q_AHE, k_AGE, v_AGE, out_AHE, logsumexp_AH, cu_seqlens, cos_AE, sin_AE, *(prefixes or ()))
        return out_AHE

    @staticmethod
    @once_differentiable
    def backward(ctx, dout_AHE):
        q_AHE, k_AGE, v_AGE, out_AHE, logsumexp_AH, cu_seqlens, cos, sin, *prefixes = ctx.saved_tensors
        rotary = None if cos is None else (cos, sin)
        dout_AHE = dout_AHE if dout_AHE.stride(-1) == 1 else dout_AHE.contiguous()
        gradients = backend.kernels("short_attention").short_attention_backward(
            dout_AHE, q_AHE, k_AGE, v_AGE, rotary, cu_seqlens, out_AHE, logsumexp_AH, *ctx.options, prefixes
        )
        return *gradients, None, None, None, None, None, None


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_AHE, k_AGE, v_AGE, cos_AE, sin_AE, cu_seqlens, max_len, scores, max_dq_bytes):
        if q_AHE.stride(0) < q_AHE.stride(1):
            # Outputs are laid out like queries: if these lie head by head, readers of rows would keep a copy.
            q_AHE = q_AHE.contiguous()
        if cos_AE is not None:
            backend.implementation(q_AHE, "rotate").rotate_(q_AHE, k_AGE, cos_AE, sin_AE)
        options = {"scale": scores.scale}
        if scores.window is not None:
            # torch counts keys to the left of the query, here the query is counted too.
            options |= {"window_size_left": scores.window - 1, "window_size_right": 0}
        dropout, causal = scores.dropout, scores.causal
        out_AHE, logsumexp, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
            q_AHE, k_AGE, v_AGE, cu_seqlens, cu_seqlens, max_len, max_len, dropout, causal, False, **options
        )
        ctx.save_for_backward(q_AHE, k_AGE, v_AGE, out_AHE, logsumexp, rng_state, unused, cu_seqlens, cos_AE, sin_AE)
        ctx.max_len, ctx.scores, ctx.options, ctx.max_dq_bytes = max_len, scores, options, max_dq_bytes
        return out_AHE

    @staticmethod
    @once_differentiable
    def backward(ctx, dout_AHE):
        q_AHE, k_AGE, v_AGE, out_AHE, logsumexp_HA, rng_state, unused, cu_seqlens, cos, sin = ctx.saved_tensors
        dout_AHE = dout_AHE.contiguous()
        lengths = (cu_seqlens, cu_seqlens, ctx.max_len, ctx.max_len)
        forward_options = (ctx.scores.dropout, ctx.scores.causal, rng_state, unused)

        def backward_of_heads(heads: slice, kv_heads: slice):
            """dq, dk and dv of rotated queries and keys."""
            of_queries, of_keys = (dout_AHE[:, heads], q_AHE[:, heads]), (k_AGE[:, kv_heads], v_AGE[:, kv_heads])
            return torch.ops.aten._flash_attention_backward(
                *of_queries, *of_keys, out_AHE[:, heads], logsumexp_HA[heads], *lengths, *forward_options, **ctx.options
            )

        num_heads, num_kv_heads = q_AHE.shape[1], k_AGE.shape[1]
        # Dropout depends on the index of a head.
        max_dq_bytes = None if ctx.scores.dropout else ctx.max_dq_bytes
        groups = _head_groups(num_heads, num_kv_heads, dq_buffer_bytes(*q_AHE.shape, len(cu_seqlens) - 1), max_dq_bytes)
        if cos is None and len(groups) == 1:
            return *backward_of_heads(*groups[0]), None, None, None, None, None, None
        whole = q_AHE.new_empty(len(q_AHE), num_heads + 2 * num_kv_heads, q_AHE.shape[2])
        dq_AHE, dk_AGE, dv_AGE = whole.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        for heads, kv_heads in groups:
            outs = (dq_AHE[:, heads], dk_AGE[:, kv_heads], dv_AGE[:, kv_heads])
            if cos is None:
                torch._foreach_copy_(outs, backward_of_heads(heads, kv_heads))
            else:
                backend.implementation(q_AHE, "rotate").rotate_gradients(
                    *backward_of_heads(heads, kv_heads), cos, sin, outs
                )
        return dq_AHE, dk_AGE, dv_AGE, None, None, None, None, None, None


def _head_groups(
    num_heads: int, num_kv_heads: int, dq_bytes: int, max_dq_bytes: int | None
) -> list[tuple[slice, slice]]:
    """Groups of heads that run together, with the key/value heads they share.

    All heads take `dq_bytes` bytes; there are enough groups that each takes about `max_dq_bytes`.
    """
    num_groups = 1 if max_dq_bytes is None else min(max(1, -(-dq_bytes // max_dq_bytes)), num_kv_heads)
    ratio = num_heads // num_kv_heads
    bounds = pairwise(num_kv_heads * index // num_groups for index in range(num_groups + 1))
    return [(slice(ratio * begin, ratio * end), slice(begin, end)) for begin, end in bounds]


def _attention_by_sequence(q_AHE, k_AGE, v_AGE, cu_seqlens, scores: Scores, prefixes: Prefixes | None = None) -> Tensor:
    sequences = [slice(begin, end) for begin, end in pairwise(cu_seqlens.tolist())]
    attend = _torch_attention if scores.softcap is None else _capped_attention
    without = [(0, 0)] * len(sequences)
    before = without if prefixes is None else zip(prefixes.begins.tolist(), prefixes.lengths.tolist(), strict=True)

    def keys_seen(states_AGE: Tensor, own: slice, prefix: tuple[int, int]) -> Tensor:
        begin, length = prefix
        return torch.cat([states_AGE[begin : begin + length], states_AGE[own]]) if length else states_AGE[own]

    outputs = []
    for own, prefix in zip(sequences, before, strict=True):
        if own.start < own.stop:
            states = q_AHE[own], keys_seen(k_AGE, own, prefix), keys_seen(v_AGE, own, prefix)
            outputs.append(attend(*(part.transpose(0, 1) for part in states), scores).transpose(0, 1))
    return torch.cat(outputs) if outputs else q_AHE


def _torch_attention(q_HLE, k_GLE, v_GLE, scores: Scores) -> Tensor:
    length, num_keys = q_HLE.shape[1], k_GLE.shape[1]
    sees_all_before = length == num_keys and (scores.window is None or length <= scores.window)
    mask = None if sees_all_before else _visible(length, num_keys, scores, q_HLE.device)
    grouped = q_HLE.shape[0] != k_GLE.shape[0]
    return F.scaled_dot_product_attention(
        q_HLE[None],
        k_GLE[None],
        v_GLE[None],
        attn_mask=mask,
        dropout_p=scores.dropout,
        is_causal=scores.causal and mask is None,
        scale=scores.scale,
        enable_gqa=grouped,
    )[0]


def _capped_attention(q_HLE, k_GLE, v_GLE, scores: Scores) -> Tensor:
    num_heads, length, head_size = q_HLE.shape
    k_HLE, v_HLE = (states.repeat_interleave(num_heads // len(states), 0) for states in (k_GLE, v_GLE))
    scale = head_size**-0.5 if scores.scale is None else scores.scale
    values_HLL = scores.softcap * torch.tanh(q_HLE @ k_HLE.transpose(1, 2) * (scale / scores.softcap))
    dtype = torch.promote_types(v_HLE.dtype, torch.float32)
    visible = _visible(length, k_HLE.shape[1], scores, q_HLE.device)
    weights_HLL = values_HLL.masked_fill(~visible, -torch.inf).softmax(dim=-1, dtype=dtype)
    return F.dropout(weights_HLL, scores.dropout).to(v_HLE.dtype) @ v_HLE


def _visible(length: int, num_keys: int, scores: Scores, device: torch.device) -> Tensor:
    """Which keys each query sees; bool [L, K]. The last query is at the last key."""
    positions = torch.arange(num_keys, device=device)
    distance = positions[num_keys - length :, None] - positions[None, :]
    below = -1 if scores.causal else -num_keys
    return (distance > below) & (distance < (scores.window or num_keys))
