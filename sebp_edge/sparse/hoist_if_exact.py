"""Hoists a decoder if it computes the same on active rows as on padded batches; otherwise returns the reason."""

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from sebp_edge.errors import SparsityError
from sebp_edge.machine.devices import ran_out_of_memory
from sebp_edge.models.lora import without_adapter
from sebp_edge.patches.agreement import FAILURES, ROW_LOSSES, disagreement
from sebp_edge.rows.active_tokens import ActiveTokens
from sebp_edge.rows.row_plan import IGNORE, RowPlan
from sebp_edge.sparse.copy_trial import find_copy_mismatch
from sebp_edge.sparse.hoist import Hoisted
from sebp_edge.sparse.sparsify import Sparsified

# Lengths in tokens of the sequences whose losses are compared.
LENGTHS = (48, 31)


@torch.no_grad()
def hoist_if_exact(
    model: nn.Module, sequences: Sequence[Sequence[int]], pad_token_id: int, **options
) -> tuple[Hoisted | None, str | None]:
    """Returns the hoisted model and None if its results equal the padded model's, else None and the reason in words.

    Compares gradients of a small copy of the model, and the model's own losses on two short sequences.

    Args:
        sequences: token ids; only the beginnings of the first two are used.
        pad_token_id: the token for padding.
        options: keywords of `Hoisted`.
    """
    decoder = without_adapter(model)
    reason = find_copy_mismatch(decoder)
    if reason is not None:
        return None, reason
    starts = [ids[:length] for ids, length in zip(sequences, LENGTHS, strict=False)]
    input_ids, plan = pad_right(starts, pad_token_id)
    device = decoder.get_input_embeddings().weight.device
    input_ids, plan = input_ids.to(device), plan.to(device)
    with Sparsified(model) as padded:
        expected = padded.row_losses(input_ids, plan)
    with ExitStack() as undo:
        try:
            hoisted = undo.enter_context(Hoisted(model, **options))
            found = hoisted.row_losses(ActiveTokens.gather(input_ids, plan))
        except SparsityError as error:
            return None, str(error)
        except FAILURES as error:
            if ran_out_of_memory(error):
                raise
            return None, f"the model failed on active rows ({type(error).__name__})."
        difference = disagreement(model, expected, found, ROW_LOSSES)
        if difference is not None:
            return None, f"its losses on active rows differ from the padded ones by {difference:.1%}."
        undo.pop_all()
    return hoisted, None


def pad_right(sequences: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, RowPlan]:
    """Pads token ids on the right, to one more than the longest; returns them, int64 [B, T], and their plan.

    Every token is a label.
    """
    size = len(sequences), max(map(len, sequences)) + 1
    input_ids_BT, labels_BT = torch.full(size, pad_token_id), torch.full(size, IGNORE)
    for row, ids in enumerate(sequences):
        input_ids_BT[row, : len(ids)] = labels_BT[row, : len(ids)] = torch.tensor(ids)
    return input_ids_BT, RowPlan.from_labels(labels_BT)
