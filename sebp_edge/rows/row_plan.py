"""RowPlan: which rows of a padded batch carry gradient. Made once per batch, on the host; everything reads it.

In a causal decoder with cross-entropy on shifted labels, a row (one position of one sequence) has a non-zero dL/dY

    in the head and the final norm   if its shifted label is not -100                        (loss rows)
    in every layer                   only up to the last loss row of its sequence            (active rows)

because attention sends gradient to earlier positions and to nothing else. Padding to the right of the last loss row is
therefore exactly zero everywhere. In an encoder that is given an attention mask, masked keys get no gradient: there the
active rows are the real tokens, wherever the padding is, and the loss rows those that its head reads.

Shapes: B sequences, T positions, N = B*T rows, A active rows, C loss rows.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sebp_edge.errors import SparsityError

IGNORE = -100


@dataclass(frozen=True)
class RowPlan:
    """The active rows and the loss rows of one batch, as flat ids `b * T + t`.

    Attributes:
        num_rows: N.
        active_rows: int64 [A], increasing; a decoder's are B contiguous spans, one a sequence.
        loss_rows: int64 [C], increasing; a subset of active_rows.
        targets: [C], the labels of the loss rows (a decoder's are shifted): int64, or fp32 in a regression.
        cu_seqlens: int32 [B + 1], where each sequence begins in active_rows.
        max_len: active rows of the longest sequence.
        active_span, loss_span: the same rows as a slice, where they are contiguous (a batch of one sequence), or None.
    """

    num_rows: int
    active_rows: Tensor
    loss_rows: Tensor
    targets: Tensor
    cu_seqlens: Tensor
    max_len: int
    active_span: slice | None
    loss_span: slice | None

    @classmethod
    def from_labels(cls, labels_BT: Tensor, attention_mask_BT: Tensor | None = None) -> "RowPlan":
        """Reads the plan off labels (-100: no loss) of a right-padded or unpadded batch.

        Labels on another device are brought to the host: collators make the plan there in the first place.

        Raises:
            SparsityError: the batch is padded on the left or in the middle.
        """
        labels_BT = labels_BT.cpu()
        if attention_mask_BT is not None:
            _refuse_unless_right_padded(attention_mask_BT.cpu())
        num_positions = labels_BT.shape[1]
        # Position t predicts label t + 1, so the last position predicts nothing.
        shifted_BT = torch.full_like(labels_BT, IGNORE)
        shifted_BT[:, :-1] = labels_BT[:, 1:]
        has_loss_BT = shifted_BT != IGNORE
        positions_T = torch.arange(1, num_positions + 1)
        lengths_B = (has_loss_BT * positions_T).amax(dim=1)
        return cls.of(positions_T <= lengths_B[:, None], has_loss_BT, shifted_BT)

    @classmethod
    def of(cls, active_BT: Tensor, has_loss_BT: Tensor, targets_BT: Tensor) -> "RowPlan":
        """The plan of a batch whose active rows, rows with a loss (bool [B, T]) and their targets are known.

        Raises:
            SparsityError: a row with a loss is not active.
        """
        if bool((has_loss_BT & ~active_BT).any()):
            raise SparsityError(
                "A label stands where the attention mask is 0, on padding; give padding the label -100 there."
            )
        active_rows = active_BT.flatten().nonzero().squeeze(1)
        loss_rows = has_loss_BT.flatten().nonzero().squeeze(1)
        lengths_B = active_BT.sum(dim=1)
        cu_seqlens = torch.zeros(len(lengths_B) + 1, dtype=torch.int32)
        cu_seqlens[1:] = lengths_B.cumsum(0)
        return cls(
            num_rows=active_BT.numel(),
            active_rows=active_rows,
            loss_rows=loss_rows,
            targets=targets_BT.flatten()[loss_rows],
            cu_seqlens=cu_seqlens,
            max_len=int(lengths_B.max()),
            active_span=span_of(active_rows),
            loss_span=span_of(loss_rows),
        )

    def to(self, device: torch.device | str) -> "RowPlan":
        """The same plan with its tensors on `device`."""
        names = ("active_rows", "loss_rows", "targets", "cu_seqlens")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


def span_of(rows: Tensor) -> slice | None:
    """The slice that these increasing ids are, if they are contiguous."""
    if len(rows) == 0 or int(rows[-1] - rows[0]) + 1 != len(rows):
        return None
    return slice(int(rows[0]), int(rows[-1]) + 1)


def is_right_padded(attention_mask_BT: Tensor) -> bool:
    """Whether every sequence is real tokens first and padding after."""
    mask_BT = attention_mask_BT.bool()
    return not bool((mask_BT[:, 1:] & ~mask_BT[:, :-1]).any())


def _refuse_unless_right_padded(attention_mask_BT: Tensor) -> None:
    if not is_right_padded(attention_mask_BT):
        raise SparsityError(
            "The batch has padding before or between real tokens, where the last padding row carries gradient; "
            "pad on the right (tokenizer.padding_side = 'right')."
        )
