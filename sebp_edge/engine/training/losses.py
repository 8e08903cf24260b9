"""Computes the losses of a batch: on hoisted rows if a trial shows that this is exact, else on padded batches."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from sebp_edge.basics.stopping import Check
from sebp_edge.engine.memory.amount_of_work import shared_sizes
from sebp_edge.engine.memory.memory_options import FASTEST, MAX_PADDED_LOGITS, MemoryOptions
from sebp_edge.engine.models.lora import without_adapter
from sebp_edge.engine.sparse.copy_trial import copy_mismatch
from sebp_edge.engine.sparse.hoist_if_exact import hoist_if_exact
from sebp_edge.engine.sparse.patches.stops import Stops
from sebp_edge.engine.sparse.rows.active_tokens import ActiveTokens
from sebp_edge.engine.sparse.rows.batches import Collator, pack
from sebp_edge.engine.sparse.rows.buckets import Bucket
from sebp_edge.engine.sparse.rows.schedule import MicroBatch, RowLimit
from sebp_edge.engine.sparse.rows.share_beginnings import share_beginnings
from sebp_edge.engine.sparse.sparsify import Sparsified
from sebp_edge.engine.training.words import WordReader
from sebp_edge.events import Notice, Sink
from sebp_edge.values.example import Example, Outline


class RowLosses:
    """Computes the losses of examples; a context manager that restores the model.

    Args:
        examples: the examples, whose tokens are looked up by the numbers of outlines; some are used to test whether
            hoisting is exact.
        options: what the training holds in memory at once; padded batches always hold all their activations.
        check: called several times within a micro-batch on the CPU, where one takes long; may raise to end it.

    Attributes:
        hoisted: the handle of a model that computes active rows only; None if it computes padded batches.
        shares_prefixes: whether what sequences begin with in common is computed once: there may be such sequences, the
            device's attention takes them, and a trial shows that this is exact.
    """

    def __init__(
        self,
        model: nn.Module,
        examples: list[Example],
        collator: Collator,
        device: torch.device,
        on_event: Sink,
        options: MemoryOptions = FASTEST,
        check: Check = lambda: None,
    ):
        self.examples, self._collator, self._device = examples, collator, device
        on_cpu, self._on_gpu = device.type == "cpu", device.type == "cuda"
        may_share = sum(example.num_tokens_before_loss > 0 for example in examples) > 1
        is_exact = may_share and copy_mismatch(without_adapter(model), shares_prefixes=True) is None
        self.hoisted, reason = hoist_if_exact(
            model,
            [example.input_ids for example in examples],
            collator.pad_token_id,
            checkpoints=options.checkpoints,
            offload=options.offload,
            chunked_blocks=options.chunked_blocks,
            dequantised_blocks=options.dequantised_blocks,
            max_logits=options.max_logits,
            # A GPU's passes are short, and a captured one must not end midway.
            check=check if on_cpu else None,
        )
        self.shares_prefixes = is_exact and self.hoisted is not None and self.hoisted.attends_to_prefixes
        self._padded = Sparsified(model) if self.hoisted is None else None
        self._stops = Stops(model, check)
        if on_cpu and self.hoisted is None:
            self._stops.attach()
        self.limit = RowLimit.on(device.type, options.max_rows)
        if reason is not None:
            max_rows = min(options.max_rows, MAX_PADDED_LOGITS // model.get_output_embeddings().weight.shape[0])
            self.limit = RowLimit.on(device.type, max_rows, padded_to=collator.context_length, pads=True)
            rows = sum(example.num_active_tokens for example in examples)
            longest = collator.context_length or max((example.num_tokens for example in examples), default=1)
            times = len(examples) * longest / max(rows, 1)
            on_event(
                Notice(f"This model runs on padded batches, which takes about {times:.1f} times as long: {reason}")
            )

    def __call__(self, examples: list[Outline]) -> tuple[Tensor, Tensor]:
        """Returns the losses of a micro-batch's loss rows in nats, fp32 [C], and the example of each, int64 [C]."""
        if self.hoisted is not None:
            tokens = self.pack(examples)
            return self.hoisted.row_losses(tokens.to(self._device)), tokens.sequences
        batch = self._collator(self._look_up(examples))
        losses = self._padded.row_losses(batch.input_ids.to(self._device), batch.plan.to(self._device))
        return losses, batch.plan.loss_rows // batch.input_ids.shape[1]

    def read(self, examples: list[Outline], words: WordReader) -> tuple[Tensor, Tensor]:
        """Returns what `words` reads of a micro-batch's loss rows, [C, F], and the example of each, int64 [C]."""
        batch = self.pack(examples)
        return words.read(self.row_logits(examples), batch.targets.to(self._device)), batch.sequences

    def row_logits(self, examples: list[Outline]) -> Iterable[Tensor]:
        """Returns the logits of a micro-batch's loss rows, some rows at a time: fp32 [c, V]."""
        if self.hoisted is not None:
            return self.hoisted.row_logits(self.pack(examples).to(self._device))
        batch = self._collator(self._look_up(examples))
        return [self._padded.row_logits(batch.input_ids.to(self._device), batch.plan.to(self._device))]

    def pack(self, examples: list[Outline]) -> ActiveTokens:
        """Packs the active tokens of a micro-batch on the host, and what they begin with in common once."""
        tokens = pack(self._look_up(examples))
        return share_beginnings(tokens, on_gpu=self._on_gpu) if self.shares_prefixes else tokens

    def sizes(self, micro_batch: MicroBatch) -> tuple[Bucket, bool]:
        """Returns the sizes of a packed micro-batch, and whether it has prefixes."""
        sizes = micro_batch.sizes
        if self.shares_prefixes:
            sizes = shared_sizes(micro_batch, self.examples, on_gpu=self._on_gpu)
        return sizes, sizes.sequences > micro_batch.sizes.sequences

    def _look_up(self, examples: list[Outline]) -> list[Example]:
        return [self.examples[example.number] for example in examples]

    def __enter__(self) -> "RowLosses":
        return self

    def __exit__(self, *exception) -> None:
        self._stops.remove()
        (self.hoisted or self._padded).remove()
