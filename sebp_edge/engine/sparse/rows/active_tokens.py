"""ActiveTokens: the packed active rows of a batch, with everything a hoisted model needs to compute them.

Shapes: B sequences, T positions, A active tokens, C loss rows, S sequences (B, or the slots of a bucket).
"""

from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from sebp_edge.engine.sparse.rows.buckets import Bucket
from sebp_edge.engine.sparse.rows.row_plan import RowPlan
from sebp_edge.engine.sparse.rows.soft_targets import SoftTargets
from sebp_edge.errors import SparsityError
from sebp_edge.ops import Prefixes


@dataclass(frozen=True)
class ActiveTokens:
    """The active rows of a batch, packed sequence by sequence, with or without filler.

    Attributes:
        input_ids: int64 [A].
        position_ids: int64 [A], the position of each token in its sequence, as the model counts positions.
        cu_seqlens: int32 [S + 1], where each sequence begins; sequences may be empty.
        max_len: the length of the longest sequence, or an upper bound of it.
        loss_indices: int64 [C], each another one: the indices of the loss rows among the active tokens, in the order of
            the batch's sequences and of the tokens in them, then of filler.
        targets: [C], the labels of the loss rows (shifted in decoders): int64, or fp32 in a regression.
        sequences: int64 [C], the sequence of the batch that each loss row belongs to; 0 for filler.
        weights: fp32 [C], the weight of each loss: 1, unless `weighted` scales it; 0 for filler.
        token_type_ids: int64 [A], which text of a pair each token belongs to; None if the model takes none.
        soft_targets: see `RowPlan`; filler has share 0.
        prefixes: the sequences that continue others; None if none does (see `share_beginnings`).
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_len: int
    loss_indices: Tensor
    targets: Tensor
    sequences: Tensor
    weights: Tensor
    token_type_ids: Tensor | None = None
    soft_targets: SoftTargets | None = None
    prefixes: Prefixes | None = None

    @classmethod
    def gather(
        cls,
        input_ids_BT: Tensor,
        plan: RowPlan,
        position_ids_BT: Tensor | None = None,
        token_type_ids_BT: Tensor | None = None,
    ) -> "ActiveTokens":
        """Gathers the active rows of a padded batch. All tensors are on one device, in training on the host.

        Ids are int64 [B, T]; those of positions are None if the model counts from 0, those of types if it takes none.
        """
        num_positions = input_ids_BT.shape[1]
        rows = plan.active_rows
        return cls(
            input_ids=input_ids_BT.flatten()[rows],
            position_ids=rows % num_positions if position_ids_BT is None else position_ids_BT.flatten()[rows],
            cu_seqlens=plan.cu_seqlens,
            max_len=plan.max_len,
            loss_indices=torch.searchsorted(rows, plan.loss_rows),
            targets=plan.targets,
            sequences=plan.loss_rows // num_positions,
            weights=torch.ones(len(plan.loss_rows), device=plan.loss_rows.device),
            token_type_ids=None if token_type_ids_BT is None else token_type_ids_BT.flatten()[rows],
            soft_targets=plan.soft_targets,
        )

    def first_token(self, num_soft_targets: int = 0, *, has_prefixes: bool = False) -> "ActiveTokens":
        """Returns a batch of only the first token, with a loss, for uses that need any valid batch; on the host."""
        zero, cu_seqlens = torch.zeros(1, dtype=torch.int64), torch.tensor([0, 1], dtype=torch.int32)
        return replace(
            self,
            input_ids=self.input_ids[:1],
            position_ids=self.position_ids[:1],
            cu_seqlens=cu_seqlens,
            max_len=1,
            loss_indices=zero,
            targets=self.targets[:1],
            sequences=zero,
            weights=torch.ones(1),
            token_type_ids=None if self.token_type_ids is None else self.token_type_ids[:1],
            soft_targets=SoftTargets.unused(1, num_soft_targets) if num_soft_targets else None,
            prefixes=Prefixes.of(cu_seqlens, zero - 1) if has_prefixes else None,
        )

    @property
    def num_soft_targets(self) -> int:
        """The number of soft targets of each loss row."""
        return 0 if self.soft_targets is None else self.soft_targets.ids.shape[1]

    @property
    def sizes(self) -> Bucket:
        """The sizes of these tokens, as the bucket that holds them without filler."""
        return Bucket(len(self.input_ids), len(self.cu_seqlens) - 1, self.max_len, len(self.loss_indices))

    @property
    def inputs(self) -> dict[str, Tensor | int | None]:
        """The keyword arguments of a transformers model, with all sequences in one row [1, A]."""
        types = {} if self.token_type_ids is None else {"token_type_ids": self.token_type_ids[None]}
        shared = {} if self.prefixes is None else {"prefixes": self.prefixes}
        return (
            types
            | shared
            | {
                "input_ids": self.input_ids[None],
                "position_ids": self.position_ids[None],
                # With a mask of ones, transformers would treat all sequences as one long document.
                "attention_mask": None,
                "cu_seq_lens_q": self.cu_seqlens,
                "cu_seq_lens_k": self.cu_seqlens,
                "max_length_q": self.max_len,
                "max_length_k": self.max_len,
            }
        )

    def filled(self, bucket: Bucket) -> "ActiveTokens":
        """Appends filler up to the sizes of `bucket`, in `bucket.slots` sequences; on the host.

        Filler tokens have id 0 and position 0, in separate sequences: every token belongs to a sequence, and none has a
        position that the batch lacks (position tables end, and some models scale by the largest position). Filler
        losses have weight 0 and come last. They are on rows without a loss, on filler first, and each on another row,
        since a row gathered twice would lose its gradient. Weighted losses and gradients stay the same.

        Raises:
            SparsityError: the bucket is too small.
        """
        if not (bucket.holds(self.sizes) and bucket.loss_rows <= bucket.tokens):
            raise SparsityError(
                f"A batch with {_describe(self.sizes)} does not fit into a bucket of {_describe(bucket)}."
            )
        num_tokens, num_filler = len(self.input_ids), bucket.tokens - len(self.input_ids)
        begins = torch.arange(num_tokens, bucket.tokens, bucket.longest, dtype=torch.int32)
        cu_seqlens = torch.cat([self.cu_seqlens[:-1], begins])
        cu_seqlens = F.pad(cu_seqlens, (0, bucket.slots + 1 - len(cu_seqlens)), value=bucket.tokens)
        without_loss = torch.ones(bucket.tokens, dtype=torch.bool)
        without_loss[self.loss_indices] = False
        # The last rows without a loss: filler comes first.
        filler_indices = without_loss.nonzero().squeeze(1)[bucket.tokens - bucket.loss_rows :]
        num_filler_losses = len(filler_indices)
        return ActiveTokens(
            input_ids=F.pad(self.input_ids, (0, num_filler)),
            position_ids=F.pad(self.position_ids, (0, num_filler)),
            cu_seqlens=cu_seqlens,
            max_len=bucket.longest,
            loss_indices=torch.cat([self.loss_indices, filler_indices]),
            targets=F.pad(self.targets, (0, num_filler_losses)),
            sequences=F.pad(self.sequences, (0, num_filler_losses)),
            weights=F.pad(self.weights, (0, num_filler_losses)),
            token_type_ids=None if self.token_type_ids is None else F.pad(self.token_type_ids, (0, num_filler)),
            soft_targets=self.soft_targets and self.soft_targets.filled(num_filler_losses),
            prefixes=self.prefixes and self.prefixes.filled(cu_seqlens),
        )

    def weighted(self, factor: float) -> "ActiveTokens":
        """Returns the same tokens with all weights multiplied by `factor`."""
        return replace(self, weights=self.weights * factor)

    def to(self, device: torch.device | str) -> "ActiveTokens":
        """Returns the same tokens on `device`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {
            name: value.to(device, non_blocking=True)
            for name, value in values.items()
            if isinstance(value, Tensor | SoftTargets | Prefixes)
        }
        return replace(self, **moved)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors; tokens of the same sizes have the same ones in the same order."""
        values = [getattr(self, field.name) for field in fields(self)]
        parts = [*values, *(self.soft_targets or ()), *(self.prefixes or ())]
        return [value for value in parts if isinstance(value, Tensor)]


def _describe(sizes: Bucket) -> str:
    return ", ".join(f"{size} {name.replace('_', ' ')}" for name, size in sizes._asdict().items())
