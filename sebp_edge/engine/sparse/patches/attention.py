"""Attention blocks of Llama's shape, with rotary embedding and attention as one operation.

    q, k, v = projections of x        q, k normalised if the block has norms for them        q, k rotated
    o = output projection of attention(q, k, v)

Only this file reimplements a model's own code, because that code copies all of q, k and v several times between
projections and attention. A block is replaced only if a trial on random numbers gives the same results. The trial also
records the options of its scores (scale, window, softcap).

Shapes: A rows, D hidden, H heads, G key/value heads, E head size.
"""

import logging

import torch
from torch import Tensor, nn

from sebp_edge.engine.sparse.patches.agreement import ATTENTION, find_mismatch
from sebp_edge.engine.sparse.patches.patch import Patch, has_own_forward, kind_of
from sebp_edge.ops import Scores, sequence_attention_

logger = logging.getLogger(__name__)

PROJECTIONS, HEAD_NORMS = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm"}


class FusedAttention(Patch):
    """Handle of one decoder's replaced attention blocks, and the options of their scores.

    The decoder's attention function must be `sebp_edge.engine.sparse.hoist.rows_attention`.
    """

    def __init__(self, decoder: nn.Module, max_dq_bytes: int | None = None):
        super().__init__()
        self._decoder, self._max_dq_bytes = decoder, max_dq_bytes
        self.scores: list[Scores] = []

    def attach(self) -> None:
        """Replaces the blocks that pass a trial."""
        for block, scores in self.replacements().items():
            self.scores.append(scores)
            self._replace(block, _Forward(block, scores, self._max_dq_bytes))

    def replacements(self) -> dict[nn.Module, Scores]:
        """The blocks that pass a trial, each with the options of its scores."""
        blocks = [block for block in self._decoder.modules() if _has_parts(block)]
        known: dict[tuple, Scores | None] = {}
        for block in blocks:
            kind = kind_of(block)
            if kind not in known:
                known[kind] = _scores_if_alike(block, self._decoder)
        found = ((block, known[kind_of(block)]) for block in blocks)
        return {block: scores for block, scores in found if scores is not None}


def _has_parts(block: nn.Module) -> bool:
    names = {name for name, _ in block.named_children()}
    return (
        names in (PROJECTIONS, PROJECTIONS | HEAD_NORMS)
        and isinstance(getattr(block, "head_dim", None), int)
        # A trial in evaluation mode would not see dropout.
        and not getattr(block, "attention_dropout", 0.0)
        and has_own_forward(block)
    )


class _Forward:
    """Replacement of one block's `forward`."""

    def __init__(self, block: nn.Module, scores: Scores, max_dq_bytes: int | None = None):
        self._block, self._scores, self._max_dq_bytes = block, scores, max_dq_bytes

    def __call__(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None, **inputs) -> tuple:
        block = self._block
        # Some blocks rotate a part of each head, if angles are for no more.
        rotates_part = position_embeddings and position_embeddings[0].shape[-1] != block.head_dim
        if rotates_part or "cu_seq_lens_q" not in inputs:
            return type(block).forward(block, hidden_states, position_embeddings, **inputs)
        if inputs.get("recorded_scores") is not None:
            inputs["recorded_scores"].append(self._scores)
        q_AHE, k_AGE, v_AGE = (
            # Not [0]: its backward pass would copy the gradient.
            project(hidden_states).squeeze(0).unflatten(-1, (-1, block.head_dim))
            for project in (block.q_proj, block.k_proj, block.v_proj)
        )
        if hasattr(block, "q_norm"):
            q_AHE, k_AGE = block.q_norm(q_AHE), block.k_norm(k_AGE)
        # Models without positions, such as Granite's hybrid ones, pass no angles.
        rotary = position_embeddings and tuple(angles[0] for angles in position_embeddings)
        sequences = inputs["cu_seq_lens_q"], inputs["max_length_q"]
        out_AHE = sequence_attention_(
            q_AHE, k_AGE, v_AGE, *sequences, self._scores, rotary, self._max_dq_bytes, inputs.get("prefixes")
        )
        return block.o_proj(out_AHE.flatten(1)[None]), None


def _scores_if_alike(block: nn.Module, decoder: nn.Module) -> Scores | None:
    """Returns the options of the block's scores if it computes the same as its replacement, else None."""
    embedding_VD = decoder.get_input_embeddings().weight
    device, dtype = embedding_VD.device, embedding_VD.dtype
    draw = torch.Generator(device).manual_seed(0)
    x_1AD = torch.randn(1, 11, embedding_VD.shape[1], generator=draw, device=device).to(dtype)
    angles = 6.28 * torch.rand(1, 11, block.head_dim // 2, generator=draw, device=device).repeat(1, 1, 2)
    rotary = angles.cos().to(dtype), angles.sin().to(dtype)
    cu_seqlens = torch.tensor([0, 4, 11], dtype=torch.int32, device=device)
    recorded_scores: list[Scores] = []
    lengths = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": 7, "max_length_k": 7}

    def original() -> Tensor:
        inputs = {"position_embeddings": rotary, "attention_mask": None, "recorded_scores": recorded_scores}
        return block(hidden_states=x_1AD, **inputs, **lengths)[0]

    def original_with_spread_scores() -> Tensor:
        nonlocal x_1AD
        original()
        (scores,) = recorded_scores
        x_1AD = x_1AD * _factor(block, x_1AD, scores)
        return original()

    def fused() -> Tensor:
        return _Forward(block, recorded_scores[0])(x_1AD, rotary, **lengths)[0]

    reason = find_mismatch(decoder, original_with_spread_scores, fused, ATTENTION)
    if reason is not None:
        logger.info("The attention of %s is not fused: %s", type(block).__name__, reason)
        return None
    return recorded_scores[0]


def _factor(block: nn.Module, x_1AD: Tensor, scores: Scores) -> float:
    """The factor on x, at least 1, for which scores vary by about 1. Equal scores would hide wrong rotary angles."""
    q, k = (project(x_1AD).float() for project in (block.q_proj, block.k_proj))
    scale = block.head_dim**-0.5 if scores.scale is None else scores.scale
    spread = float(q.square().mean().sqrt() * k.square().mean().sqrt()) * scale * block.head_dim**0.5
    return max(1.0, max(spread, 1e-6) ** -0.5)
