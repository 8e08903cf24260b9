"""Hoists a decoder if it computes the same on active rows as on padded batches; otherwise gives the reason."""

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from sebp_edge.basics.out_of_memory import ran_out_of_memory
from sebp_edge.basics.units import percent
from sebp_edge.engine.sparse.block_by_block import BlockByBlock
from sebp_edge.engine.sparse.copy_trial import Code, copy_mismatch, padded_losses
from sebp_edge.engine.sparse.hoist import Hoisted
from sebp_edge.engine.sparse.patches.agreement import (
    FAILURES,
    HIDDEN_STATES,
    ROW_LOSSES,
    disagreement,
    evaluating,
    graph_cut_after,
    reads_other_rows,
    trial_batch,
    without_main_grads,
)
from sebp_edge.engine.sparse.patches.fused_lora import FusedLora
from sebp_edge.engine.sparse.patches.state import are_equal, describe
from sebp_edge.engine.sparse.patches.stops import Stops
from sebp_edge.engine.sparse.rows.active_tokens import ActiveTokens
from sebp_edge.engine.sparse.rows.row_plan import IGNORE, RowPlan
from sebp_edge.errors import SparsityError

# Attribute of a decoder's embedding, which all copies of a model share: what each of its last trials depended on, and
# what later trials found. With an adapter, with another one and without any, a training hoists it in turn.
_PASSED, _NUM_PASSED = "_sebp_edge_passed", 4
# Lengths in tokens of the sequences whose hidden states are compared.
LENGTHS = (48, 31)


def hoist_if_exact(
    model: nn.Module, sequences: Sequence[Sequence[int]], pad_token_id: int, **options
) -> tuple[Hoisted | None, str | None]:
    """Returns the hoisted model and None if its results equal the padded model's, else None and the reason in words.

    See `HoistedIfExact`; `sequences` are what it compares hidden states on.
    """
    starts = [ids[:length] for ids, length in zip(sequences, LENGTHS, strict=False)]
    try:
        return HoistedIfExact(model, pad_right(starts, pad_token_id), **options), None
    except SparsityError as error:
        return None, str(error)


class HoistedIfExact(Hoisted):
    """A hoisted model that is compared with the padded one when it is attached, and again if it changes.

    Compares gradients of a small copy of the model, and the model's own hidden states and losses on two short
    sequences, neither of which may read the other: a batch of token ids [B, T] and their plan, by default any tokens. A
    model that has passed, or a copy with its embedding, is not compared again while all that the comparison depends on
    is the same (see `_facts`).
    """

    def __init__(self, model: nn.Module, batch: tuple[Tensor, RowPlan] | None = None, **options):
        self._batch = batch
        super().__init__(model, **options)

    @torch.no_grad()
    def _attach(self) -> None:
        reason = copy_mismatch(self._decoder)
        if reason is not None:
            raise SparsityError(reason)
        embedding = vars(self._decoder.get_input_embeddings().weight)
        facts, passed = self._facts(), embedding.pop(_PASSED, [])
        verdicts = next((found for each, found in passed if facts is not None and are_equal(facts, each)), None)
        if verdicts is not None:
            super()._attach(verdicts)
        else:
            self._attach_on_trial(verdicts := {})
            passed = [*passed, (facts, verdicts)]
        if facts is not None:
            embedding[_PASSED] = passed[-_NUM_PASSED:]

    def _facts(self) -> list | None:
        """Returns what the trial depends on, besides the values of weights; None if it must be made in any case."""
        model, device = describe(self.model, self._decoder), self._decoder.device.type
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        options = (self._num_checkpoints, self._offload, self._chunked_blocks, self.num_dequantised, self._max_logits)
        return None if model is None else [model, Code.of(self._decoder), autocast, options]

    def _attach_on_trial(self, verdicts: dict[str, bool]) -> None:
        batch = self._batch or pad_right(trial_batch(self._decoder)[0].tolist(), 0)
        input_ids, plan = (part.to(self._decoder.device) for part in batch)
        blocks = BlockByBlock(self._decoder, plan.active_rows)
        with evaluating(self.model, with_hooks=True):
            padded_CD, expected_C = self._padded(input_ids, plan, blocks)
            super()._attach(verdicts)
            with self._attaching():
                try:
                    self._refuse_mixing()
                    with blocks.repeating():
                        hidden_CD = self._hidden_states(ActiveTokens.gather(input_ids, plan), restricted=False)
                    found_C = self._head.losses(hidden_CD, plan.targets)
                except FAILURES as error:
                    if isinstance(error, SparsityError) or ran_out_of_memory(error):
                        raise
                    raise SparsityError(f"the model failed on active rows ({type(error).__name__}).") from error
                # Losses show what the head does; with fresh weights, all of them are about ln V.
                difference = blocks.difference or disagreement(self.model, padded_CD, hidden_CD, HIDDEN_STATES)
                difference = difference or disagreement(self.model, expected_C, found_C, ROW_LOSSES)
                if difference is not None:
                    raise SparsityError(
                        f"its results on active rows differ from the padded ones by {percent(difference, 2)}."
                    )

    def _refuse_mixing(self) -> None:
        """Refuses a model in which a sequence reads another one, or what comes later, whatever its weights are."""
        ids_BT = trial_batch(self._decoder)[0]
        labels_BT = ids_BT.clone()
        labels_BT[1, 7:] = IGNORE  # so the second sequence is shorter
        tokens = ActiveTokens.gather(ids_BT, RowPlan.from_labels(labels_BT).to(ids_BT.device))
        first = int(tokens.cu_seqlens[1])
        with torch.enable_grad(), without_main_grads(self.model):
            for rows in (slice(first), slice(first, None)):
                # Twice, since a checkpoint may recompute once.
                with graph_cut_after(self._decoder.get_input_embeddings()) as embedded:
                    hidden_AD = self._hidden_states(tokens, restricted=False)
                if reads_other_rows(hidden_AD[rows], embedded, rows):
                    raise SparsityError("its sequences would read each other outside of attention.")

    def _padded(self, input_ids_BT: Tensor, plan: RowPlan, blocks: BlockByBlock) -> tuple[Tensor, Tensor]:
        """The last hidden states, [C, D], and the losses, [C], that the model's own code computes."""
        with ExitStack() as patches:
            if getattr(self._decoder, "is_loaded_in_4bit", False):
                # On CPUs, bitsandbytes' own code would pack the weights for inference.
                patches.enter_context(fused := FusedLora(self.model)).attach()
                patches.enter_context(fused.refreshed())
            if self._check is not None:
                patches.enter_context(Stops(self.model, self._check))
            with blocks.recording():
                hidden_BTD = self._decoder.base_model(input_ids=input_ids_BT, use_cache=False).last_hidden_state
            return hidden_BTD.flatten(0, 1)[plan.loss_rows], padded_losses(self.model, input_ids_BT, plan)


def pad_right(sequences: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, RowPlan]:
    """Pads token ids on the right, to one more than the longest; returns them, int64 [B, T], and their plan.

    Every token is a label.
    """
    size = len(sequences), max(map(len, sequences)) + 1
    input_ids_BT, labels_BT = torch.full(size, pad_token_id), torch.full(size, IGNORE)
    for row, ids in enumerate(sequences):
        input_ids_BT[row, : len(ids)] = labels_BT[row, : len(ids)] = torch.tensor(ids)
    return input_ids_BT, RowPlan.from_labels(labels_BT)
