"""Computes PEFT's plain LoRA layers by `lora_linear`: projections of one input as one layer, without extra passes.

PEFT keeps the parameters, settings and files. A layer that is not plain when it is called (dropout, DoRA; several,
merged or disabled adapters) runs PEFT's code, and so does one whose weights are sharded. While layers are fused, the
base weights of a group are stacked in one storage, and each layer's weight is a view of its part. Quantised weights
stay where they are; those of some blocks also have a dequantised copy.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from sebp_edge.engine.models.lora import plain_projection
from sebp_edge.engine.models.sharding import is_sharded
from sebp_edge.engine.sparse.patches.patch import Patch, is_wrapped
from sebp_edge.engine.sparse.patches.state import has_hooks
from sebp_edge.machine.devices import moved_into_gaps, release_memory
from sebp_edge.ops import (
    GatedInputs,
    LoraGroup,
    LoraProjection,
    QuantisedWeight,
    Recompute,
    Rows,
    ScratchBuffer,
    gated_lora_linear,
    lora_linear,
)
from sebp_edge.ops.copies import repeatedly
from sebp_edge.ops.frozen_weights import is_streamed, side_by_side
from sebp_edge.ops.joined_weight import JoinedWeight

# Projections that read the same input in transformers' decoders.
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

RowsFor = Callable[[list[nn.Module], Tensor], Rows | None]
SourceOf = Callable[[Tensor], Recompute | GatedInputs | None]


class FusedLora(Patch):
    """Handle of one model's fused LoRA layers.

    Args:
        dequantised: the blocks whose quantised weights are dequantised once, instead of in each pass.
        joined: whether weights and adapters are copied into one matrix, where our kernels can use it: faster for few
            rows, but a checkpoint would recompute its last product, too.
    """

    def __init__(self, model: nn.Module, dequantised: Iterable[nn.Module] = (), *, joined: bool = False):
        super().__init__()
        self._model, self._joined = model, joined
        self._dequantised = {module for block in dequantised for module in block.modules()}
        self._groups: list[_LayerGroup] = []
        self._refreshed: list[_LayerGroup] = []
        # By the memory that each reads and writes; captured graphs use what they hold until the weights are unstacked.
        self._copiers: dict[tuple[tuple[int, int], ...], Callable[[], None]] = {}

    def attach(
        self,
        rows_for: RowsFor = lambda layers, x: None,
        ungrouped: nn.Module | None = None,
        source_of: SourceOf = lambda x: None,
    ) -> None:
        """Fuses the layers, so that those of a group are computed together, on the rows that `rows_for` returns.

        `source_of` returns what recomputes an input in the backward pass, or None to keep the input.
        """
        scratch = ScratchBuffer()
        for parent in list(self._model.modules()):
            children = ((name, child) for name, child in parent.named_children() if plain_projection(child) is not None)
            plain = {name: child for name, child in children if not (is_wrapped(child) or _needs_its_parts(child))}
            for names in _grouped(plain, ungrouped):
                layers = [plain[name] for name in names]
                dequantised = parent in self._dequantised and not is_streamed(layers[0].base_layer.weight)
                group = _LayerGroup(layers, rows_for, source_of, scratch, dequantised, self._joined)
                self._undo.append(partial(self._unstack, group))
                group.stack()
                self._groups.append(group)
                for member, layer in enumerate(group.layers):
                    self._replace(layer, partial(group.output, member))
                if group.holds_weights:
                    # Otherwise the next group's weights would take a part of the memory that these had before.
                    release_memory(group.stacked.stacked_A.device)

    def free_dequantised(self) -> None:
        """Frees dequantised copies of quantised weights; each pass dequantises them from now on."""
        for group in self._groups:
            group.free_dequantised()

    def drop_changed(self) -> None:
        """Leaves layers to PEFT that were changed since they were fused, so that they cannot be fused any more.

        Layers whose adapter was only switched are compared at every call.
        """
        for group in [group for group in self._groups if any(map(_needs_its_parts, group.layers))]:
            self._unstack(group)

    def _unstack(self, group: "_LayerGroup") -> None:
        # Both keep the stacked weights in memory.
        self._refreshed, self._copiers = [], {}
        self._groups = [other for other in self._groups if other is not group]
        group.unstack()

    @contextmanager
    def refreshed(self) -> Iterator[None]:
        """Copies all adapters once on entry, instead of layer by layer; inside, they must not change.

        On exit, drops the unused outputs of a forward pass that failed.
        """
        current = [group for group in self._groups if group.is_current()]
        if copies := [copy for group in current for copy in group.stacked.copies()]:
            key = tuple((copy.source.data_ptr(), copy.destination.data_ptr()) for copy in copies)
            if key not in self._copiers:
                # Adapters that moved since leave memory behind that only their copiers keep.
                present = {parameter.data_ptr() for parameter in self._model.parameters()}
                kept = {old: run for old, run in self._copiers.items() if present.issuperset(one for one, _ in old)}
                self._copiers = kept | {key: repeatedly(copies)}
            self._copiers[key]()
        self._refreshed = current
        with self.without_refresh():
            yield

    @contextmanager
    def without_refresh(self) -> Iterator[None]:
        """Context that uses the adapters as last copied, to recompute parts of that forward pass."""
        for group in self._refreshed:
            group.is_fresh = True
        try:
            yield
        finally:
            for group in self._refreshed:
                group.is_fresh = False
            for group in self._groups:
                group.forget()


def _needs_its_parts(layer: nn.Module) -> bool:
    """Whether the parts of a PEFT layer must be called, for their hooks or forwards, or to gather their weights.

    Stacked weights of a sharded layer would never be freed.
    """
    parts = [part for part in layer.modules() if part is not layer]
    return is_sharded(layer) or any(has_hooks(part) or is_wrapped(part) for part in parts)


def _grouped(plain: dict[str, nn.Module], ungrouped: nn.Module | None) -> list[tuple[str, ...]]:
    together = [tuple(name for name in group if name in plain and plain[name] is not ungrouped) for group in GROUPS]
    groups = [group for group in together if group and _alike([plain[name] for name in group])]
    return groups + [(name,) for name in plain if not any(name in group for group in groups)]


def _alike(layers: list[nn.Module]) -> bool:
    """Whether these layers can be stacked."""
    projections = [plain_projection(layer) for layer in layers]
    if is_streamed(projections[0].weight) and side_by_side([p.weight for p in projections]) is None:
        return False
    return len({(p.lora_A.shape, p.scaling, type(p.weight), p.weight.dtype, p.lora_A.device) for p in projections}) == 1


class _LayerGroup:
    """Layers that are called in succession with the same input: the first call computes all outputs.

    Attributes:
        stacked: the stacked projections; None before `stack`, and after `unstack`, which leaves the layers to PEFT.
        is_fresh: whether `stacked` is known to match the layers, its copies of the adapters included.
    """

    def __init__(
        self,
        layers: list[nn.Module],
        rows_for: RowsFor,
        source_of: SourceOf,
        scratch: ScratchBuffer,
        dequantised: bool,
        joined: bool,
    ):
        self.layers, self._scratch, self._dequantised, self._joined = layers, scratch, dequantised, joined
        self.is_fresh = False
        self.stacked: LoraGroup | None = None
        self._rows_for, self._source_of = rows_for, source_of
        self._input: tuple[Tensor, bool] | None
        self._outputs: dict[int, Tensor]
        self.forget()

    def stack(self) -> None:
        """Stacks the layers' weights in one storage; a single one may move to where others were."""
        projections = [plain_projection(layer) for layer in self.layers]
        weight = projections[0].weight
        if len(projections) == 1 and isinstance(weight, Tensor) and not is_streamed(weight):
            weight.data = moved_into_gaps(weight.data)
        self._stack(projections)

    def unstack(self) -> None:
        """Moves each layer's weight to its own storage again, unless another handle has stacked it since."""
        if self.stacked is None:
            return
        if self.holds_weights and not is_sharded(self.layers[0]):
            storage = _storage(self.stacked.weight.stacked)
            for layer in self.layers:
                weight = layer.base_layer.weight
                if _storage(weight) == storage:
                    weight.data = weight.data.clone(memory_format=torch.contiguous_format)
        # Frees the stacked weights before the next group's are copied.
        self.stacked = self._projections = None

    @property
    def holds_weights(self) -> bool:
        """Whether the layers' weights are views of a copy."""
        stacked, weight = self.stacked, self.layers[0].base_layer.weight
        if stacked is None or stacked.weight.stacked is None or is_streamed(weight):
            return False
        return len(self.layers) > 1 or isinstance(stacked.joined, JoinedWeight)

    def free_dequantised(self) -> None:
        """Has each pass dequantise its weights."""
        if self._dequantised:
            self.stacked, self._dequantised = None, False
            self.stack()

    def is_current(self) -> bool:
        """Whether `stacked` was made from the layers' present weights and adapters; their values may have changed."""
        projections = [plain_projection(layer) for layer in self.layers]
        return None not in projections and self._key == _key(projections)

    def output(self, member: int, x: Tensor, *args, **kwargs) -> Tensor:
        """The output of one layer, as its `forward` gives it."""
        if torch.compiler.is_compiling():
            # torch.compile fuses PEFT's own layers, whose parts have the sparse backward.
            return type(self.layers[member]).forward(self.layers[member], x)
        grad = torch.is_grad_enabled()
        known = self._input is not None and self._input[0] is x and self._input[1] == grad
        if not (known and member in self._outputs):
            if not self._can_compute(x):
                return type(self.layers[member]).forward(self.layers[member], x)
            source = self._source_of(x)
            if isinstance(source, GatedInputs):
                outputs = (gated_lora_linear(x, source, self.stacked),)
            else:
                outputs = lora_linear(x, self.stacked, self._rows_for(self.layers, x), source)
            self._input, self._outputs = (x, grad), dict(enumerate(outputs))
        out = self._outputs.pop(member)
        if not self._outputs:
            self._input = None
        return out

    def forget(self) -> None:
        """Drops outputs of layers that were not called."""
        self._input, self._outputs = None, {}

    def _can_compute(self, x: Tensor) -> bool:
        """Whether the layers can be computed together for `x` in their present state; if so, updates `stacked`."""
        if self.stacked is None or torch.is_autocast_enabled(x.device.type) or is_sharded(self.layers[0]):
            return False
        return (self.is_fresh or self._try_refresh()) and x.dtype == self.stacked.stacked_A.dtype

    def _try_refresh(self) -> bool:
        projections = [plain_projection(layer) for layer in self.layers]
        if None in projections or len({(p.lora_A.shape[0], p.scaling, p.weight.dtype) for p in projections}) > 1:
            return False
        if self._key != _key(projections):
            self._stack(projections)
        else:
            self.stacked.refresh()
        return True

    @torch.no_grad()
    def _stack(self, projections: list[LoraProjection]) -> None:
        # Tensors made in inference mode could not be trained with later.
        with torch.inference_mode(False):
            options = {"dequantised": self._dequantised, "joined": self._joined}
            self.stacked = LoraGroup.stack(projections, self._scratch, **options)
        # Quantised weights stay where they are, be they dequantised besides or not.
        weight = self.stacked.weight
        if weight.quantised is None:
            for projection, part in zip(projections, weight.stacked.split(weight.columns), strict=True):
                projection.weight.data = part
        self._projections = projections  # as long as they exist, no other tensor has their ids
        self._key = _key(projections)


def _key(projections: list[LoraProjection]) -> tuple:
    """A key that changes if a layer's weight moves or another adapter becomes active."""
    return tuple((_identity(p.weight), _identity(p.bias), id(p.lora_A), id(p.lora_B), p.scaling) for p in projections)


def _storage(weight: Tensor) -> int:
    return weight.untyped_storage().data_ptr()


def _identity(weight: Tensor | QuantisedWeight | None) -> int | tuple[int, ...] | None:
    return weight.data_ptr() if isinstance(weight, Tensor) else getattr(weight, "identity", None)
