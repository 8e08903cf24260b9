"""Collates examples into tensors: their active tokens packed, or all tokens right-padded to the context length.

Shapes: B sequences, T = context length, A active tokens, C loss rows, S = B, K soft targets.
"""

from dataclasses import dataclass, replace
from itertools import accumulate, chain

import torch
from torch import Tensor

from sebp_edge.engine.sparse.rows.active_tokens import ActiveTokens
from sebp_edge.engine.sparse.rows.row_plan import IGNORE, RowPlan
from sebp_edge.engine.sparse.rows.soft_targets import SoftTargets
from sebp_edge.values.example import Example


@dataclass(frozen=True)
class Batch:
    """A micro-batch, int64 [B, T], padded on the right; labels are -100 on padding."""

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    plan: RowPlan


@dataclass(frozen=True)
class Collator:
    """Pads examples to the context length T, or to the longest in a batch if that is None.

    Any id of padding works, since the mask and the labels mark the padding.
    """

    context_length: int | None
    pad_token_id: int

    def __call__(self, examples: list[Example]) -> Batch:
        """Right-pads `examples` and plans the active rows."""
        size = (len(examples), self.context_length or max(example.num_tokens for example in examples))
        input_ids = torch.full(size, self.pad_token_id)
        attention_mask = torch.zeros(size, dtype=torch.int64)
        labels = torch.full(size, IGNORE)
        for row, example in enumerate(examples):
            length = len(example.input_ids)
            input_ids[row, :length] = torch.tensor(example.input_ids)
            attention_mask[row, :length] = 1
            labels[row, :length] = torch.tensor(example.labels)
        plan = RowPlan.from_labels(labels)
        return Batch(input_ids, attention_mask, labels, replace(plan, **_taught(examples, plan.targets)))


def pack(examples: list[Example]) -> ActiveTokens:
    """Packs the active tokens of a micro-batch on the host; equal to `ActiveTokens.gather` of the padded batch."""
    lengths = [example.num_active_tokens for example in examples]
    begins = list(accumulate(lengths, initial=0))
    labels = [example.labels[1 : length + 1] for example, length in zip(examples, lengths, strict=True)]
    # Position t predicts label t + 1.
    targets_A = torch.tensor(list(chain.from_iterable(labels)), dtype=torch.int64)
    loss_indices = (targets_A != IGNORE).nonzero().squeeze(1)
    begins_S = torch.tensor(begins, dtype=torch.int32)
    sequences_A = torch.repeat_interleave(torch.arange(len(examples)), torch.tensor(lengths, dtype=torch.int64))
    tokens = chain.from_iterable(example.input_ids[:length] for example, length in zip(examples, lengths, strict=True))
    packed = ActiveTokens(
        input_ids=torch.tensor(list(tokens), dtype=torch.int64),
        position_ids=torch.arange(begins[-1]) - begins_S[sequences_A],
        cu_seqlens=begins_S,
        max_len=max(lengths),
        loss_indices=loss_indices,
        targets=targets_A[loss_indices],
        sequences=sequences_A[loss_indices],
        weights=torch.ones(len(loss_indices)),
    )
    return replace(packed, **_taught(examples, packed.targets))


def _taught(examples: list[Example], targets_C: Tensor) -> dict[str, Tensor | SoftTargets | None]:
    """Returns the targets that teachers change: those of their examples, and the soft targets of all loss rows.

    A teacher's most probable token becomes the target. Rows without a teacher, or with one of fewer tokens, have share
    0 at what they lack.
    """
    number = max((example.teacher.k - 1 for example in examples if example.teacher is not None), default=-1)
    if number < 0:
        return {}
    targets_C, begin = targets_C.clone(), 0
    soft = SoftTargets.unused(len(targets_C), number)
    for example in examples:
        end, teacher = begin + example.num_loss_tokens, example.teacher
        if teacher is not None and end > begin:
            ids = torch.tensor(teacher.ids, dtype=torch.int64).view(-1, teacher.k)
            shares = torch.tensor(teacher.shares, dtype=torch.float32).view(-1, teacher.k)
            targets_C[begin:end] = ids[:, 0]
            soft.ids[begin:end, : teacher.k - 1], soft.shares[begin:end, : teacher.k - 1] = ids[:, 1:], shares[:, 1:]
        begin = end
    return {"targets": targets_C, "soft_targets": soft if number else None}
