"""Level 2 for encoders: runs BERT, RoBERTa and DistilBERT on real tokens only, with sequence, token or word heads.

    with HoistedEncoder(model) as hoisted:
        loss = hoisted.losses(batch).mean()         # the model's own loss; a batch is a tokenizer's output and labels
        loss.backward()                             # the padded model's gradients

As in `hoist`, the real tokens of a batch [B, T] become one row of A tokens, [1, A]: the model's own code embeds them at
their positions in the batch, and each attends to its own sequence. After the last attention the model works row by row,
and the head reads the first token of each sequence, or labelled tokens. So the loss rows are gathered there, and the
rest of the model gets each of them as a sequence of one token, [C, 1, D].

Dropout follows the model's mode, with the padded model's probabilities but other random numbers.

Shapes: B sequences, T positions, A active rows, C loss rows, D hidden, L labels.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sebp_edge.engine.models.architecture import (
    first_module_after_attention,
    last_block,
    reads_first_token,
    reads_labelled_tokens,
)
from sebp_edge.engine.models.lora import refuse_packed_weights, without_adapter
from sebp_edge.engine.sparse.encoder_tokens import EncoderTokens
from sebp_edge.engine.sparse.hoist import ATTENTION
from sebp_edge.engine.sparse.patches.agreement import (
    HIDDEN_STATES,
    evaluating,
    find_mismatch,
    gradients_agree,
    graph_cut_after,
)
from sebp_edge.engine.sparse.patches.checkpoints import is_in_checkpoint
from sebp_edge.engine.sparse.patches.fused_lora import FusedLora
from sebp_edge.engine.sparse.patches.state import FollowingPatch, ModelState
from sebp_edge.engine.sparse.rows.active_tokens import ActiveTokens
from sebp_edge.engine.sparse.rows.row_plan import IGNORE
from sebp_edge.errors import SparsityError
from sebp_edge.ops import gather_rows


class HoistedEncoder(FollowingPatch):
    """Handle of one hoisted encoder: a context manager, or call `remove()` when done.

    While attached, call the model only through this handle. If the model changes (see `ModelState`), the next batch
    tries it again.

    Raises:
        SparsityError: the model is of another kind or has another loss, or its logits of a trial batch differ from the
            padded model's.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        refuse_packed_weights(model)
        self.model = model
        self._encoder = without_adapter(model)
        self._loss_indices: Tensor | None = None
        self._attach()

    def _attach(self) -> None:
        """Hoists the model as it is now, if its logits of a trial batch stay the same."""
        encoder = self._encoder
        self._last_block = last_block(encoder)
        self._after_attention = first_module_after_attention(self._last_block)
        if self._after_attention is None or not (reads_first_token(encoder) or reads_labelled_tokens(encoder)):
            raise SparsityError(
                f"{type(encoder).__name__} is not BERT, RoBERTa or DistilBERT with a head for sequence classification, "
                "token classification or masked words; use sparsify instead."
            )
        self._tokens = EncoderTokens(encoder)
        self._fused_lora = FusedLora(self.model)
        with self._attaching():
            reason = self._find_mismatch()
            if reason is not None:
                name = type(encoder).__name__
                raise SparsityError(f"{name} cannot be hoisted, use sparsify instead: {reason}")
        self.state = ModelState(self.model, encoder)

    def losses(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The loss of each sequence or labelled token of a batch, fp32 [C]; the model's own loss is their mean."""
        return self.row_losses(self.tokens(batch).to(self._encoder.device))

    def tokens(self, batch: Mapping[str, Tensor]) -> ActiveTokens:
        """The active tokens of a batch, on the host.

        Args:
            batch: `input_ids` [B, T]; `labels` [B] or [B, T], -100 for none; optionally the tokenizer's
                `attention_mask` and `token_type_ids`, with padding anywhere. Waits for tensors on a GPU.

        Raises:
            SparsityError: the batch has another form, or the head would read padding.
        """
        return self._tokens(batch)

    def row_losses(self, tokens: ActiveTokens) -> Tensor:
        """The loss of every loss row: fp32 [C]; the batch's tokens are on the model's device."""
        return _losses(self.row_logits(tokens), tokens.targets)

    def row_logits(self, tokens: ActiveTokens) -> Tensor:
        """The model's logits of every loss row: [C, L]."""
        self._follow_changes()
        return self._row_logits(tokens)

    def _row_logits(self, tokens: ActiveTokens) -> Tensor:
        with self._fused_lora.refreshed(), self._reading(tokens.loss_indices):
            logits = self._encoder(**tokens.inputs).logits
        return logits.reshape(len(tokens.loss_indices), -1)

    @contextmanager
    def _reading(self, loss_indices: Tensor) -> Iterator[None]:
        """Context in which the head reads these rows."""
        self._loss_indices = loss_indices
        try:
            yield
        finally:
            self._loss_indices = None

    def _gather_loss_rows(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Gathers the rows that the head reads, [C, 1, D], from each input [1, A, D]."""
        # A checkpoint recomputes after the rows are gone.
        if self._loss_indices is None or is_in_checkpoint():
            raise SparsityError("A hoisted encoder does not support gradient checkpointing; disable it.")
        return tuple(gather_rows(x_1AD.squeeze(0), self._loss_indices)[:, None] for x_1AD in inputs)

    def _find_mismatch(self) -> str | None:
        """Attaches, and compares results on a trial batch; returns the reason to detach in words, or None."""
        encoder, trial = self._encoder, self._trial_batch()
        tokens = self._tokens(trial).to(encoder.device)
        inputs = {name: values.to(encoder.device) for name, values in trial.items() if name != "labels"}
        read_BT = trial["labels"] != IGNORE
        if self._tokens.reads_first_token:
            read_BT = torch.arange(12).expand(2, 12) == 0

        def padded() -> Tensor:
            hidden_BTD, logits = self._last_hidden(lambda: encoder(**inputs).logits)
            return _concatenate_evenly(
                hidden_BTD[read_BT], logits if self._tokens.reads_first_token else logits[read_BT]
            )

        def hoisted() -> Tensor:
            self._set_attention(encoder, ATTENTION)
            self._include(self._fused_lora)
            self._undo.append(self._after_attention.register_forward_pre_hook(self._gather_loss_rows).remove)
            return _concatenate_evenly(*self._last_hidden(lambda: self._row_logits(tokens)))

        if self._has_other_loss(inputs, trial["labels"].to(encoder.device), read_BT, tokens.targets):
            return "its loss is not that of its logits at the labels."
        # Hooks would get other rows than in the padded model.
        return find_mismatch(encoder, padded, hoisted, HIDDEN_STATES, with_hooks=True)

    def _has_other_loss(self, inputs: dict[str, Tensor], labels: Tensor, read_BT: Tensor, targets_C: Tensor) -> bool:
        """Whether the model's loss has other gradients than the loss computed from the logits that the head reads."""
        encoder = self._encoder
        if encoder.dtype not in (torch.float32, torch.float64):
            # Rounding could hide a difference that would be missing from every step.
            encoder = copy.deepcopy(encoder).float()

        def original_loss() -> tuple[Tensor, Tensor]:
            output = encoder(**inputs, labels=labels)
            return output.loss, output.logits

        def loss_of_read_logits() -> tuple[Tensor, Tensor]:
            logits = encoder(**inputs).logits
            return _losses(logits if self._tokens.reads_first_token else logits[read_BT], targets_C).mean(), logits

        # Autocast would round too.
        with evaluating(encoder), torch.autocast(encoder.device.type, enabled=False):
            if original_loss()[0] is None:
                return False
            return not gradients_agree(_gradients(encoder, original_loss), _gradients(encoder, loss_of_read_logits))

    def _trial_batch(self) -> dict[str, Tensor]:
        """Two sequences of 12 and 7 tokens, padded to 12."""
        input_ids = torch.arange(24).view(2, 12) % self._encoder.get_input_embeddings().num_embeddings
        mask = torch.arange(12).expand(2, 12) < torch.tensor([[12], [7]])
        # Several labels, and a real token without one.
        labels = torch.arange(24).view(2, 12) % self._tokens.num_labels
        if self._tokens.is_regression:
            # As `_has_other_loss` computes: torch 2.11 takes labels of no other dtype than the logits'.
            labels = torch.tensor([0.5, -1.5], dtype=torch.promote_types(self._encoder.dtype, torch.float32))
        elif self._tokens.reads_first_token:
            labels = labels[:, 0]
        else:
            labels = labels.where(mask & (torch.arange(12) != 3), IGNORE)
        types = getattr(self._encoder.base_model.embeddings, "token_type_embeddings", None)
        of_pair = {} if types is None else {"token_type_ids": (input_ids > 4).long() % types.num_embeddings}
        return {"input_ids": input_ids, "attention_mask": mask.long(), "labels": labels} | of_pair

    def _last_hidden(self, logits: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the last block's output and the logits; `logits` computes the latter."""
        outputs: list[Tensor] = []
        hook = self._last_block.register_forward_hook(lambda block, inputs, output: outputs.append(output))
        try:
            found = logits()
        finally:
            hook.remove()
        return outputs[0], found


@torch.enable_grad()
def _gradients(encoder: nn.Module, loss: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
    """Gradients of a loss with respect to its logits and to the embeddings, which everything is computed from."""
    with graph_cut_after(encoder.get_input_embeddings()) as embedded:
        value, logits = loss()
        return torch.autograd.grad(value, (logits, *embedded))


def _losses(logits_CL: Tensor, targets_C: Tensor) -> Tensor:
    """The loss of each row, [C], in fp32 or higher precision."""
    logits_CL = logits_CL.to(torch.promote_types(logits_CL.dtype, torch.float32))
    if targets_C.is_floating_point():
        return (logits_CL.squeeze(1) - targets_C).square()
    return F.cross_entropy(logits_CL, targets_C, reduction="none")


def _concatenate_evenly(hidden: Tensor, logits: Tensor) -> Tensor:
    """Joins both into one vector, each divided by its size: a new head's few, small logits must count too."""
    return torch.cat([hidden.flatten() / hidden.numel(), logits.flatten() / logits.numel()])
