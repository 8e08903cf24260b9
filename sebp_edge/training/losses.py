"""The losses of a batch: on hoisted rows where a trial shows the padded model's losses, else through the drop-in."""

import torch
from torch import Tensor, nn

from sebp_edge.errors import SparsityError
from sebp_edge.events import Notice, Sink
from sebp_edge.sparse.active_tokens import ActiveTokens
from sebp_edge.sparse.hoist import Hoisted
from sebp_edge.sparse.sparsify import Sparsified
from sebp_edge.texts.batches import Collator, micro_batches
from sebp_edge.texts.examples import Example

MAX_ROWS = 4096
# Logits of a padded micro-batch: 2^27 of them are half a GB in fp32. Hoisted rows never hold all of theirs.
MAX_LOGITS = 2**27


class RowLosses:
    """A model that gives the losses of examples; a context manager that leaves the model as it was.

    Attributes:
        collator: pads examples into batches.
        device: where the model is.
        hoisted: whether only active rows are computed, or all of the padded batch in the forward pass.
        max_rows: most rows that one micro-batch may have; a single longer example stands alone.
    """

    def __init__(self, model: nn.Module, examples: list[Example], collator: Collator, device, on_event: Sink):
        self.collator = collator
        self.device = device
        reason = _why_not_hoisted(model, examples, collator.pad_token_id, device)
        self.hoisted = reason is None
        if reason is not None:
            on_event(Notice(f"This model runs on padded batches, which is slower: {reason}"))
        padded_rows = min(MAX_ROWS, MAX_LOGITS // model.get_output_embeddings().weight.shape[0])
        self.max_rows = MAX_ROWS if self.hoisted else padded_rows
        self._handle = Hoisted(model) if self.hoisted else Sparsified(model)

    def __call__(self, examples: list[Example]) -> tuple[Tensor, Tensor]:
        """The losses of one micro-batch's loss rows, in nats: fp32 [C], and the sequence of each row: int64 [C]."""
        batch = self.collator(examples)
        if self.hoisted:
            losses = self._handle.row_losses(ActiveTokens.gather(batch.input_ids, batch.plan).to(self.device))
        else:
            losses = self._handle.row_losses(batch.input_ids.to(self.device), batch.plan.to(self.device))
        return losses, batch.plan.loss_rows // self.collator.context_length

    def micro_batches(self, examples: list[Example]) -> list[list[Example]]:
        """Cuts `examples` into micro-batches of at most `max_rows` rows, the longest examples first."""
        return micro_batches(examples, self.max_rows, self._num_rows)

    def _num_rows(self, example: Example) -> int:
        return example.num_active_tokens if self.hoisted else self.collator.context_length

    def __enter__(self) -> "RowLosses":
        return self

    def __exit__(self, *exception) -> None:
        self._handle.remove()


@torch.no_grad()
def _why_not_hoisted(model: nn.Module, examples: list[Example], pad_token_id: int, device) -> str | None:
    """None if two short sequences, hoisted, have the losses that they have padded, else the reason in words."""
    starts = [example.input_ids[:length] for example, length in zip(examples[:2], (48, 31), strict=False)]
    collator = Collator(max(map(len, starts)) + 1, pad_token_id)
    batch = collator([Example(ids, ids, number) for number, ids in enumerate(starts)])
    input_ids, plan = batch.input_ids.to(device), batch.plan.to(device)
    with Sparsified(model) as padded:
        expected = padded.row_losses(input_ids, plan)
    try:
        with Hoisted(model) as hoisted:
            found = hoisted.row_losses(ActiveTokens.gather(input_ids, plan))
    except SparsityError as error:
        return str(error)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        return f"its architecture does not take single rows ({type(error).__name__})."
    tolerance = 1e-4 if next(model.parameters()).dtype == torch.float32 else 0.05
    difference = float((found - expected).abs().mean() / expected.mean())
    return None if difference <= tolerance else f"its losses on rows alone differ by {difference:.1%}."
