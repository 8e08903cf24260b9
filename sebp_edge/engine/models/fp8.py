"""Base models in FP8: layers that hold their weights so."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sebp_edge.ops import Fp8Weight
from sebp_edge.ops.fp8 import ALIGNMENT, common_scale


class Fp8Linear(nn.Linear):
    """A frozen linear layer in FP8, which multiplies in FP8 unless autograd records it.

    `lora_linear` has products in FP8 for both passes.

    Attributes:
        rounds_inputs: whether it multiplies in FP8 at all, rather than by its matrix.
        weight: the codes' bytes [M, K]; integers, so that PEFT leaves adapters in fp32.
    """

    def __init__(self, layer: nn.Linear, scale: float):
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        quantised = Fp8Weight.quantise(layer.weight.detach(), scale)
        self._dtype, self._scale, self.bias = quantised.dtype, scale, layer.bias
        self.weight = nn.Parameter(quantised.codes.view(torch.uint8), requires_grad=False)
        self.rounds_inputs = True

    @property
    def quantised(self) -> Fp8Weight:
        """The weight as products take it."""
        return Fp8Weight(self._dtype, self.weight.view(torch.float8_e4m3fn), self._scale)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or not self.rounds_inputs or x.dtype != self._dtype:
            return F.linear(x, self.quantised.matrix(), self.bias)
        out = x.new_empty(*x.shape[:-1], self.out_features)
        self.quantised.outputs_(out.view(-1, self.out_features), x.reshape(-1, self.in_features))
        return out if self.bias is None else out.add_(self.bias)


@torch.no_grad()
def quantise_(model: nn.Module) -> None:
    """Replaces the layers that FP8 takes, one by one, so that no more memory is used than before.

    Layers side by side get one scale, since those that read the same input are multiplied as one.
    """
    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        layers = {name: each for name, each in parent.named_children() if type(each) is nn.Linear and each is not head}
        layers = {name: layer for name, layer in layers.items() if _takes_fp8(layer)}
        scale = common_scale(layer.weight for layer in layers.values()) if layers else 1.0
        while layers:
            name, layer = layers.popitem()
            setattr(parent, name, Fp8Linear(layer, scale))


@contextmanager
def inputs_as_they_are(model: nn.Module) -> Iterator[None]:
    """Context in which layers in FP8 do not round what they read: next to a half, rounding makes small errors large."""
    layers = [layer for layer in model.modules() if type(layer) is Fp8Linear]
    for layer in layers:
        layer.rounds_inputs = False
    try:
        yield
    finally:
        for layer in layers:
            layer.rounds_inputs = True


def is_in_fp8(model: nn.Module) -> bool:
    """Whether any layer is in FP8."""
    return any(type(layer) is Fp8Linear for layer in model.modules())


def num_left_out(model: nn.Module) -> int:
    """How many linear layers stay as they are, besides the head: tensor cores do not take their matrices."""
    head = model.get_output_embeddings()
    layers = [layer for layer in model.modules() if type(layer) is nn.Linear and layer is not head]
    return sum(not _takes_fp8(layer) for layer in layers)


def _takes_fp8(layer: nn.Linear) -> bool:
    return not any(size % ALIGNMENT for size in layer.weight.shape)
