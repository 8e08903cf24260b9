"""The losses of a batch: on hoisted rows where a trial shows the padded model's losses, else through the drop-in."""

from contextlib import ExitStack

import torch
from torch import Tensor, nn

from sebp_edge.errors import SparsityError
from sebp_edge.events import Notice, Sink
from sebp_edge.machine.devices import ran_out_of_memory
from sebp_edge.memory.options import FASTEST, MemoryOptions
from sebp_edge.models.lora import without_adapter
from sebp_edge.rows.active_tokens import ActiveTokens
from sebp_edge.sparse.copy_trial import why_not_on_a_copy
from sebp_edge.sparse.hoist import Hoisted
from sebp_edge.sparse.sparsify import Sparsified
from sebp_edge.texts.batches import Collator, pack
from sebp_edge.texts.examples import Example
from sebp_edge.texts.schedule import RowLimit

# Logits of a padded micro-batch: 2^27 of them are half a GB in fp32. Hoisted rows never hold all of theirs.
MAX_LOGITS = 2**27


class RowLosses:
    """A model that gives the losses of examples; a context manager that leaves the model as it was.

    Args:
        options: what is held in memory at once; of a padded batch's activations, all is.

    Attributes:
        hoisted: the handle of the model that computes active rows only; None where the padded batch is computed.
        limit: how many rows a micro-batch may have.
    """

    def __init__(
        self,
        model: nn.Module,
        examples: list[Example],
        collator: Collator,
        device: torch.device,
        on_event: Sink,
        options: MemoryOptions = FASTEST,
    ):
        self._collator, self._device = collator, device
        self.hoisted, reason = _hoist(model, examples, collator.pad_token_id, device, options)
        self._padded = Sparsified(model) if self.hoisted is None else None
        self.limit = RowLimit.on(device, options.max_rows)
        if reason is not None:
            max_rows = min(options.max_rows, MAX_LOGITS // model.get_output_embeddings().weight.shape[0])
            self.limit = RowLimit.on(device, max_rows, padded_to=collator.context_length)
            on_event(Notice(f"This model runs on padded batches, which is slower: {reason}"))

    def __call__(self, examples: list[Example]) -> tuple[Tensor, Tensor]:
        """The losses of one micro-batch's loss rows, in nats: fp32 [C], and the example of each: int64 [C]."""
        if self.hoisted is not None:
            tokens = pack(examples)
            return self.hoisted.row_losses(tokens.to(self._device)), tokens.sequences
        batch = self._collator(examples)
        losses = self._padded.row_losses(batch.input_ids.to(self._device), batch.plan.to(self._device))
        return losses, batch.plan.loss_rows // self._collator.context_length

    def __enter__(self) -> "RowLosses":
        return self

    def __exit__(self, *exception) -> None:
        (self.hoisted or self._padded).remove()


@torch.no_grad()
def _hoist(
    model: nn.Module, examples: list[Example], pad_token_id: int, device, options: MemoryOptions
) -> tuple[Hoisted | None, str | None]:
    """The model hoisted, if it computes what it computes padded; else the reason in words.

    A small copy of its class is compared by gradients, the model itself by the losses of two short sequences.
    """
    reason = why_not_on_a_copy(without_adapter(model))
    if reason is not None:
        return None, reason
    starts = [example.input_ids[:length] for example, length in zip(examples[:2], (48, 31), strict=False)]
    collator = Collator(max(map(len, starts)) + 1, pad_token_id)
    batch = collator([Example(ids, ids, number) for number, ids in enumerate(starts)])
    input_ids, plan = batch.input_ids.to(device), batch.plan.to(device)
    with Sparsified(model) as padded:
        expected = padded.row_losses(input_ids, plan)
    with ExitStack() as undo:
        try:
            handle = Hoisted(
                model,
                checkpoints=options.checkpoints,
                offload=options.offload,
                blocks_in_pieces=options.blocks_in_pieces,
                max_logits=options.max_logits,
            )
            hoisted = undo.enter_context(handle)
            found = hoisted.row_losses(ActiveTokens.gather(input_ids, plan))
        except SparsityError as error:
            return None, str(error)
        except (TypeError, ValueError, RuntimeError, LookupError, AttributeError) as error:
            if ran_out_of_memory(error):
                raise
            return None, f"its architecture does not take single rows ({type(error).__name__})."
        tolerance = 1e-4 if next(model.parameters()).dtype == torch.float32 else 0.05
        difference = float((found - expected).abs().mean() / expected.mean())
        if not difference <= tolerance:
            return None, f"its losses on rows alone differ by {difference:.1%}."
        undo.pop_all()
    return hoisted, None
