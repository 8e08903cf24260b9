"""Level 1, the drop-in: gives every linear layer of a model the sparse backward pass until the handle is removed.

    with sparsify(model):
        loss = model(**batch).loss
        loss.backward()                  # the same gradients, without computing padding

Parameters and files are untouched. PEFT's plain LoRA layers run through one Function each; of PEFT's other layers, the
linear layers inside are replaced. `batch_rows` finds the rows of a batch, `patches.loss` computes the loss.
"""

import inspect
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sebp_edge.engine.models import sharding
from sebp_edge.engine.models.architecture import (
    blocks_of,
    is_activation,
    is_linear,
    is_norm,
    layers_after_attention,
    weight_MK,
)
from sebp_edge.engine.models.lora import adapted_layers, inner_model, refuse_packed_weights
from sebp_edge.engine.sparse.causality import Causality, ends_row_by_row
from sebp_edge.engine.sparse.patches.checkpoints import is_in_checkpoint
from sebp_edge.engine.sparse.patches.fused_lora import FusedLora
from sebp_edge.engine.sparse.patches.last_layer import LastLayer
from sebp_edge.engine.sparse.patches.loss import FusedLoss
from sebp_edge.engine.sparse.patches.patch import Patch, forward_of, has_own_forward
from sebp_edge.engine.sparse.patches.state import ModelState, ends_of
from sebp_edge.engine.sparse.rows.batch_rows import (
    ALL,
    DETECTED,
    BatchRows,
    asks_for_more_outputs,
    decoder_plan,
    decoder_rows,
    encoder_rows,
)
from sebp_edge.engine.sparse.rows.row_plan import RowPlan
from sebp_edge.engine.sparse.rows.row_rule import DroppedRows, RowRule, Selection
from sebp_edge.engine.sparse.verification import UnverifiedRows, VerifiedCalls
from sebp_edge.errors import MachineError, OptionError, SparsityError
from sebp_edge.ops import ActiveRows, Rows, Selector, backend, detect, keep_rows, sparse_linear, sparse_rowwise
from sebp_edge.ops.rows import num_active

# Gathering the rows of a norm or an activation saves time only from this many skipped elements on, and from this many
# skipped rows per active row. Below, the launches on the host or the second forward pass on the GPU cost more.
MIN_SKIPPED_ELEMENTS, MIN_SKIPPED_RATIO = 2**23, 4

RowsToCompute = Literal["exact", "detect"] | RowRule


