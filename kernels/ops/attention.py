"""Attention within each of several sequences that lie one after the other, rotary embedding included on request.

    forward    q, k rotated in place       o = softmax(scale q kᵀ + mask) v
    backward   dq, dk, dv                  dq and dk rotated back, all three written side by side

On an NVIDIA GPU in bf16 or fp16 one Function includes the rotation (Su et al. 2021): only rotated queries and keys are
kept, and the projections' backward pass finds dq, dk and dv as one matrix. Short sequences take our own kernels, one
launch forward and one backward, which rotate keys in registers and only queries in place. Longer ones, and all with
dropout, take torch's variable-length flash attention (Dao 2023), whose backward pass gets a few heads at a time if
memory is short. Elsewhere, and with a softcap, torch attends sequence by sequence.

Shapes: A rows, H heads, G key/value heads, E head size, S sequences, L rows of one sequence.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sebp_edge.basics.flash_attention import dq_buffer_bytes

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


def sequence_attention_(
    q_AHE: Tensor,
    k_AGE: Tensor,
    v_AGE: Tensor,
    cu_seqlens: Tensor,
    max_len: int,
    scores: Scores,
    rotary: tuple[Tensor, Tensor] | None = None,
    max_dq_bytes: int | None = None,
    continues: Tensor | None = None,
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
        continues: int64 [S], the sequence whose keys and values come before those of each sequence, or -1; None if
            there are none. That sequence continues none itself. Computed one sequence at a time on every device.

    Returns:
        [A, H, E]. First-order gradients only, on a GPU.

    Raises:
        ValueError: a window without causal attention.
    """
    if scores.window is not None and not scores.causal:
        raise ValueError(f"A window of {scores.window} needs causal attention; leave it out, or ask for causal=True.")
    if continues is None and scores.softcap is None:
        cos, sin = rotary or (None, None)
        if not scores.dropout and backend.runs_short_attention(q_AHE, k_AGE, v_AGE, max_len):
            return _ShortAttention.apply(q_AHE, k_AGE, v_AGE, cos, sin, cu_seqlens, max_len, scores)
        if backend.runs_flash_attention(q_AHE):
            return _FlashAttention.apply(q_AHE, k_AGE, v_AGE, cos, sin, cu_seqlens, max_len, scores, max_dq_bytes)
    if rotary is not None:
        q_AHE, k_AGE = reference.rotate(q_AHE, *rotary), reference.rotate(k_AGE, *rotary)
    return _attention_by_sequence(q_AHE, k_AGE, v_AGE, cu_seqlens, scores, continues)


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_AHE, k_AGE, v_AGE, cos_AE, sin_AE, cu_seqlens, max_len, scores):
        rotary = None if cos_AE is None else (cos_AE, sin_AE)
        scale = q_AHE.shape[-1] ** -0.5 if scores.scale is None else scores.scale
        options = (max_len, scale, scores.window, scores.causal)
        out_AHE, logsumexp_AH = backend.kernels("short_attention").short_attention_(
            q_AHE, k_AGE, v_AGE, rotary, cu_seqlens, *options
        )
        ctx.save_for_backward(q_AHE, k_AGE, v_AGE, out_AHE, logsumexp_AH, cu_seqlens, cos_AE, sin_AE)
        ctx.options = options
        return out_AHE

    @staticmethod
    @once_differentiable
    def backward(ctx, dout_AHE):
        *states, out_AHE, logsumexp_AH, cu_seqlens, cos, sin = ctx.saved_tensors
        rotary = None if cos is None else (cos, sin)
        dout_AHE = dout_AHE if dout_AHE.stride(-1) == 1 else dout_AHE.contiguous()
        gradients = backend.kernels("short_attention").short_attention_backward(
            dout_AHE, *states, rotary, cu_seqlens, out_AHE, logsumexp_AH, *ctx.options
        )
        return *gradients, None, None, None, None, None


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
        lengths = (cu_seqlens, cu_seqlens, max_len, max_len)
        out_AHE, logsumexp, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
            q_AHE, k_AGE, v_AGE, *lengths, scores.dropout, scores.causal, False, **options
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


def _attention_by_sequence(q_AHE, k_AGE, v_AGE, cu_seqlens, scores: Scores, continues: Tensor | None = None) -> Tensor:
    lengths = cu_seqlens.diff().tolist()
    attend = _torch_attention if scores.softcap is None else _capped_attention
    q_S, k_S, v_S = (states.split(lengths) for states in (q_AHE, k_AGE, v_AGE))
    if continues is not None:
        k_S, v_S = (_after(states_S, continues.tolist()) for states_S in (k_S, v_S))
    parts = zip(lengths, q_S, k_S, v_S, strict=True)
    outputs = [
        attend(*(states.transpose(0, 1) for states in (q, k, v)), scores).transpose(0, 1)
        for length, q, k, v in parts
        if length
    ]
    return torch.cat(outputs) if outputs else q_AHE


def _after(states_S: Sequence[Tensor], continues: list[int]) -> list[Tensor]:
    """Returns the keys or values that each sequence sees: its own after those of the one that it continues."""
    return [
        states if at < 0 else torch.cat([states_S[at], states]) for at, states in zip(continues, states_S, strict=True)
    ]


def _torch_attention(q_HLE, k_GLE, v_GLE, scores: Scores) -> Tensor:
    length, num_keys = q_HLE.shape[1], k_GLE.shape[1]
    sees_all_before = length == num_keys and (scores.window is None or length <= scores.window)
    mask = None if sees_all_before else _visible(length, num_keys, scores, q_HLE.device)
    grouped = q_HLE.shape[0] != k_GLE.shape[0]
    states = (states[None] for states in (q_HLE, k_GLE, v_GLE))
    return F.scaled_dot_product_attention(
        *states,
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
