"""The trainers that peers.py compares: for each, what loads a model, lays texts out as a batch and makes a step of it.

Shapes: B texts, T positions, N tokens of all texts, C loss rows, H heads, G key/value heads, E head size.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from peer_work import CONTEXT_LENGTH, PADDING_ID, PROJECTIONS, RANK, Job, make_model, shape_config
from sebp_edge.insight.bench.ways import CapturedStep, active_on_host, trained
from sebp_edge.rows.active_tokens import ActiveTokens
from sebp_edge.rows.row_plan import IGNORE, RowPlan
from sebp_edge.sparse.hoist import Hoisted
from sebp_edge.sparse.sparsify import Sparsified
from sebp_edge.texts.batches import Batch, Collator
from sebp_edge.texts.examples import Example

VARLEN = "peers_varlen"

LEARNING_RATE = 1e-4


class Step(Protocol):
    """One batch's training step, to be run over and over."""

    def gradients(self) -> Tensor:
        """The loss; leaves the gradients of this batch in the parameters' `grad`."""

    def zero_grad(self) -> None:
        """Forgets the gradients."""

    def __call__(self) -> None:
        """Forward, backward and update."""


StepOf = Callable[[object], Step]


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        load: the model with what is trained requiring gradients, and what makes a step of a batch.
        lay_out: the texts as a batch for that step.
        ours: whether it is this project's.
        most_texts: larger batches are left out.
        full, loss_share: whether it is in the runs that train all weights, or have a loss on a part of each text.
        only_loss_share: whether it is in no other.
    """

    load: Callable[[Job], tuple[nn.Module, StepOf]]
    lay_out: Callable[[list[Example], Job], object]
    ours: bool = False
    most_texts: int = 64
    full: bool = False
    loss_share: bool = False
    only_loss_share: bool = False


# Layouts.


def padded_to_longest(texts: list[Example], job: Job) -> dict:
    return _keywords(_collated(texts, max(len(text.input_ids) for text in texts), job))


def padded_to_context(texts: list[Example], job: Job) -> dict:
    return _keywords(_collated(texts, CONTEXT_LENGTH, job))


def rows(texts: list[Example], job: Job) -> Batch:
    return _collated(texts, max(len(text.input_ids) for text in texts), job)


def all_rows(texts: list[Example], job: Job) -> tuple[Batch, Tensor]:
    """As if every token had a loss; and which of those losses are asked for: bool [C]."""
    batch = rows(texts, job)
    everywhere = RowPlan.from_labels(batch.input_ids.masked_fill(batch.attention_mask == 0, IGNORE)).to(job.device)
    return Batch(batch.input_ids, batch.attention_mask, batch.labels, everywhere), torch.isin(
        everywhere.loss_rows, batch.plan.loss_rows
    )


def packed(texts: list[Example], job: Job) -> dict:
    """All texts in one row; positions begin again with each."""
    columns = {
        "input_ids": [token for text in texts for token in text.input_ids],
        "labels": [label for text in texts for label in text.labels],
        "position_ids": [position for text in texts for position in range(len(text.input_ids))],
    }
    return {name: torch.tensor([column], device=job.device) for name, column in columns.items()}


def packed_with_ends(texts: list[Example], job: Job) -> dict:
    """Where texts begin, from the positions and once a batch, as attention functions in transformers are told it."""
    batch = packed(texts, job)
    positions_N = batch["position_ids"][0]
    starts = (positions_N == 0).nonzero().squeeze(1).tolist()
    cu_seqlens = torch.tensor([*starts, len(positions_N)], dtype=torch.int32, device=job.device)
    longest = int(cu_seqlens.diff().max())
    ends = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": longest, "max_length_k": longest}
    return batch | ends


def packed_with_lengths(texts: list[Example], job: Job) -> dict:
    """As Unsloth's packing is told where texts end."""
    counts = torch.tensor([len(text.input_ids) for text in texts], dtype=torch.int32)
    return packed(texts, job) | {"packed_seq_lengths": counts}


def _collated(texts: list[Example], context_length: int, job: Job) -> Batch:
    batch = Collator(context_length, PADDING_ID)(texts)
    tensors = (each.to(job.device) for each in (batch.input_ids, batch.attention_mask, batch.labels))
    return Batch(*tensors, batch.plan.to(job.device))


def _keywords(batch: Batch) -> dict:
    return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "labels": batch.labels}


# Arms: one function each.


def hf(job: Job) -> tuple[nn.Module, StepOf]:
    return _as_called(make_model(job))


def hf_varlen(job: Job) -> tuple[nn.Module, StepOf]:
    return _as_called(make_model(job, attention=VARLEN))


def hf_checkpointing(job: Job) -> tuple[nn.Module, StepOf]:
    model = make_model(job)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    return _as_called(model)


def liger(job: Job) -> tuple[nn.Module, StepOf]:
    _apply_liger(job)
    return hf(job)


def liger_varlen(job: Job) -> tuple[nn.Module, StepOf]:
    _apply_liger(job)
    return hf_varlen(job)


