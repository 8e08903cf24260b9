"""Level 1, the drop-in: every linear layer of a model gets SEBP's backward pass, and gives it back.

    with sparsify(model):
        loss = model(**batch).loss
        loss.backward()                  # the same gradients, without the padding's share of the work

Parameters and files are untouched. PEFT's plain LoRA layers run through one Function each; of others, the linear layers
they are made of.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from sebp_edge.errors import SparsityError
from sebp_edge.models.lora import without_adapter
from sebp_edge.ops import Rows, detect, sparse_linear
from sebp_edge.sparse.fused_lora import FusedLora
from sebp_edge.sparse.rows import RowPlan, is_right_padded
from sebp_edge.sparse.selection import DroppedRows, RowSelection, Selection


class Sparsified:
    """The handle of one sparsified model: a context manager, or `remove()` when done.

    Attributes:
        layers: the linear layers that have the sparse backward, by name.
    """

    def __init__(self, model: nn.Module, rows: RowSelection = "exact"):
        self.model = model
        self._selection = Selection(model, rows)
        self._on_loss_rows = _layers_on_loss_rows(model)
        self._active_rows: Rows = detect
        self._loss_rows: Rows = detect
        self._num_rows: int | None = None
        self._given_plan: RowPlan | None = None
        self.layers = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear}
        for name, layer in self.layers.items():
            if "forward" in vars(layer):
                raise SparsityError(f"{name} already has a replaced forward; sparsify a model once, and before others.")
        for layer in self.layers.values():
            layer.forward = _SparseForward(self, layer)
        self._fused = FusedLora(model, self._rows_for)
        self._hooks = [
            model.register_forward_pre_hook(self._plan_batch, with_kwargs=True),
            model.register_forward_hook(self._forget_batch, always_call=True),
        ]

    def remove(self) -> None:
        """Takes the sparse backward out again; the model is as it was."""
        self._fused.remove()
        for layer in self.layers.values():
            vars(layer).pop("forward", None)
        for hook in self._hooks:
            hook.remove()
        self.layers = {}

    def dropped(self) -> list[DroppedRows]:
        """What an approximation has dropped so far, by layer; empty for exact rows. Waits for the device."""
        return self._selection.dropped()

    def row_losses(self, input_ids_BT: Tensor, plan: RowPlan) -> Tensor:
        """The loss of every loss row of a right-padded batch, in nats: fp32 [C]. Rows come from `plan`.

        No attention mask is needed: causality keeps the padding on the right from every row with a loss.
        """
        self._given_plan = plan
        try:
            logits_BTV = self.model(input_ids=input_ids_BT, use_cache=False).logits
        finally:
            self._given_plan = None
        return F.cross_entropy(logits_BTV.flatten(0, 1)[plan.loss_rows].float(), plan.targets, reduction="none")

    def __enter__(self) -> "Sparsified":
        return self

    def __exit__(self, *exception) -> None:
        self.remove()

    def _plan_batch(self, model, args, kwargs):
        """Reads this batch's rows off the labels where these show them; all others are chosen in the backward pass."""
        plan = None
        if self._selection.reads_labels and not _is_checkpointing(model):
            plan = self._given_plan or self._plan_from_labels(kwargs.get("labels"), kwargs.get("attention_mask"))
        if plan is None:
            self._forget_batch()
        else:
            self._active_rows = plan.active_span or plan.active_rows
            self._loss_rows = plan.loss_span or plan.loss_rows
            self._num_rows = plan.num_rows

    def _plan_from_labels(self, labels: Tensor | None, attention_mask: Tensor | None) -> RowPlan | None:
        if labels is None or labels.dim() != 2 or not _is_causal_decoder(self.model):
            return None
        if attention_mask is not None and (attention_mask.dim() != 2 or not is_right_padded(attention_mask)):
            return None
        return RowPlan.from_labels(labels).to(labels.device)

    def _forget_batch(self, *_):
        # Layers called outside the model's own forward get the rows that their gradient shows.
        self._active_rows, self._loss_rows, self._num_rows = detect, detect, None

    def _rows_for(self, layers: list[nn.Module], x: Tensor) -> Rows:
        """The rows of layers that are computed together; without a plan for these, what chooses them later."""
        if x.shape[:-1].numel() != self._num_rows:
            return self._selection.selector(layers)
        return self._loss_rows if self._on_loss_rows.issuperset(layers) else self._active_rows


class _SparseForward:
    """Stands in for one layer's `forward`."""

    def __init__(self, sparsified: Sparsified, layer: nn.Linear):
        self.sparsified, self.layer = sparsified, layer

    def __call__(self, input: Tensor) -> Tensor:
        rows = self.sparsified._rows_for([self.layer], input)
        return sparse_linear(input, self.layer.weight, self.layer.bias, rows)


def sparsify(model: nn.Module, rows: RowSelection = "exact") -> Sparsified:
    """Puts the row-sparse backward into every `nn.Linear` of `model`.

    Gradients equal the dense ones: for causal decoders given `labels` and padding on the right, the rows come from the
    labels (see `RowPlan`); for everything else (left padding, encoders, losses computed outside), the exactly non-zero
    rows of dL/dY are found in the backward pass. Given `labels`, the loss must be the model's own: one that also looks
    at other rows' logits is not seen. With SEBP_EDGE_VERIFY=1 in the environment, each backward pass checks that what
    is skipped is zero, and raises a RuntimeError if it is not.

    Args:
        model: any; it is changed in place, until `remove()`.
        rows: "exact", as above; "detect", which never looks at labels; or an approximation, `TopN` or `Threshold` of
            `sebp_edge.sparse.selection`, which drops rows that carry gradient and says how many (`dropped()`).

    Raises:
        SparsityError: the model is sparsified already, or there is no such choice of rows.
    """
    return Sparsified(model, rows)


def _layers_on_loss_rows(model: nn.Module) -> set[nn.Module]:
    """The layers whose output has gradient on loss rows only: the head, and the last block's but for keys and values.

    A block without separate projections of keys and values has none.
    """
    decoder = without_adapter(model)
    head = decoder.get_output_embeddings() if hasattr(decoder, "get_output_embeddings") else None
    blocks = getattr(getattr(decoder, "base_model", None), "layers", None)
    found = {head} - {None}
    if not blocks:
        return found
    parts = dict(blocks[-1].named_modules())
    keys_and_values = {name for name in parts if {"k_proj", "v_proj"} & set(name.split("."))}
    if not {"k_proj", "v_proj"} <= {name.split(".")[-1] for name in keys_and_values}:
        return found
    return found | {layer for name, layer in parts.items() if name not in keys_and_values}


def _is_checkpointing(model: nn.Module) -> bool:
    """Whether layers run again in the backward pass, when this batch's rows may be another's already."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def _is_causal_decoder(model: nn.Module) -> bool:
    inner = without_adapter(model)
    # A router's loss looks at every row, whatever its label.
    routed = getattr(inner.config, "output_router_logits", False)
    return type(inner).__name__.endswith(("ForCausalLM", "LMHeadModel")) and not routed