class Sparsified(Patch):
    """Handle of one sparsified model: a context manager, or call `remove()` when done.

    Attributes:
        layers: the linear layers that have the sparse backward, by name.
    """

    def __init__(self, model: nn.Module, rows: RowsToCompute = "exact", *, keep_logits: bool = False):
        super().__init__()
        self.layers = {name: layer for name, layer in model.named_modules() if is_linear(layer)}
        _refuse(model, self.layers)
        self.model = model
        self._reads_labels = rows == "exact"
        # None if every non-zero row is computed.
        self._selection = _begin(rows, model)
        self._inner = inner_model(model)
        # Layers called outside of the model's forward detect their rows in dL/dY.
        self._call = _Call(DETECTED)
        self._lock = threading.RLock()
        self._last_layer = LastLayer(self._inner, self._running_trial)
        self._fused_lora = FusedLora(model)
        free = [module for module in model.modules() if has_own_forward(module)]
        norms, activations = ([module for module in free if is_one(module)] for is_one in (is_norm, is_activation))
        with self._attaching():
            self._undo.append(self.layers.clear)
            for modules, find_rows in ((norms, self._norm_rows), (activations, self._activation_rows)):
                for module in modules:
                    self._replace(module, _RowwiseForward(module, find_rows))
            for layer in self.layers.values():
                forward = _SparseForward(self, layer)
                # An approximation counts rows on the host, which a compiled graph cannot do.
                self._replace(layer, forward if self._selection is None else torch.compiler.disable(forward))
            self._include(self._fused_lora, self._linear_rows, ungrouped=self._last_layer.query)
            self._include(self._last_layer)
            self._keeps_logits, self._is_wrapped = keep_logits, not has_own_forward(self._inner)
            self._original_forward = forward_of(self._inner)
            self._forward_parameters = list(inspect.signature(self._original_forward).parameters)
            self._replace(self._inner, self._run)
        self._findings: _Findings | None = None

    def dropped(self) -> list[DroppedRows]:
        """Returns what an approximation has dropped so far, by layer; empty for exact rows. Waits for the device."""
        return [] if self._selection is None else self._selection.dropped()

    def row_losses(self, input_ids_BT: Tensor, plan: RowPlan) -> Tensor:
        """The loss of every loss row of a right-padded batch, in nats: fp32 [C]. Rows come from `plan`.

        No attention mask is needed: in a causal model no loss row attends to the padding on its right.

        Args:
            input_ids_BT: int64 token ids, on the model's device.
            plan: the batch's loss rows and targets, on the model's device.

        Raises:
            SparsityError: gradients are recorded, and the model is not causal.
        """
        if torch.is_grad_enabled() and self._causality(self._current_findings()).is_causal is False:
            name = type(self._inner).__name__
            raise SparsityError(f"{name} is not causal: it sees later tokens; expected a causal decoder.")
        logits_CV = self.row_logits(input_ids_BT, plan)
        losses_C = F.cross_entropy(logits_CV, plan.targets, reduction="none")
        if plan.soft_targets is None:
            return losses_C
        ids_CK, shares_CK = plan.soft_targets
        differences_CK = logits_CV.gather(1, plan.targets[:, None]) - logits_CV.gather(1, ids_CK)
        return losses_C + (shares_CK * differences_CK).sum(dim=1)

    def row_logits(self, input_ids_BT: Tensor, plan: RowPlan) -> Tensor:
        """The logits of every loss row of a right-padded batch: fp32 [C, V]; see `row_losses`."""
        with self._calling(_Call(DETECTED, plan)):
            logits_BTV = self.model(input_ids=input_ids_BT, use_cache=False).logits
        return logits_BTV.flatten(0, 1)[plan.loss_rows].float()

    def measure(self, num_rows: int, num_active: int) -> None:
        """Finds the fastest algorithms for batches of `num_rows` rows (batch times time), `num_active` of them active.

        Takes seconds per layer shape; this process and later ones on the same machine then use the results.

        Raises:
            OptionError: `num_active` is below 1 or above `num_rows`.
            MachineError: the model is not on an NVIDIA GPU, or Triton is missing.
        """
        weight = next(layer.weight for layer in self.layers.values())
        if not 0 < num_active <= num_rows:
            raise OptionError(f"num_active is {num_active}; expected 1 to num_rows, which is {num_rows}.")
        if not (weight.is_cuda and backend.has_kernels(weight.device)):
            raise MachineError(
                f"Measuring needs an NVIDIA GPU and working Triton; the model is on {weight.device.type}."
            )
        ids = torch.randperm(num_rows, device=weight.device)[:num_active].sort().values
        shapes = {(layer.in_features, layer.out_features) for layer in self.layers.values()}
        # Imported here because it needs Triton.
        from sebp_edge.ops.measure import measure

        measure(sorted(shapes), [ActiveRows.from_ids(ids, num_rows)], weight.dtype)

    def _run(self, *args, **kwargs):
        """Runs the forward pass with the batch's rows: known from its inputs, or else detected in the backward pass."""
        # Plans and trials run on the host, which would break a compiled graph.
        if not self.layers or torch.compiler.is_compiling():
            return self._original_forward(*args, **kwargs)
        # Layers read the rows of the present call here, so a call from another thread waits.
        with self._lock:
            findings = self._current_findings()
            try:
                if not torch.is_grad_enabled():
                    return self._original_forward(*args, **kwargs)
                return self._run_with_rows(findings, *args, **kwargs)
            finally:
                # Classifiers write down in the first call what they are for.
                findings.state = findings.state or ModelState(self.model, self._inner)

    def _run_with_rows(self, findings: "_Findings", *args, **kwargs):
        loss, inputs = findings.loss, dict(zip(self._forward_parameters, args, strict=False)) | kwargs
        given_plan = self._call.given_plan
        plan = given_plan or decoder_plan(self._inner, inputs)
        if plan is not None and given_plan is None and not all(self._causality(findings)):
            plan = None
        uses_fused_loss = plan is not None and given_plan is None and loss and loss.applies_to(inputs)
        rows = self._batch_rows(findings, inputs, plan)
        if rows is not DETECTED:
            rows = findings.verification.check_unless_verified(rows, self._call_kind(inputs, bool(uses_fused_loss)))
        with (
            self._calling(_Call(rows, given_plan)),
            self._fused_lora.refreshed(),
            self._checking_gradients(findings) as check_outputs,
        ):
            if uses_fused_loss:
                watch = rows.watch if isinstance(rows, UnverifiedRows) else None
                return loss(inputs, plan, only_loss_rows=rows is not DETECTED, watch=watch)
            return check_outputs(self._original_forward(*args, **kwargs))

    def _current_findings(self) -> "_Findings":
        """What was found out about the model, or a new beginning if it has changed since (see `ModelState`)."""
        findings = self._findings
        if findings is None or (findings.state is not None and findings.state.find_change() is not None):
            sharding.refuse_sharding(self.layers.values())
            self._fused_lora.drop_changed()
            self._last_layer.forget_trial()
            findings = self._findings = self._examine()
        return findings

    def _examine(self) -> "_Findings":
        # The first block too, since the output of a frozen embedding gets no gradient.
        first_modules = [*filter(None, ends_of(self._inner)[:1]), *blocks_of(self._inner)[:1]]
        loss = None
        if not self._keeps_logits:
            loss = FusedLoss(self._inner, self._original_forward, self._last_layer, is_wrapped=self._is_wrapped)
        parameters = list(self.model.parameters())
        return _Findings(first_modules, layers_after_attention(self._inner), loss, parameters, VerifiedCalls())

    @contextmanager
    def _calling(self, call: "_Call") -> Iterator[None]:
        """Context in which layers belong to this call."""
        before, self._call = self._call, call
        try:
            yield
        finally:
            self._call = before
            call.inputs.forget()

    def _causality(self, findings: "_Findings") -> Causality:
        """Whether labels determine the rows; tried when it is first needed."""
        if findings.causality is None:
            decoder, forward = self._inner, self._original_forward
            with self._running_trial():
                findings.causality = Causality.from_trial(decoder, forward)
            last_layers = findings.after_attention & {*self.layers.values(), *adapted_layers(self.model)}
            # Another trial, since FSDP frees weights at the end of a backward pass.
            with self._running_trial():
                if not (findings.causality.is_causal and ends_row_by_row(decoder, forward, last_layers)):
                    findings.after_attention = set()
        return findings.causality

    @contextmanager
    def _running_trial(self) -> Iterator[None]:
        """Context for a forward pass of a trial, and its backward pass, which computes all rows."""
        gathered = sharding.staying_gathered(self.model, self._inner)
        with gathered, self._calling(_Call(ALL)), self._fused_lora.refreshed():
            yield

    def _checking_gradients(self, findings: "_Findings") -> AbstractContextManager[Callable]:
        # With a given plan, ours is the only loss.
        if self._call.rows is DETECTED or self._call.given_plan is not None:
            return nullcontext(lambda outputs: outputs)
        return findings.verification.checking_gradients(self._call.rows, findings.first_modules)

    def _call_kind(self, inputs: dict, uses_fused_loss: bool) -> Hashable:
        """Everything that determines which rows carry gradient, except the batch's lengths and labels."""
        device_type = sharding.computing_device(next(self._inner.parameters())).type
        given = frozenset((name, _kind(value)) for name, value in inputs.items() if value is not None)
        is_cast, has_plan = torch.is_autocast_enabled(device_type), self._call.given_plan is not None
        are_trained = tuple(parameter.requires_grad for parameter in self._findings.parameters)
        return given, is_cast, self._inner.training, are_trained, uses_fused_loss, has_plan

    def _batch_rows(self, findings: "_Findings", inputs: dict, plan: RowPlan | None) -> BatchRows:
        if not self._reads_labels or findings.verification.has_failed or asks_for_more_outputs(self._inner, inputs):
            return DETECTED
        if plan is None:
            return encoder_rows(self._inner, inputs)
        if not self._causality(findings).is_causal:
            return DETECTED
        return decoder_rows(plan, inputs.get("attention_mask"))

    def _linear_rows(self, layers: list[nn.Module], x: Tensor) -> Rows | None:
        """The rows of layers that are computed together; detected in the backward pass if `x` has other rows.

        None means all rows.
        """
        num_rows, rows = x.shape[:-1].numel(), self._call.rows
        if rows is ALL or self._last_layer.restricts(layers):
            return None
        # The batch's rows would compile a new graph for each batch, and are gone when a checkpoint recomputes.
        if torch.compiler.is_compiling() or is_in_checkpoint():
            return self._selector(layers)
        if num_rows == rows.num_rows:
            weights = chain.from_iterable(layer.parameters() for layer in layers)
            if isinstance(rows, UnverifiedRows) and not any(each.requires_grad for each in (x, *weights)):
                return None  # the outputs get no gradient
            return rows.linear_rows(after_attention=self._findings.after_attention.issuperset(layers))
        return None if num_rows == rows.num_pooled else self._selector(layers)

    def _selector(self, layers: list[nn.Module]) -> Selector:
        """Returns what selects the rows of layers that are computed together, in the backward pass."""
        return detect if self._selection is None else self._selection.selector(layers)

    def _norm_rows(self, x: Tensor) -> Rows | None:
        """The rows of a norm whose input has the batch's rows; None, which means all rows, for others."""
        rows = self._call.rows
        return rows.up_to_attention if x.shape[:-1].numel() == rows.num_rows and not is_in_checkpoint() else None

    def _activation_rows(self, x: Tensor) -> Rows | None:
        """The rows of an activation after the latest linear layer; None, which means all, for others.

        The order of rows in other inputs (tokens sorted by expert, a sequence's channels) is not known.
        """
        latest, rows = self._call.latest
        return rows if latest() is x else None