def unsloth_lora(job: Job) -> tuple[nn.Module, StepOf]:
    # Imported before all else, by peer_process.py.
    unsloth = sys.modules["unsloth"]
    model, _ = unsloth.FastLanguageModel.from_pretrained(
        str(job.model_folder), max_seq_length=4096, dtype=job.dtype, load_in_4bit=False
    )
    model = unsloth.FastLanguageModel.get_peft_model(
        model,
        r=RANK,
        lora_alpha=RANK,
        lora_dropout=0,
        bias="none",
        target_modules=PROJECTIONS,
        use_gradient_checkpointing=False,
    ).train()
    return model, _eager(model, lambda batch: model(**batch).loss)


def drop_in(job: Job) -> tuple[nn.Module, StepOf]:
    model = make_model(job)
    Sparsified(model)
    return _as_called(model)


def hoisted(job: Job) -> tuple[nn.Module, StepOf]:
    model = make_model(job)
    handle = Hoisted(model)
    return model, _eager(model, lambda batch: handle.row_losses(_active(batch)).mean())


def hoisted_all_rows(job: Job) -> tuple[nn.Module, StepOf]:
    """No row is left out of the head or the last layer: padding-free, and not completion-only."""
    model = make_model(job)
    handle = Hoisted(model)

    def loss(batch: tuple[Batch, Tensor]) -> Tensor:
        everywhere, asked_C = batch
        return handle.row_losses(_active(everywhere))[asked_C].mean()

    return model, _eager(model, loss)


def captured(job: Job) -> tuple[nn.Module, StepOf]:
    model = make_model(job)
    handle = Hoisted(model)
    return model, lambda batch: _CapturedStep(trained(model), handle, active_on_host(batch))


class _CapturedStep(CapturedStep):
    """What Personalizer's training does on a GPU; the batch is collated beforehand, as the others' is."""

    learning_rate = LEARNING_RATE

    def zero_grad(self) -> None:
        self._update.reset()

    def __call__(self) -> None:
        super().__call__(lambda part: None)


def _active(batch: Batch) -> ActiveTokens:
    return ActiveTokens.gather(batch.input_ids, batch.plan)


def _as_called(model: nn.Module) -> tuple[nn.Module, StepOf]:
    """As any training loop calls a transformers model."""
    return model, _eager(model, lambda batch: model(**batch, use_cache=False).loss)


def _eager(model: nn.Module, loss: Callable[[object], Tensor]) -> StepOf:
    return lambda batch: _EagerStep(model, lambda: loss(batch))


class _EagerStep:
    """A step as a plain training loop has it."""

    def __init__(self, model: nn.Module, loss: Callable[[], Tensor]):
        self._loss = loss
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)

    def gradients(self) -> Tensor:
        loss = self._loss()
        loss.backward()
        return loss.detach()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def __call__(self) -> None:
        self.gradients()
        self._optimizer.step()
        self.zero_grad()


def _apply_liger(job: Job) -> None:
    from liger_kernel import transformers

    apply = getattr(transformers, f"apply_liger_kernel_to_{shape_config(job.shape).model_type}")
    apply(fused_linear_cross_entropy=True, cross_entropy=False)


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
    """torch's own attention within each text of a packed row, registered as transformers has it: [1, N, H, E], None."""
    from torch.nn.attention.varlen import varlen_attn

    groups = query_1HNE.shape[1] // key_1GNE.shape[1]
    query_NHE = query_1HNE[0].transpose(0, 1)
    # torch 2.11's takes as many heads of keys as of queries.
    key_NHE, value_NHE = (
        states[0].transpose(0, 1).repeat_interleave(groups, dim=1) for states in (key_1GNE, value_1GNE)
    )
    ends = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    return varlen_attn(query_NHE, key_NHE, value_NHE, *ends, scale=scaling, window_size=(-1, 0))[None], None


AttentionInterface.register(VARLEN, varlen_attention)

ARMS = {
    "hf dynamic padding": Arm(hf, padded_to_longest, full=True),
    "hf packed": Arm(hf, packed),
    "hf packed varlen": Arm(hf_varlen, packed_with_ends, full=True, loss_share=True),
    "hf packed checkpointing": Arm(hf_checkpointing, packed),
    "liger packed": Arm(liger, packed),
    "liger packed varlen": Arm(liger_varlen, packed_with_ends, loss_share=True),
    "unsloth dynamic padding": Arm(unsloth_lora, padded_to_longest),
    "unsloth packed": Arm(unsloth_lora, packed_with_lengths),
    "hf padded to 4096": Arm(hf, padded_to_context, most_texts=4),
    "drop-in padded to 4096": Arm(drop_in, padded_to_context, ours=True, most_texts=4),
    "sebp-edge all rows": Arm(hoisted_all_rows, all_rows, ours=True, loss_share=True, only_loss_share=True),
    "sebp-edge hoisted": Arm(hoisted, rows, ours=True, full=True, loss_share=True),
    "sebp-edge step": Arm(captured, rows, ours=True, full=True, loss_share=True),
}
