"""PEFT's plain LoRA layers computed by `lora_linear`: projections of one input together, without PEFT's extra passes.

PEFT stays the owner of parameters, settings and files; a layer that is not plain at the moment it is called (dropout,
DoRA, several, merged or disabled adapters) runs as PEFT runs it.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sebp_edge.models.lora import plain_projection
from sebp_edge.ops import Rows, lora_linear

# Projections that read the same input in transformers' decoders.
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

RowsFor = Callable[[list[nn.Module], Tensor], Rows | None]


class FusedLora:
    """The handle of one model's fused LoRA layers; `remove()` gives them back to PEFT.

    Args:
        model: with PEFT's layers in it.
        rows_for: gives the rows of layers that are computed together.
        alone: a layer that is not computed together with others, if any.
    """

    def __init__(self, model: nn.Module, rows_for: RowsFor, alone: nn.Module | None = None):
        self._layers: list[nn.Module] = []
        for parent in list(model.modules()):
            plain = {name: child for name, child in parent.named_children() if plain_projection(child)}
            together = [name for name, child in plain.items() if child is not alone]
            for names in [*_grouped(together), *((name,) for name in plain if name not in together)]:
                group = _Group([plain[name] for name in names], rows_for)
                for member, layer in enumerate(group.layers):
                    layer.forward = _Member(group, member)
                    self._layers.append(layer)

    def remove(self) -> None:
        """Gives the layers back to PEFT."""
        for layer in self._layers:
            vars(layer).pop("forward", None)
        self._layers = []


def _grouped(names: list[str]) -> list[tuple[str, ...]]:
    present = [tuple(name for name in group if name in names) for group in GROUPS]
    groups = [group for group in present if group]
    return groups + [(name,) for name in names if not any(name in group for group in groups)]


class _Group:
    """Layers that are called one after the other with the same input: the first call computes all of them."""

    def __init__(self, layers: list[nn.Module], rows_for: RowsFor):
        self.layers = layers
        self._rows_for = rows_for
        self._input: tuple[Tensor, bool] | None = None
        self._outputs: dict[int, Tensor] = {}

    def output(self, member: int, x: Tensor) -> Tensor:
        grad = torch.is_grad_enabled()
        known = self._input is not None and self._input[0] is x and self._input[1] == grad
        if not (known and member in self._outputs):
            projections = [plain_projection(layer) for layer in self.layers]
            if not _fits(x, projections):
                return type(self.layers[member]).forward(self.layers[member], x)
            self._input, self._outputs = (x, grad), self._compute(x, projections)
        out = self._outputs.pop(member)
        if not self._outputs:
            self._input = None
        return out

    def _compute(self, x: Tensor, projections: list) -> dict[int, Tensor]:
        return dict(enumerate(lora_linear(x, projections, self._rows_for(self.layers, x))))


def _fits(x: Tensor, projections: list) -> bool:
    return all(p is not None and p.weight.dtype == x.dtype for p in projections) and not torch.is_autocast_enabled(
        x.device.type
    )


class _Member:
    """Stands in for one layer's `forward`."""

    def __init__(self, group: _Group, member: int):
        self.group, self.member = group, member

    def __call__(self, x: Tensor, *args, **kwargs) -> Tensor:
        return self.group.output(self.member, x)
