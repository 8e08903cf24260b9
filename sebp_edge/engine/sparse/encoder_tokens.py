"""Turns a tokenizer's output into an encoder's active tokens: real tokens, their positions, and what the head reads.

Runs on the host, where collators work. Refuses inputs that the model does not take, or that need padding.
Shapes: B sequences, T positions, A active rows, C loss rows.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sebp_edge.engine.models.architecture import reads_first_token
from sebp_edge.engine.sparse.rows.active_tokens import ActiveTokens
from sebp_edge.engine.sparse.rows.row_plan import IGNORE, RowPlan
from sebp_edge.errors import SparsityError

INPUTS = ("input_ids", "attention_mask", "token_type_ids", "labels")
REGRESSION = "regression"


class EncoderTokens:
    """Gathers the active tokens of one encoder's batches; its head reads first tokens, or else labelled ones."""

    def __init__(self, encoder: nn.Module):
        self.reads_first_token = reads_first_token(encoder)
        self._config, self._embeddings = encoder.config, encoder.base_model.embeddings
        head = encoder.get_output_embeddings()
        self.num_labels = self._config.num_labels if head is None else head.out_features
        several = self.is_regression and self.num_labels > 1
        if self.reads_first_token and (several or self._config.problem_type == "multi_label_classification"):
            raise SparsityError(
                "A hoisted encoder has one label per sequence, but this model has several; use sparsify instead."
            )

    def __call__(self, batch: Mapping[str, Tensor]) -> ActiveTokens:
        """See `HoistedEncoder.tokens`."""
        batch = {name: values for name, values in batch.items() if values is not None}
        self._refuse_other_inputs(batch)
        batch = {name: values.cpu() for name, values in batch.items()}
        input_ids_BT, labels = batch["input_ids"], batch["labels"]
        active_BT = batch.get("attention_mask", torch.ones_like(input_ids_BT)).bool()
        if self.reads_first_token:
            targets_BT, has_loss_BT = self._first_token_targets(labels.flatten(), active_BT)
        else:
            targets_BT, has_loss_BT = labels, labels != IGNORE
        plan = RowPlan.from_masks(active_BT, has_loss_BT, targets_BT)
        self._refuse_labels(plan.targets)
        types_BT = batch.get("token_type_ids") if hasattr(self._embeddings, "token_type_embeddings") else None
        # RoBERTa counts positions without padding, the others count columns.
        count = getattr(self._embeddings, "create_position_ids_from_input_ids", None)
        positions_BT = None if count is None else count(input_ids_BT, self._embeddings.padding_idx)
        tokens = ActiveTokens.gather(input_ids_BT, plan, positions_BT, types_BT)
        self._refuse_positions(tokens.position_ids)
        return tokens

    @property
    def is_regression(self) -> bool:
        """Whether labels are numbers and the loss is the squared error."""
        kind = self._config.problem_type
        return self.reads_first_token and (kind == REGRESSION or (kind is None and self.num_labels == 1))

    def _first_token_targets(self, labels_B: Tensor, active_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Targets, and whether each position has one; both [B, T]."""
        if not bool(active_BT[:, 0].all()):
            raise SparsityError(
                "The first token of a sequence, which the head reads, is padding; pad on the right "
                "(tokenizer.padding_side = 'right')."
            )
        is_regression = self.is_regression
        targets_BT = torch.zeros(active_BT.shape, dtype=torch.float32 if is_regression else labels_B.dtype)
        has_loss_BT = torch.zeros_like(active_BT)
        targets_BT[:, 0] = labels_B
        has_loss_BT[:, 0] = True if is_regression else labels_B != IGNORE
        return targets_BT, has_loss_BT

    def _refuse_other_inputs(self, batch: dict[str, Tensor]) -> None:
        if not {"input_ids", "labels"} <= batch.keys() <= set(INPUTS):
            raise SparsityError(
                f"The batch has {', '.join(batch) or 'nothing'}; expected input_ids and labels, and optionally "
                "attention_mask and token_type_ids."
            )
        for name, values in batch.items():
            if not isinstance(values, Tensor):
                raise SparsityError(f"{name} is a {type(values).__name__}; expected a tensor (return_tensors='pt').")
        size = tuple(batch["input_ids"].shape)
        if len(size) != 2:
            raise SparsityError(f"input_ids has shape {size}; expected [sequences, positions].")
        sequence_shapes = [size[:1], (size[0], 1)]
        for name, values in batch.items():
            allowed = sequence_shapes if name == "labels" and self.reads_first_token else [size]
            if tuple(values.shape) not in allowed:
                wanted = " or ".join(map(str, allowed))
                raise SparsityError(f"{name} has shape {tuple(values.shape)}; expected {wanted} to match input_ids.")

    def _refuse_labels(self, targets_C: Tensor) -> None:
        if self.is_regression:
            return
        if targets_C.is_floating_point() or bool(((targets_C < 0) | (targets_C >= self.num_labels)).any()):
            raise SparsityError(
                f"A label is out of range; expected whole numbers from 0 to {self.num_labels - 1} (num_labels), or "
                f"{IGNORE} for no label."
            )

    def _refuse_positions(self, position_ids_A: Tensor) -> None:
        num_positions = self._embeddings.position_embeddings.num_embeddings
        if bool((position_ids_A >= num_positions).any()):
            raise SparsityError(
                f"A token is at position {int(position_ids_A.max())}, but the model has {num_positions} positions; "
                "truncate the texts."
            )
