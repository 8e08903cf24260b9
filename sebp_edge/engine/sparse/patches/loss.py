"""Computes a causal decoder's loss from its hidden states, over loss rows only and without all logits at once.

A trial on one small batch decides which models use it: the model's own loss and this one must agree, and so must their
gradients. Models with further terms in their loss, with weights beside the base model and the head, or with another
head than their config describes, keep their own loss.

Shapes: B sequences, T positions, C loss rows, D hidden, V vocabulary.
"""

import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sebp_edge.basics.out_of_memory import ran_out_of_memory
from sebp_edge.basics.stopping import Check
from sebp_edge.engine.models.architecture import has_library_loss
from sebp_edge.engine.models.sharding import FSDPModule, own_class
from sebp_edge.engine.sparse.patches.agreement import (
    FAILURES,
    FULL_PRECISION,
    GRADIENT,
    disagreement,
    find_mismatch,
    gradients_agree,
    graph_cut_after,
    trial_batch,
    without_main_grads,
)
from sebp_edge.engine.sparse.patches.last_layer import LastLayer, Watch
from sebp_edge.engine.sparse.patches.patch import Patch, is_wrapped
from sebp_edge.engine.sparse.patches.state import has_hooks
from sebp_edge.engine.sparse.rows.row_plan import IGNORE, RowPlan
from sebp_edge.errors import SparsityError
from sebp_edge.ops import gather_rows, linear_cross_entropy
from sebp_edge.ops.linear_cross_entropy import CHUNK_LOGITS, Others, final_logits

logger = logging.getLogger(__name__)

# The config's names for what logits are multiplied by: in Cohere's models, in Falcon-H1 and in Muse. Granite divides.
SCALES = ("logit_scale", "lm_head_multiplier", "output_multiplier")
# The config's name for the logit softcap: in Gemma 2 and its relatives, RecurrentGemma and xLSTM. Read from the config
# because a trial shows a cap only if logits are large.
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
# Keywords of a model's call that its base model does not take.
HEAD_KEYWORDS = ("labels", "num_items_in_batch", "logits_to_keep", "return_dict")
# Standard deviation of a trial's logits. Those of fresh weights are almost 0, so that any loss is ln V.
TRIAL_LOGITS = 6.0


