"""Patterns N:M, and the linear layers of a model that they prune."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from sebp_edge.errors import OptionError, SparsityError, suggest
from sebp_edge.models.architecture import is_linear
from sebp_edge.models.lora import without_adapter

MAX_M = 32
_PATTERN = re.compile(r"([1-9][0-9]?):([1-9][0-9]?)")


@dataclass(frozen=True)
class Pattern:
    """Of each `m` neighbours in a row of a weight, `n` are kept."""

    n: int
    m: int

    @classmethod
    def parse(cls, text: "str | Pattern") -> "Pattern":
        """Reads "2:4".

        Raises:
            OptionError: it is no pattern with 0 < N < M <= 32.
        """
        if isinstance(text, Pattern):
            return text
        found = _PATTERN.fullmatch(text) if isinstance(text, str) else None
        if found is None or not 0 < int(found[1]) < int(found[2]) <= MAX_M:
            raise OptionError(
                f"The pattern is {str(text)[:40]!r}; expected N:M with N below M and M at most {MAX_M}, such as '2:4'."
            )
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"


def find_layers(model: nn.Module, names: Sequence[str] | None) -> dict[str, nn.Linear]:
    """Returns the linear layers to prune, by name.

    Args:
        names: the last parts of the layers' names, such as "gate_proj"; None for all linear layers but the head.

    Raises:
        SparsityError: the model has no such layers, one name is unknown, or a layer's weight is an embedding too.
    """
    if without_adapter(model) is not model:
        raise SparsityError(
            "An adapter's product with its input is dense, so a pruned model with a LoRA adapter would not be N:M any "
            "more; train all weights instead."
        )
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    exact = {name: layer for name, layer in linear.items() if is_linear(layer)}
    other = next((type(layer).__name__ for layer in linear.values() if not is_linear(layer)), None)
    if other:
        raise SparsityError(f"The model has layers of {other}, whose weights cannot be pruned; load it in 16 bits.")
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    found = {name: layer for name, layer in exact.items() if type(layer) is nn.Linear and layer is not head}
    if names is not None:
        known = sorted({name.rpartition(".")[2] for name in found})
        for name in names:
            if name not in known:
                raise SparsityError(f"The model has no linear layers named {name!r}; {suggest(name, known)}")
        found = {name: layer for name, layer in found.items() if name.rpartition(".")[2] in names}
    if not found:
        raise SparsityError("The model has no linear layers to prune.")
    if any(type(layer.weight) is not nn.Parameter for layer in found.values()):
        raise SparsityError("The model's weights are sharded; prune it on one device, or with DistributedDataParallel.")
    return found


def check_sizes(layers: dict[str, nn.Linear], m: int) -> None:
    """Refuses layers whose rows groups of `m` do not divide.

    Raises:
        SparsityError: the message names the first such layer.
    """
    for name, layer in layers.items():
        if layer.in_features % m:
            raise SparsityError(
                f"The layer {name!r} has {layer.in_features} inputs, which groups of {m} do not divide; choose another "
                "pattern, or leave this layer out."
            )
