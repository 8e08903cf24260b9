"""Level 2: a decoder runs on the active rows only. Gathered once at the embedding, scattered back never.

Gathering after one layer and scattering before the next cancel out, so the padded batch [B, T] becomes one row of A
tokens, [1, A]: every layer, the loss and the backward pass see no padding. Losses and gradients are the padded ones.

Only transformers' own extension points are used: a registered attention function, and keywords of the model's call.
The attention function is the one piece of state outside the model; it is a pure function of its arguments.

Shapes: B sequences, T positions, A active rows, C loss rows, H heads, G key/value heads, E head size, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from sebp_edge.errors import SparsityError
from sebp_edge.models.lora import without_adapter
from sebp_edge.ops import gather_rows
from sebp_edge.sparse.fused_lora import FusedLora
from sebp_edge.sparse.last_layer import LastLayer
from sebp_edge.sparse.loss import Head
from sebp_edge.sparse.rows import RowPlan
from sebp_edge.sparse.small_ops import SmallOps
from sebp_edge.sparse.trial import trial_batch

ATTENTION = "sebp_edge_rows"


class Hoisted:
    """The handle of one hoisted model: a context manager, or `remove()` when done."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._decoder: PreTrainedModel = without_adapter(model)
        self._head = Head(self._decoder)
        self._last_layer = LastLayer(self._decoder)
        self._before = self._decoder.config._attn_implementation
        self._decoder.set_attn_implementation(ATTENTION)
        self._small_ops = SmallOps(self._decoder)
        self._fused = FusedLora(
            model, lambda layers, x: None, alone=self._last_layer.query, remake_of=self._small_ops.remake_of
        )
        self._last_layer.attach()

    def remove(self) -> None:
        """Gives the model its own attention, LoRA layers, norms and MLPs back."""
        self._last_layer.remove()
        self._fused.remove()
        self._small_ops.remove()
        self._decoder.set_attn_implementation(self._before)

    def __enter__(self) -> "Hoisted":
        return self

    def __exit__(self, *exception) -> None:
        self.remove()

    def row_losses(self, input_ids_BT: Tensor, plan: RowPlan) -> Tensor:
        """The loss of every loss row, in nats: fp32 [C].

        Args:
            input_ids_BT: the right-padded batch, int64; on the model's device, as is the plan.
            plan: the batch's rows.
        """
        fewer = len(plan.loss_rows) < len(plan.active_rows)
        restricted = fewer and self._last_layer.is_exact(self._decoder, self._trial_losses)
        return self._row_losses(input_ids_BT, plan, restricted)

    def _row_losses(self, input_ids_BT: Tensor, plan: RowPlan, restricted: bool) -> Tensor:
        ids_A = input_ids_BT.flatten()[plan.active_rows]
        # Where the loss rows are among the active ones.
        places_C = torch.searchsorted(plan.active_rows, plan.loss_rows)
        with self._fused.refreshed(), self._last_layer.on(places_C if restricted else None):
            hidden_AD = self._decoder.base_model(
                input_ids=ids_A[None],
                position_ids=(plan.active_rows % input_ids_BT.shape[1])[None],
                # None, not ones: transformers would take ones for one long document.
                attention_mask=None,
                cu_seq_lens_q=plan.cu_seqlens,
                cu_seq_lens_k=plan.cu_seqlens,
                max_length_q=plan.max_len,
                max_length_k=plan.max_len,
                use_cache=False,
            ).last_hidden_state[0]
        return self._head.losses(gather_rows(hidden_AD, places_C), plan.targets)

    def _trial_losses(self, restricted: bool) -> Tensor:
        input_ids, labels = trial_batch(self._decoder)
        return self._row_losses(input_ids, RowPlan.from_labels(labels).to(labels.device), restricted)


# Keywords that transformers' attention layers pass along and that change nothing here.
_WITHOUT_EFFECT = {"position_ids", "use_cache", "cache_position", "output_attentions", "is_causal", "return_dict"}


def rows_attention(
    module: nn.Module,
    query_1HAE: Tensor,
    key_1GAE: Tensor,
    value_1GAE: Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_k: int | None = None,
    **others,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a row of sequences, in the form that transformers registers.

    Returns:
        [1, A, H, E], and None for the weights.

    Raises:
        SparsityError: a keyword asks for something that is not implemented (softcap, dropout, sinks).
    """
    asked = [name for name, value in others.items() if name not in _WITHOUT_EFFECT and value is not None]
    if asked or dropout or attention_mask is not None:
        raise SparsityError(f"Attention with {', '.join(asked) or 'dropout or a mask'} does not run on hoisted rows.")
    if query_1HAE.is_cuda and query_1HAE.dtype in (torch.bfloat16, torch.float16):
        attend = _varlen_attention
    else:
        attend = _attention_by_sequence
    return attend(query_1HAE, key_1GAE, value_1GAE, cu_seq_lens_q, max_length_q, scaling, sliding_window), None


def _varlen_attention(query_1HAE, key_1GAE, value_1GAE, cu_seqlens, max_len, scaling, window) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    groups = query_1HAE.shape[1] // key_1GAE.shape[1]
    query, key, value = (
        states[0].transpose(0, 1).repeat_interleave(repeats, dim=1) if repeats > 1 else states[0].transpose(0, 1)
        for states, repeats in ((query_1HAE, 1), (key_1GAE, groups), (value_1GAE, groups))
    )
    # torch counts keys to the left of the query, transformers counts the query too.
    left = -1 if window is None else window - 1
    out_AHE = varlen_attn(
        query, key, value, cu_seqlens, cu_seqlens, max_len, max_len, scale=scaling, window_size=(left, 0)
    )
    return out_AHE[None]


def _attention_by_sequence(query_1HAE, key_1GAE, value_1GAE, cu_seqlens, max_len, scaling, window) -> Tensor:
    lengths = cu_seqlens.diff().tolist()
    grouped = query_1HAE.shape[1] != key_1GAE.shape[1]
    outputs = []
    split = (states.split(lengths, dim=2) for states in (query_1HAE, key_1GAE, value_1GAE))
    for length, query, key, value in zip(lengths, *split, strict=True):
        mask = None if window is None or length <= window else _window_mask(length, window, query.device)
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
        )
        outputs.append(attended)
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """True where a query may look: at itself and the `window - 1` keys before it."""
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions[None, :]
    return (distance >= 0) & (distance < window)


AttentionInterface.register(ATTENTION, rows_attention)