class Head:
    """A causal decoder's head: turns hidden states into losses, with at most `max_logits`, or one row's, at once."""

    def __init__(self, decoder: nn.Module, max_logits: int = CHUNK_LOGITS, check: Check = lambda: None):
        self._linear, self._check = decoder.get_output_embeddings(), check
        if own_class(self._linear) is not nn.Linear or self._linear.bias is not None:
            raise SparsityError("its head is not a linear layer without a bias.")
        if has_hooks(self._linear) or is_wrapped(self._linear):
            raise SparsityError("its head has hooks or a replaced forward, which would not run.")
        config = decoder.config.get_text_config()
        scales, softcaps = ((getattr(config, name, None) for name in names) for names in (SCALES, SOFTCAPS))
        scale = next(filter(None, scales), 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
        self._options = {"scale": scale, "softcap": next(filter(None, softcaps), None), "max_logits": max_logits}

    @property
    def weight(self) -> Tensor:
        """[V, D]."""
        return self._linear.weight

    def losses(
        self, hidden_CD: Tensor, targets_C: Tensor, weight_VD: Tensor | None = None, others: Others | None = None
    ) -> Tensor:
        """The loss of each row, in nats: fp32 [C]."""
        return self._run(partial(self._losses, targets_C=targets_C, weight_VD=weight_VD, others=others), hidden_CD)

    def logits(self, hidden_CD: Tensor) -> Iterator[Tensor]:
        """The logits of each row, a few rows at a time: fp32 [c, V]."""
        # A chunk and its probabilities in fp32 take more memory than logits.
        rows = max(1, self._options["max_logits"] // (4 * self.weight.shape[0]))
        return (self._run(self._logits, hidden) for hidden in hidden_CD.split(rows))

    def _run(self, compute: Callable, hidden_CD: Tensor):
        """Returns what a function of the hidden states computes with the head's weight."""
        # Some model families, such as Mamba, have hidden states in fp32.
        hidden_CD = hidden_CD.to(self.weight.dtype)
        if not isinstance(self._linear, FSDPModule):
            return compute(hidden_CD)
        # FSDP gathers the head's weight by hooks on calls of the head.
        with Patch() as patch:
            patch._replace(self._linear, compute)
            return self._linear(hidden_CD)

    def _losses(self, hidden_CD: Tensor, targets_C: Tensor, weight_VD: Tensor | None, others: Others | None) -> Tensor:
        weight_VD = self.weight if weight_VD is None else weight_VD
        return linear_cross_entropy(hidden_CD, weight_VD, targets_C, others=others, check=self._check, **self._options)

    def _logits(self, hidden_CD: Tensor) -> Tensor:
        self._check()
        return final_logits(F.linear(hidden_CD, self.weight), self._options["scale"], self._options["softcap"])[0]


class FusedLoss:
    """Forward pass of a causal decoder that returns its loss and no logits.

    Holds for the model as it is when this is made. It calls the base model, past anything that wraps the decoder.
    """

    def __init__(self, decoder: nn.Module, original_forward: Callable, last_layer: LastLayer, *, is_wrapped: bool):
        self._decoder, self._original_forward, self._last_layer = decoder, original_forward, last_layer
        self._is_wrapped, self._parameters = is_wrapped, set(inspect.signature(original_forward).parameters)
        self._head: Head | None = None
        self._output_type: type | None = None
        self._trial_scale = 1.0

    def applies_to(self, inputs: dict) -> bool:
        """Whether this computes the call's loss: for a training step on all logits of a model that passed the trial."""
        to_keep = inputs.get("logits_to_keep", 0)
        keeps_all = isinstance(to_keep, int) and to_keep == 0
        # Loss functions other than transformers' own may read any keyword.
        has_usual_keywords = has_library_loss(self._decoder) or inputs.keys() <= self._parameters | {*HEAD_KEYWORDS}
        is_step = keeps_all and has_usual_keywords and self._decoder.training and torch.is_grad_enabled()
        return is_step and self._reason_to_keep is None

    def __call__(self, inputs: dict, plan: RowPlan, *, only_loss_rows: bool, watch: Watch | None):
        """Returns the model's output: its loss, no logits, and the other outputs of the base model."""
        # Tried whatever the batch: all processes must take part in the trial of a model with sharded weights.
        is_exact = self._last_layer.is_exact(self._decoder, self._trial_hidden_states)
        restricted = is_exact and only_loss_rows and len(plan.loss_rows) < len(plan.active_rows)
        base, hidden_CD = self._hidden_states(inputs, plan, restricted, watch)
        losses_C = self._head.losses(hidden_CD, plan.targets)
        items = inputs.get("num_items_in_batch")
        if isinstance(items, Tensor):
            items = items.to(losses_C.device)
        loss = losses_C.mean() if items is None else losses_C.sum() / items
        names = {field.name for field in fields(self._output_type)}
        output = self._output_type(loss=loss, **{name: value for name, value in base.items() if name in names})
        as_dict = inputs.get("return_dict")
        return output if (self._decoder.config.return_dict if as_dict is None else as_dict) else output.to_tuple()

    def _hidden_states(self, inputs: dict, plan: RowPlan, restricted: bool, watch: Watch | None = None):
        """The base model's output, and the hidden states of the loss rows, [C, D]."""
        rows = plan.loss_rows if plan.loss_span is None else plan.loss_span
        with self._last_layer.restricted_to(rows if restricted else None, watch):
            given = {name: value for name, value in inputs.items() if name not in HEAD_KEYWORDS}
            base = self._decoder.base_model(**given, return_dict=True)
        num_rows = base.last_hidden_state.shape[:-1].numel()
        if num_rows != plan.num_rows:
            raise SparsityError(
                f"The batch has {plan.num_rows} labels for {num_rows} tokens; expected one label per token."
            )
        return base, gather_rows(base.last_hidden_state.flatten(0, 1), rows)

    @cached_property
    def _reason_to_keep(self) -> str | None:
        """The reason to keep the model's own loss, or None; found at the first batch."""
        reason = self._find_obstacle()
        if reason is None:
            gradients: list[Tensor] = []
            reason = find_mismatch(
                self._decoder,
                lambda: self._differentiate(self._own_loss, gradients),
                lambda: self._differentiate(self._trial_loss, gradients),
            ) or find_mismatch(self._decoder, lambda: gradients[0], lambda: gradients[1], GRADIENT)
        if reason is not None:
            logger.warning("The model keeps its own loss and logits: %s", reason)
        return reason

    def _find_obstacle(self) -> str | None:
        """Makes the head; returns why no trial is needed to keep the model's own loss, or None."""
        if self._is_wrapped:
            return "its forward is already wrapped (as by accelerate for mixed precision); sparsify the model first."
        if has_hooks(self._decoder):
            return "it has hooks, which would see no logits."
        try:
            self._head = Head(self._decoder)
        except SparsityError as error:
            return str(error)
        of_parts, of_all = ({*each.parameters(), *each.buffers()} for each in (self._decoder.base_model, self._decoder))
        if of_all - of_parts - {*self._decoder.get_output_embeddings().parameters()}:
            return "it has weights beside the base model and the head."
        if not self._has_usual_loss():
            return "its loss function is not the mean cross-entropy of the next tokens."
        return None

    @torch.enable_grad()
    def _has_usual_loss(self) -> bool:
        """Compares the loss function by itself, in fp32: in lower precision, rounding would hide small differences."""
        loss_function = getattr(self._decoder, "loss_function", None)
        if loss_function is None:
            return True
        labels_BT, vocabulary = trial_batch(self._decoder)[1], self._decoder.config.get_text_config().vocab_size
        generator = torch.Generator(labels_BT.device).manual_seed(0)
        logits_BTV = torch.randn(
            *labels_BT.shape, vocabulary, generator=generator, device=labels_BT.device, dtype=torch.float32
        ).requires_grad_()
        total = F.cross_entropy(
            logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=IGNORE, reduction="sum"
        )
        num_labels = int((labels_BT[:, 1:] != IGNORE).sum())

        def agrees(expected: Tensor, **options) -> bool:
            with torch.autocast(labels_BT.device.type, enabled=False):
                own = loss_function(logits=logits_BTV, labels=labels_BT, vocab_size=vocabulary, **options)
                wanted, found = (torch.autograd.grad(loss, logits_BTV, retain_graph=True) for loss in (expected, own))
            difference = disagreement(self._decoder, expected.detach(), own.detach(), FULL_PRECISION)
            return difference is None and gradients_agree(wanted, found)

        try:
            # Trainers divide the sum of several batches by the number of their labels.
            return agrees(total / num_labels) and agrees(total / 7, num_items_in_batch=torch.tensor(7))
        except FAILURES as error:
            if ran_out_of_memory(error):
                raise
            return False

    def _differentiate(self, loss: Callable[[], Tensor], gradients: list[Tensor]) -> Tensor:
        """Returns a loss, and adds the gradient of the embedded tokens to the list."""
        embedding = self._decoder.get_input_embeddings()
        trial, apart = self._last_layer.running_trial(), without_main_grads(self._decoder)
        with trial, apart, torch.enable_grad(), graph_cut_after(embedding) as embedded:
            result = loss()
            gradients.append(torch.cat(torch.autograd.grad(result, embedded)))
        return result.detach()

    def _trial_loss(self) -> Tensor:
        hidden_CD = self._trial_hidden_states(restricted=False)
        return self._head.losses(hidden_CD * self._trial_scale, self._trial_plan().targets).mean()

    def _own_loss(self) -> Tensor:
        input_ids, labels = trial_batch(self._decoder)
        scaling = self._decoder.get_output_embeddings().register_forward_pre_hook(self._scale)
        try:
            output = self._original_forward(input_ids=input_ids, labels=labels, use_cache=False, return_dict=True)
        finally:
            scaling.remove()
        self._output_type = type(output)
        return output.loss

    def _scale(self, head: nn.Linear, inputs: tuple[Tensor]) -> Tensor:
        with torch.no_grad():
            self._trial_scale = TRIAL_LOGITS / float(F.linear(inputs[0][0], head.weight).std())
        return inputs[0] * self._trial_scale

    def _trial_plan(self) -> RowPlan:
        labels = trial_batch(self._decoder)[1]
        return RowPlan.from_labels(labels).to(labels.device)

    def _trial_hidden_states(self, watch: Watch | None = None, *, restricted: bool = True) -> Tensor:
        inputs = {"input_ids": trial_batch(self._decoder)[0], "use_cache": False}
        return self._hidden_states(inputs, self._trial_plan(), restricted, watch)[1]
