"""Tests on one small batch whether a decoder's labels determine which of its rows carry gradient.

    is causal              d logits[t] / d embedding[s] = 0                  for s > t, and in other sequences
    predicts the next      d loss / d logits[t] = 0 where labels[t + 1] = -100, and negative only for labels[t + 1]
    ends row by row        d logits[t] / d output[s] = 0                     for s != t, after the last attention

Gradients are compared with exact zeros, or are NaN, and weights are varied, so that no dtype and no weight that is
small or zero hides a dependency. The class name proves nothing: XLM's language model attends in both directions by
default, and TrOCR takes labels that are already shifted.
"""

import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sebp_edge.basics.out_of_memory import ran_out_of_memory
from sebp_edge.engine.sparse.patches.agreement import (
    FAILURES,
    evaluating,
    graph_cut_after,
    reads_other_rows,
    trial_batch,
    varied,
)
from sebp_edge.engine.sparse.rows.row_plan import RowPlan

logger = logging.getLogger(__name__)


class Causality(NamedTuple):
    """Result of the trial of a decoder, whose labels alone determine which rows carry gradient if both are true."""

    # Whether no row's logits depend on a later token or another sequence; None if the trial failed.
    is_causal: bool | None
    predicts_next: bool  # whether each row's loss is that of the next row's label

    @classmethod
    def from_trial(cls, decoder: nn.Module, forward: Callable) -> "Causality":
        """Runs a trial without dropout or gradients of parameters; warns if labels do not determine the rows."""
        try:
            found = cls(*_run_trial(decoder, forward))
        except FAILURES as error:
            if ran_out_of_memory(error):
                raise
            logger.warning(
                "Active rows are detected in the backward pass: a trial batch failed (%s).", type(error).__name__
            )
            return cls(None, False)
        if not all(found):
            reason = "the loss is not that of the next tokens" if found.is_causal else "rows depend on later tokens"
            logger.warning("Active rows are detected in the backward pass: on a trial batch, %s.", reason)
        return found


def ends_row_by_row(decoder: nn.Module, forward: Callable, last_layers: Iterable[nn.Module]) -> bool:
    """Whether the logits of loss rows depend on no other row of what the layers after the last attention return."""
    input_ids, labels = trial_batch(decoder)
    plan, outputs = RowPlan.from_labels(labels).to(labels.device), []

    def record(_layer, _inputs, out: Tensor) -> None:
        if out.requires_grad and out.shape[:-1].numel() == plan.num_rows:
            outputs.append(out)

    try:
        with evaluating(decoder), torch.enable_grad(), ExitStack() as hooks:
            for layer in last_layers:
                hooks.callback(layer.register_forward_hook(record).remove)
            with graph_cut_after(decoder.get_input_embeddings()):
                logits = forward(input_ids=input_ids, use_cache=False, return_dict=True).logits
            return not (outputs and reads_other_rows(logits.flatten(0, 1)[plan.loss_rows], outputs, plan.loss_rows))
    except FAILURES as error:
        if ran_out_of_memory(error):
            raise
        return False


def _run_trial(decoder: nn.Module, forward: Callable) -> tuple[bool, bool]:
    input_ids, labels = trial_batch(decoder)
    middle, embedding = input_ids.shape[1] // 2, decoder.get_input_embeddings()
    with evaluating(decoder), varied(decoder), torch.enable_grad(), graph_cut_after(embedding) as embedded:
        output = forward(input_ids=input_ids, labels=labels, use_cache=False, return_dict=True)
        earlier = output.logits[0, :middle].float()
        # A plain sum over normalised values would not depend on them.
        weights = torch.linspace(-1, 1, earlier.numel(), device=earlier.device).view_as(earlier)
        (embedding_gradient,) = torch.autograd.grad((earlier * weights).sum(), embedded, retain_graph=True)
        (logits_gradient,) = torch.autograd.grad(output.loss, output.logits)
    # Batch norms mix rows in training only. Positions come first in XLNet's layers, so its shape differs.
    has_batch_norm = any(isinstance(part, nn.modules.batchnorm._NormBase) for part in decoder.modules())
    is_of_rows = embedding_gradient.shape[:2] == input_ids.shape and not has_batch_norm
    embedding_gradient[0, :middle] = 0
    plan, rows = RowPlan.from_labels(labels).to(labels.device), logits_gradient.flatten(0, 1)
    with_loss = rows.any(dim=1).nonzero().squeeze(1)
    predicts_next = torch.equal(with_loss, plan.loss_rows) and torch.equal(rows[with_loss].argmin(1), plan.targets)
    return is_of_rows and not bool(embedding_gradient.any()), predicts_next
