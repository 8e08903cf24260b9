"""Tests on one small batch whether a decoder's labels determine which of its rows carry gradient.

    is causal              d logits[t] / d embedding[s] = 0                  for s > t
    predicts the next      d loss / d logits[t] = 0 where labels[t + 1] = -100, and negative only for labels[t + 1]

Gradients are compared with exact zeros, so that no dtype and no small weight hides a dependency. The class name proves
nothing: XLM's language model attends in both directions by default, and TrOCR takes labels that are already shifted.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sebp_edge.machine.devices import ran_out_of_memory
from sebp_edge.sparse.patches.agreement import FAILURES, evaluating, trial_batch
from sebp_edge.sparse.rows.row_plan import RowPlan

logger = logging.getLogger(__name__)


class Causality(NamedTuple):
    """Result of the trial of a decoder.

    Attributes:
        is_causal: whether no row's logits depend on a later token; None if the trial failed.
        predicts_next: whether each row's loss is that of the next row's label.
    """

    is_causal: bool | None
    predicts_next: bool

    @property
    def labels_determine_rows(self) -> bool:
        """Whether the labels alone determine which rows carry gradient."""
        return bool(self.is_causal) and self.predicts_next

    @classmethod
    def from_trial(
        cls, decoder: nn.Module, forward: Callable, computing_all_rows: AbstractContextManager
    ) -> "Causality":
        """Runs a trial without dropout or gradients of parameters; warns if labels do not determine the rows."""
        try:
            found = cls(*_run_trial(decoder, forward, computing_all_rows))
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


def _run_trial(decoder: nn.Module, forward: Callable, computing_all_rows: AbstractContextManager) -> tuple[bool, bool]:
    input_ids, labels = trial_batch(decoder)
    middle, embedding = input_ids.shape[1] // 2, decoder.get_input_embeddings()
    with evaluating(decoder), computing_all_rows, torch.enable_grad(), graph_cut_after(embedding) as embedded:
        output = forward(input_ids=input_ids, labels=labels, use_cache=False, return_dict=True)
        earlier = output.logits[:, :middle].float().sum()
        (embedding_gradient,) = torch.autograd.grad(earlier, embedded, retain_graph=True)
        (logits_gradient,) = torch.autograd.grad(output.loss, output.logits)
    # Positions come first in XLNet's layers, so its shape differs.
    is_causal = embedding_gradient.shape[:2] == input_ids.shape and not bool(embedding_gradient[:, middle:].any())
    plan, rows = RowPlan.from_labels(labels).to(labels.device), logits_gradient.flatten(0, 1)
    with_loss = rows.any(dim=1).nonzero().squeeze(1)
    return is_causal, torch.equal(with_loss, plan.loss_rows) and torch.equal(rows[with_loss].argmin(1), plan.targets)


@contextmanager
def graph_cut_after(embedding: nn.Module) -> Iterator[list[Tensor]]:
    """Cuts the graph after an embedding: replaces each output by a leaf, and adds the leaf to the yielded list."""
    embedded: list[Tensor] = []

    def cut(_module, _inputs, out: Tensor) -> Tensor:
        embedded.append(out.detach().requires_grad_())
        return embedded[-1].clone()  # a model may change it in place, as CTRL does

    handle = embedding.register_forward_hook(cut)
    try:
        yield embedded
    finally:
        handle.remove()
