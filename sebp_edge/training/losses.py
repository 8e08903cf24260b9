"""The losses of a batch: on hoisted rows where a trial shows the padded model's losses, else through the drop-in."""

from collections.abc import Iterable

from torch import Tensor, nn

from sebp_edge.events import Notice, Sink
from sebp_edge.memory.options import FASTEST, MemoryOptions
from sebp_edge.rows.active_tokens import ActiveTokens
from sebp_edge.sparse.hoist import Hoisted
from sebp_edge.sparse.hoist_if_exact import hoist_if_exact
from sebp_edge.sparse.sparsify import Sparsified
from sebp_edge.texts.batches import Collator, micro_batches
from sebp_edge.texts.examples import Example

# Logits of a padded micro-batch: 2^27 of them are half a GB in fp32. Hoisted rows never hold all of theirs.
MAX_LOGITS = 2**27


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
            self.max_rows = min(self.max_rows, MAX_LOGITS // model.get_output_embeddings().weight.shape[0])
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


def _hoist(
    model: nn.Module, examples: list[Example], pad_token_id: int, device, options: MemoryOptions
) -> tuple[Hoisted | None, str | None]:
    """See `hoist_if_exact`."""
    return hoist_if_exact(
        model,
        [example.input_ids for example in examples[:2]],
        pad_token_id,
        checkpoints=options.checkpoints,
        offload=options.offload,
        blocks_in_pieces=options.blocks_in_pieces,
        max_logits=options.max_logits,
    )
