"""RowPlan: the rows of a padded batch that carry gradient. Made once per batch on the host; all other parts read it.

In a causal decoder with cross-entropy on shifted labels, a row (one position of one sequence) has a non-zero dL/dY

    in the head and the final norm   if its shifted label is not -100                        (loss rows)
    in every layer                   only up to the last loss row of its sequence            (active rows)

since attention passes no gradient to later positions. So rows after the last loss row, such as padding on the right,
are exactly zero everywhere. In an encoder with an attention mask, masked keys get no gradient: the active rows are the
real tokens, wherever the padding is, and the loss rows are those that the head reads.

Shapes: B sequences, T positions, N = B*T rows, A active rows, C loss rows.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sebp_edge.basics.labels import IGNORE
from sebp_edge.engine.sparse.rows.soft_targets import SoftTargets
from sebp_edge.errors import SparsityError


@dataclass(frozen=True)
class RowPlan:
    """The active rows and the loss rows of one batch, as flat ids `b * T + t`.

    Attributes:
        num_rows: N.
        active_rows: int64 [A], increasing; in decoders B contiguous spans, one per sequence.
        loss_rows: int64 [C], increasing; a subset of active_rows.
        targets: [C], the labels of the loss rows (shifted in decoders): int64, or fp32 in a regression.
        cu_seqlens: int32 [B + 1], where each sequence begins in active_rows.
        max_len: the most active rows of any sequence.
        active_span, loss_span: the same rows as a slice if they are contiguous (a batch of one sequence), else None.
        soft_targets: further targets of the loss rows; None if no row has any.
    """

    num_rows: int
    active_rows: Tensor
    loss_rows: Tensor
    targets: Tensor
    cu_seqlens: Tensor
    max_len: int
    active_span: slice | None
    loss_span: slice | None
    soft_targets: SoftTargets | None = None

    @classmethod
    def from_labels(cls, labels_BT: Tensor, attention_mask_BT: Tensor | None = None) -> "RowPlan":
        """Makes the plan of a right-padded or unpadded batch from its labels.

        Labels on another device are copied to the host, which waits for the device.

        Args:
            labels_BT: int64 [B, T], not shifted; -100 for no loss.
            attention_mask_BT: [B, T], to check the padding; None for no check.

        Raises:
            SparsityError: the attention mask shows padding before or between real tokens.
        """
        labels_BT = labels_BT.cpu()
        if attention_mask_BT is not None and not is_right_padded(attention_mask_BT.cpu()):
            raise SparsityError(
                "The batch has padding before or between real tokens, which would get a gradient; pad on the right "
                "(tokenizer.padding_side = 'right')."
            )
        num_positions = labels_BT.shape[1]
        # Position t predicts label t + 1, so the last position predicts nothing.
        shifted_BT = torch.full_like(labels_BT, IGNORE)
        shifted_BT[:, :-1] = labels_BT[:, 1:]
        has_loss_BT = shifted_BT != IGNORE
        positions_T = torch.arange(1, num_positions + 1)
        lengths_B = (has_loss_BT * positions_T).amax(dim=1)
        return cls.from_masks(positions_T <= lengths_B[:, None], has_loss_BT, shifted_BT)

    @classmethod
    def from_masks(cls, active_BT: Tensor, has_loss_BT: Tensor, targets_BT: Tensor) -> "RowPlan":
        """Makes the plan of a batch from its active rows, loss rows and targets.

        Args:
            active_BT: bool [B, T].
            has_loss_BT: bool [B, T], the loss rows.
            targets_BT: [B, T], used on loss rows only.

        Raises:
            SparsityError: a loss row is not active.
        """
        if bool((has_loss_BT & ~active_BT).any()):
            raise SparsityError(
                "A label is on padding, where the attention mask is 0; set the labels of padding to -100."
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
        """Returns the same plan with its tensors on `device`."""
        names = ["active_rows", "loss_rows", "targets", "cu_seqlens"]
        if self.soft_targets is not None:
            names.append("soft_targets")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


def span_of(rows: Tensor) -> slice | None:
    """Returns increasing ids as a slice, or None if there are none or they are not contiguous."""
    if len(rows) == 0 or int(rows[-1] - rows[0]) + 1 != len(rows):
        return None
    return slice(int(rows[0]), int(rows[-1]) + 1)


def is_right_padded(attention_mask_BT: Tensor) -> bool:
    """Whether padding follows the real tokens in every sequence."""
    mask_BT = attention_mask_BT.bool()
    return not bool((mask_BT[:, 1:] & ~mask_BT[:, :-1]).any())
