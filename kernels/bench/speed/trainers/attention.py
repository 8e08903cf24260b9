"""torch's variable-length attention, as an attention function of transformers.

Shapes: N tokens of all texts, H heads, G key/value heads, E head size.
"""

import inspect

from torch import Tensor, nn
from torch.nn.attention import varlen
from transformers import AttentionInterface

VARLEN = "peers_varlen"
# torch 2.11 shares key/value heads without being told.
SHARED_HEADS = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters else {}


def varlen_attention(
    module: nn.Module,
    query_1HNE: Tensor,
    key_1GNE: Tensor,
    value_1GNE: Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float,
    **others,
) -> tuple[Tensor, None]:
    """Causal attention within each text of a packed row: [1, N, H, E]."""
    states = (each[0].transpose(0, 1) for each in (query_1HNE, key_1GNE, value_1GNE))
    return causal_varlen(*states, cu_seq_lens_q, max_length_q, scaling)[None], None


def causal_varlen(
    query_NHE: Tensor, key_NGE: Tensor, value_NGE: Tensor, cu_seqlens: Tensor, longest: int, scale: float | None
) -> Tensor:
    """Causal attention within each text: [N, H, E]."""
    ends = (cu_seqlens, cu_seqlens, longest, longest)
    return varlen.varlen_attn(query_NHE, key_NGE, value_NGE, *ends, scale=scale, window_size=(-1, 0), **SHARED_HEADS)


AttentionInterface.register(VARLEN, varlen_attention)