@dataclass(eq=False)
class _Findings:
    """What was found out about a model in one state."""

    first_modules: list[nn.Module]  # whose outputs are the first hidden states
    after_attention: set[nn.Module]  # those that work row by row and feed only the head
    loss: FusedLoss | None  # None if the model keeps its own
    parameters: list[nn.Parameter]
    verification: VerifiedCalls
    causality: Causality | None = None  # None before the trial
    state: ModelState | None = None  # None during the first call


class KeptInputs:
    """One copy of an input's active rows for successive linear layers that read it (q, k, v; gate, up).

    Remembers the last input, by identity and without keeping it alive, and what is kept of it.
    """

    def __init__(self):
        self.forget()

    def keep(self, x: Tensor, x_cast: Tensor, rows: Rows) -> Tensor:
        """Returns what a layer's backward pass needs of its input; see `keep_rows`."""
        key = (x._version, x_cast.dtype, id(rows))
        if self._x() is x and self._key == key:
            return self._kept
        kept = keep_rows(x_cast.detach().reshape(-1, x.shape[-1]), rows)
        # Else all of x is kept, without a copy to share; remembered here, it might outlive the graph.
        if not callable(rows):
            self._x, self._key, self._rows, self._kept = weakref.ref(x), key, rows, kept
        return kept

    def forget(self) -> None:
        """Drops all references; after the forward pass, only the graph keeps what it needs."""
        self._x, self._key, self._rows, self._kept = lambda: None, None, None, None


