"""Which rows of a batch each layer computes in the backward pass: predicted by the batch, or detected in dL/dY.

A row set is predicted only if all other rows of dL/dY should be zero. `sparse.verification` verifies this in a backward
pass before it is relied on.

    causal decoder, labels                          rows up to the last loss row of each sequence;
                                                    after the last attention: loss rows
    the same, padding other than on the right       rows detected in dL/dY; after the last attention: loss rows
    encoder, attention mask and labels              real tokens, and rows that the head reads;
                                                    after the last attention: rows that the head reads
    everything else                                 rows detected in dL/dY

Layers after the last attention work row by row, and only the head reads their outputs; see `layers_after_attention`.
Shapes: B sequences, T positions, N = B*T rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sebp_edge.engine.models.architecture import is_causal_by_name, reads_first_token, reads_labelled_tokens
from sebp_edge.engine.sparse.rows.row_plan import IGNORE, RowPlan, is_right_padded, span_of
from sebp_edge.ops import ActiveRows, Rows, detect

# With these options, gradient may come from more than the logits of labelled rows.
MORE_OUTPUTS = ("output_hidden_states", "output_attentions")
# With these options, the loss is not the one of the shifted labels.
OTHER_LOSS = ("output_router_logits", "shift_labels", "ignore_index")


@dataclass(frozen=True)
class BatchRows:
    """The rows of one batch."""

    num_rows: int | None  # N; None if no row set is known
    up_to_attention: Rows | None  # the rows of norms, and of linear layers up to the last attention; None for all rows
    after_attention: Rows | None  # the rows of linear layers after the last attention; None for all rows
    # B if the head reads one row of each sequence, else None; layers of B rows compute all of them.
    num_pooled: int | None = None
    skipped_kinds: tuple[bool, bool] = (False, False)  # whether it skips padding, and real tokens that no loss reads

    def linear_rows(self, *, after_attention: bool) -> Rows | None:
        """Returns the rows of linear layers."""
        return self.after_attention if after_attention else self.up_to_attention


DETECTED = BatchRows(None, detect, detect)
ALL = BatchRows(None, None, None)


def decoder_plan(model: nn.Module, inputs: dict) -> RowPlan | None:
    """Makes the plan of a batch from its labels, for a causal decoder.

    Returns:
        The plan, on the device of the labels; its loss rows and targets hold for any padding. None if the model is not
        called as a causal decoder, or if its loss is not the one of the shifted labels.
    """
    labels_BT = inputs.get("labels")
    if not isinstance(labels_BT, Tensor) or labels_BT.dim() != 2 or not is_causal_by_name(model):
        return None
    if any(_is_set(inputs.get(name)) for name in OTHER_LOSS):
        return None
    return RowPlan.from_labels(labels_BT).to(labels_BT.device)


def decoder_rows(plan: RowPlan, attention_mask: Tensor | None) -> BatchRows:
    """Returns the rows of a causal decoder's layers, for a loss that reads only the logits of the loss rows."""
    # A fully masked row (left padding) may attend to later positions; that depends on the attention's implementation.
    causal = attention_mask is None or (attention_mask.dim() == 2 and is_right_padded(attention_mask))
    active_rows = plan.active_span or ActiveRows.from_ids(plan.active_rows, plan.num_rows)
    loss_rows = plan.loss_span or ActiveRows.from_ids(plan.loss_rows, plan.num_rows)
    if causal and len(plan.loss_rows) == len(plan.active_rows):
        # The same object, so that all layers that read one input share the copy of its rows.
        loss_rows = active_rows
    # The last token of each sequence predicts nothing; the other rows after its last loss row count as padding.
    num_padding = plan.num_rows - len(plan.active_rows) - (len(plan.cu_seqlens) - 1)
    skipped_kinds = causal and num_padding > 0, len(plan.loss_rows) < len(plan.active_rows)
    return BatchRows(plan.num_rows, active_rows if causal else detect, loss_rows, skipped_kinds=skipped_kinds)


def encoder_rows(model: nn.Module, inputs: dict) -> BatchRows:
    """Returns the rows of an encoder's layers; detected in dL/dY if mask, labels and head do not determine them."""
    mask_BT, labels = inputs.get("attention_mask"), inputs.get("labels")
    if not isinstance(labels, Tensor) or not isinstance(mask_BT, Tensor) or mask_BT.dim() != 2:
        return DETECTED
    real_BT = mask_BT.cpu().bool()
    # A sequence without real tokens attends to all its rows, so that all of them get gradient.
    if not bool(real_BT.any(dim=1).all()):
        return DETECTED
    if reads_first_token(model):
        read_BT, num_pooled = torch.zeros_like(real_BT), len(real_BT)
        read_BT[:, 0] = True
    elif reads_labelled_tokens(model) and labels.shape == mask_BT.shape:
        read_BT, num_pooled = labels.cpu() != IGNORE, None
    else:
        return DETECTED
    up_to_attention, read = (_rows_where(rows_BT, mask_BT.device) for rows_BT in (real_BT | read_BT, read_BT))
    skipped_kinds = not bool(real_BT.all()), bool((real_BT & ~read_BT).any())
    return BatchRows(real_BT.numel(), up_to_attention, read, num_pooled, skipped_kinds)


def asks_for_more_outputs(model: nn.Module, inputs: dict) -> bool:
    """Whether the call or the config asks for more outputs than the logits; then gradient may come from any row."""
    config = getattr(model, "config", None)
    return any(_is_set(inputs.get(name)) or _is_set(getattr(config, name, None)) for name in MORE_OUTPUTS)


def _is_set(value) -> bool:
    return value is not None and value is not False


def _rows_where(rows_BT: Tensor, device: torch.device) -> ActiveRows | slice:
    rows = rows_BT.flatten().nonzero().squeeze(1)
    return span_of(rows) or ActiveRows.from_ids(rows.to(device), rows_BT.numel())
