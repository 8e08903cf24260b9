"""The trainers that peers.py compares: how each loads its model and makes a step.

Shapes: B texts, T positions, N tokens of all texts, C loss rows, H heads, G key/value heads, E head size.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from peer_work import PROJECTIONS, RANK, Job, make_model, shape_config
from sebp_edge.insight.bench.variants import (
    DENSE,
    DROP_IN,
    DYNAMIC,
    GRAPH,
    HOISTED,
    Variant,
    packed,
    trim_to_longest,
    unchanged,
)
from sebp_edge.rows.active_tokens import ActiveTokens
from sebp_edge.rows.row_plan import IGNORE, RowPlan
from sebp_edge.sparse.hoist import Hoisted
from sebp_edge.texts.batches import Batch

VARLEN = "peers_varlen"


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        load: makes the model; what is trained requires gradients.
        max_texts: the most texts in a batch; larger batches are left out.
        full: whether it is in the runs that train all weights.
        loss_share: whether it is in the runs with a loss on a part of each text.
        only_loss_share: whether it is in no other runs.
    """

    variant: Variant
    load: Callable[[Job], nn.Module] = make_model
    max_texts: int = 64
    full: bool = False
    loss_share: bool = False
    only_loss_share: bool = False


def with_varlen(job: Job) -> nn.Module:
    return make_model(job, attention=VARLEN)


def with_checkpointing(job: Job) -> nn.Module:
    model = make_model(job)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    return model


def with_liger(job: Job) -> nn.Module:
    _apply_liger(job)
    return make_model(job)


def with_liger_and_varlen(job: Job) -> nn.Module:
    _apply_liger(job)
    return with_varlen(job)


def with_unsloth(job: Job) -> nn.Module:
    # peer_process.py has imported it, before everything else.
    unsloth = sys.modules["unsloth"]
    model, _ = unsloth.FastLanguageModel.from_pretrained(
        str(job.model_folder), max_seq_length=4096, dtype=job.dtype, load_in_4bit=False
    )
    return unsloth.FastLanguageModel.get_peft_model(
        model,
        r=RANK,
        lora_alpha=RANK,
        lora_dropout=0,
        bias="none",
        target_modules=PROJECTIONS,
        use_gradient_checkpointing=False,
    ).train()


def _apply_liger(job: Job) -> None:
    from liger_kernel import transformers

    apply = getattr(transformers, f"apply_liger_kernel_to_{shape_config(job.shape).model_type}")
    apply(fused_linear_cross_entropy=True, cross_entropy=False)


def packed_without_ends(batch: Batch) -> dict:
    """Packs all texts into one row; positions restart in each."""
    row = packed(batch)
    return {name: row[name] for name in ("input_ids", "labels", "position_ids")}


def packed_with_lengths(batch: Batch) -> dict:
    """Packs all texts into one row, with their lengths in the form that Unsloth takes."""
    return packed_without_ends(batch) | {"packed_seq_lengths": batch.attention_mask.sum(dim=1).int().cpu()}


def padded_to_longest(batch: Batch) -> dict:
    batch = trim_to_longest(batch)
    return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "labels": batch.labels}


def all_rows(batch: Batch) -> tuple[ActiveTokens, Tensor]:
    """The active tokens as if every token had a loss, and which of those losses count: bool [C]."""
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, IGNORE)
    plan = RowPlan.from_labels(labels).to(batch.input_ids.device)
    return ActiveTokens.gather(batch.input_ids, plan), torch.isin(plan.loss_rows, batch.plan.loss_rows)


def _loss_of_all_rows(handle: Hoisted, tokens_and_mask: tuple[ActiveTokens, Tensor]) -> Tensor:
    """The loss with all rows computed in the head and the last layer: padding-free, but not completion-only."""
    tokens, has_loss_C = tokens_and_mask
    return handle.row_losses(tokens)[has_loss_C].mean()


def _model_loss(model: nn.Module, row: dict) -> Tensor:
    """Calls the model as an ordinary training loop does."""
    return model(**row, use_cache=False).loss


def _unsloths_loss(model: nn.Module, batch: dict) -> Tensor:
    return model(**batch).loss


PACKED = Variant("packed", unchanged, _model_loss, packed_without_ends)
# The attention function receives the boundaries of the texts as keywords.
PACKED_VARLEN = Variant("packed varlen", unchanged, _model_loss, packed)
UNSLOTH = Variant("unsloth", unchanged, _unsloths_loss, padded_to_longest)
UNSLOTH_PACKED = Variant("unsloth packed", unchanged, _unsloths_loss, packed_with_lengths)
ALL_ROWS = Variant("all rows", Hoisted, _loss_of_all_rows, all_rows, is_ours=True)


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
    """torch's variable-length attention over a packed row, as an attention function of transformers: [1, N, H, E]."""
    from torch.nn.attention.varlen import varlen_attn

    groups = query_1HNE.shape[1] // key_1GNE.shape[1]
    query_NHE = query_1HNE[0].transpose(0, 1)
    # In torch 2.11 it needs as many key/value heads as query heads.
    key_NHE, value_NHE = (
        states[0].transpose(0, 1).repeat_interleave(groups, dim=1) for states in (key_1GNE, value_1GNE)
    )
    boundaries = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    return varlen_attn(query_NHE, key_NHE, value_NHE, *boundaries, scale=scaling, window_size=(-1, 0))[None], None


AttentionInterface.register(VARLEN, varlen_attention)

ARMS = {
    "hf dynamic padding": Arm(DYNAMIC, full=True),
    "hf packed": Arm(PACKED),
    "hf packed varlen": Arm(PACKED_VARLEN, with_varlen, full=True, loss_share=True),
    "hf packed checkpointing": Arm(PACKED, with_checkpointing),
    "liger packed": Arm(PACKED, with_liger),
    "liger packed varlen": Arm(PACKED_VARLEN, with_liger_and_varlen, loss_share=True),
    "unsloth dynamic padding": Arm(UNSLOTH, with_unsloth),
    "unsloth packed": Arm(UNSLOTH_PACKED, with_unsloth),
    "hf padded to 4096": Arm(DENSE, max_texts=4),
    "drop-in padded to 4096": Arm(DROP_IN, max_texts=4),
    "sebp-edge all rows": Arm(ALL_ROWS, loss_share=True, only_loss_share=True),
    "sebp-edge hoisted": Arm(HOISTED, full=True, loss_share=True),
    "sebp-edge step": Arm(GRAPH, full=True, loss_share=True),
}