class _Call:
    """One forward pass of the model, perhaps with the plan of a loss other than the model's own."""

    def __init__(self, rows: BatchRows | UnverifiedRows, given_plan: RowPlan | None = None):
        self.rows, self.given_plan, self.inputs = rows, given_plan, KeptInputs()
        # A weak reference to the latest output of a linear layer, and that layer's rows.
        self.latest: tuple[Callable[[], Tensor | None], Rows | None] = (lambda: None, None)


class _RowwiseForward:
    """Replacement of the `forward` of a norm or an activation."""

    def __init__(self, module: nn.Module, find_rows: Callable[[Tensor], Rows | None]):
        self.forward, self.find_rows = forward_of(module), find_rows

    def __call__(self, *args, **kwargs) -> Tensor:
        if len(args) == 1 and not kwargs and not torch.compiler.is_compiling():
            (x,), rows = args, self.find_rows(args[0])
            if isinstance(rows, ActiveRows | slice) and _saves_time(x, rows):
                return sparse_rowwise(self.forward, x, rows)
        return self.forward(*args, **kwargs)


def _saves_time(x: Tensor, rows: ActiveRows | slice) -> bool:
    """Whether skipping the other rows in the backward pass saves time."""
    active = num_active(rows)
    num_skipped = x.shape[:-1].numel() - active
    has_enough = num_skipped * x.shape[-1] >= MIN_SKIPPED_ELEMENTS and num_skipped >= MIN_SKIPPED_RATIO * active
    return x.is_cuda and has_enough


