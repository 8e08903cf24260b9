"""The losses of a batch: on hoisted rows where a trial shows the padded model's losses, else through the drop-in."""

from collections.abc import Iterable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from sebp_edge.errors import SparsityError
from sebp_edge.events import Notice, Sink
from sebp_edge.machine.devices import ran_out_of_memory
from sebp_edge.memory.options import FASTEST, MAX_PADDED_LOGITS, MemoryOptions
from sebp_edge.models.lora import without_adapter
from sebp_edge.rows.active_tokens import ActiveTokens
from sebp_edge.sparse.copy_trial import why_not_on_a_copy
from sebp_edge.sparse.hoist import Hoisted
from sebp_edge.sparse.sparsify import Sparsified
from sebp_edge.texts.batches import Collator, micro_batches
from sebp_edge.texts.examples import Example


class RowLosses:
    """A model that gives the losses of examples; a context manager that leaves the model as it was.

    Args:
        options: what is held in memory at once; of a padded batch's activations, all is.

    Attributes:
        collator: pads examples into batches.
        device: where the model is.
        hoisted: the handle of the model that computes active rows only; None where the padded batch is computed.
        max_rows: most rows that one micro-batch may have; a single longer example stands alone.
    """

    def __init__(
        self,
        model: nn.Module,
        examples: list[Example],
        collator: Collator,
        device,
        on_event: Sink,
        options: MemoryOptions = FASTEST,
    ):
        self.collator = collator
        self.device = device
        self.hoisted, reason = _hoist(model, examples, collator.pad_token_id, device, options)
        self._padded = Sparsified(model) if self.hoisted is None else None
        self.max_rows = options.max_rows
        if reason is not None:
            self.max_rows = min(self.max_rows, MAX_PADDED_LOGITS // model.get_output_embeddings().weight.shape[0])
            on_event(Notice(f"This model runs on padded batches, which is slower: {reason}"))

    def __call__(self, examples: list[Example]) -> tuple[Tensor, Tensor]:
        """The losses of one micro-batch's loss rows, in nats: fp32 [C], and the example of each: int64 [C]."""
        if self.hoisted is not None:
            tokens = self.tokens(examples)
            return self.hoisted.row_losses(tokens.to(self.device)), tokens.sequences
        batch = self.collator(examples)
        losses = self._padded.row_losses(batch.input_ids.to(self.device), batch.plan.to(self.device))
        return losses, batch.plan.loss_rows // self.collator.context_length

    def tokens(self, examples: list[Example]) -> ActiveTokens:
        """One micro-batch's active tokens, on the host."""
        batch = self.collator(examples)
        return ActiveTokens.gather(batch.input_ids, batch.plan)

    def micro_batches(self, examples: Iterable[Example], most: int | None = None) -> list[list[Example]]:
        """Cuts `examples` into micro-batches of at most `max_rows` rows, and `most`; the longest examples first."""
        return micro_batches(examples, min(self.max_rows, most or self.max_rows), self._num_rows)

    def cut_smaller(self, micro_batch: list[Example]) -> None:
        """Lowers `max_rows` to half of what a micro-batch of several examples has, which did not fit into memory."""
        self.max_rows = min(self.max_rows, -(-self.num_rows(micro_batch) // 2))

    def num_rows(self, micro_batch: list[Example]) -> int:
        """How many rows a micro-batch has."""
        return sum(map(self._num_rows, micro_batch))

    def _num_rows(self, example: Example) -> int:
        return example.num_active_tokens if self.hoisted is not None else self.collator.context_length

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