class _SparseForward:
    """Replacement of one linear layer's `forward`."""

    def __init__(self, sparsified: Sparsified, layer: nn.Module):
        self.sparsified, self.layer, self.class_forward = sparsified, layer, type(layer).forward

    def __call__(self, x: Tensor) -> Tensor:
        if type(self.layer).forward is not self.class_forward:
            return type(self.layer).forward(self.layer, x)  # somebody has replaced it for all layers
        handle = self.sparsified
        rows = handle._linear_rows([self.layer], x)
        weight = weight_MK(self.layer)
        if isinstance(weight, sharding.DTensor):
            raise SparsityError(sharding.TENSOR_PARALLEL)
        out = sparse_linear(x, weight, self.layer.bias, rows, handle._call.inputs.keep)
        if not torch.compiler.is_compiling():
            handle._call.latest = weakref.ref(out), rows
        return out


def sparsify(model: nn.Module, rows: RowsToCompute = "exact", *, keep_logits: bool = False) -> Sparsified:
    """Gives every linear layer of `model` the row-sparse backward pass, and large norms and activations whose rows are
    known beforehand.

    Gradients equal the dense ones. Given `labels`, rows are taken from the labels and the attention mask (see
    `sparse.rows.batch_rows`). The first backward pass of each kind of call detects its rows, and verifies that all
    others carry no gradient. If some do, or if the loss is computed outside of the model, every backward pass detects
    the non-zero rows of dL/dY. If a loss on other rows' logits or hidden states is added later, the backward pass
    raises a SparsityError; one that reaches into a layer is not seen then. With SEBP_EDGE_VERIFY=1 in the environment,
    each layer checks in each backward pass that the rows it skips are zero, and raises a RuntimeError if they are not.

    A causal decoder that trains with labels computes its loss without logits, and `outputs.logits` is None. If the
    losses differ on a trial batch, the model keeps its own loss and logs a warning.

    Under torch.compile, rows are detected in the backward pass, on the device, and every model keeps its own loss and
    logits, so that a batch's rows never break the graph. The layers of an approximation run between the graphs.

    Args:
        model: a transformers model, inside PEFT and DistributedDataParallel or not, sharded by `fully_shard` before or
            after this call or not; or any module. The first call with labels runs trials, which all processes must run.
        rows: "exact", as above; "detect", which never uses labels; or an approximation, `TopN`, `Threshold` or
            `Energy` of `sebp_edge.research`, which drops rows that carry gradient and counts them (`dropped()`).
        keep_logits: whether the model computes its own loss and returns logits.

    Raises:
        SparsityError: a linear layer's forward is already replaced (for example, the model is sparsified); or the model
            is in DataParallel, sharded other than by `fully_shard`, or packed in 4 bits for inference.
        OptionError: `rows` is none of these.
    """
    return Sparsified(model, rows, keep_logits=keep_logits)


def _begin(rows: RowsToCompute, model: nn.Module) -> Selection | None:
    """Returns the selection of a rule for a model; None for exact rows."""
    if rows in ("exact", "detect") if isinstance(rows, str) else isinstance(rows, RowRule):
        return None if isinstance(rows, str) else rows.begin(model)
    raise OptionError(
        f"rows={rows!r}; expected 'exact', 'detect', TopN(n), Threshold() or Energy() of sebp_edge.research."
    )


def _refuse(model: nn.Module, layers: dict[str, nn.Module]) -> None:
    refuse_packed_weights(model)
    for name, layer in layers.items():
        if not has_own_forward(layer):
            raise SparsityError(
                f"The forward of {name} is already replaced; sparsify a model once, before other patches."
            )
    for module in model.modules():
        if isinstance(module, nn.DataParallel):
            raise SparsityError(
                "DataParallel is not supported: its replicas would share one layer's weights; use "
                "DistributedDataParallel or a single device."
            )
    sharding.refuse_sharding(model.modules())


def _kind(value) -> Hashable:
    """Returns what of an argument may change which rows carry gradient; a number's value does not."""
    if isinstance(value, Tensor):
        return value.dim()
    return value if isinstance(value, bool | str) else type(value).__name__
