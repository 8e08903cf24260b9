"""What is trained on a base model, whichever the method: attach it, take its state, save it, take it off again."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from sebp_edge.errors import AdapterError
from sebp_edge.models.architecture import num_parameters
from sebp_edge.models.full import FullWeights
from sebp_edge.models.loading import BaseModel
from sebp_edge.models.lora import LoraAdapter
from sebp_edge.recipe import Recipe

State = dict[str, Tensor]


class Adaptation(Protocol):
    """Trained weights on a base model.

    Attributes:
        model: the model that trains and generates.
    """

    model: nn.Module

    def save(self, folder: Path) -> None:
        """Writes the trained weights into an existing folder, as safetensors."""

    def set_aside(self) -> AbstractContextManager:
        """Within it the model computes what the base model does; afterwards what it did before."""

    def detach(self) -> None:
        """Gives the base model back as it was."""


def attach(base: BaseModel, recipe: Recipe, seed: int) -> Adaptation:
    """Puts fresh trainable weights on `base`, the same ones for the same seed."""
    return LoraAdapter.fresh(base, recipe, seed) if recipe.method == "lora" else FullWeights.fresh(base)


def load(base: BaseModel, folder: Path) -> Adaptation:
    """Puts saved weights on `base`.

    Raises:
        AdapterError: the folder holds no adaptation.
    """
    for kind in (LoraAdapter, FullWeights):
        if (folder / kind.MARKER).is_file():
            return kind.saved(base, folder)
    raise AdapterError(f"{folder.name!r} holds no adapter: neither {LoraAdapter.MARKER} nor {FullWeights.MARKER}.")


def saved_bytes(base: BaseModel, recipe: Recipe) -> int:
    """What the weights of an adaptation will take on the disk."""
    if recipe.method == "full":
        return num_parameters(base.model) * base.dtype.itemsize
    head = base.model.get_output_embeddings()
    adapted = (layer for layer in base.model.modules() if isinstance(layer, nn.Linear) and layer is not head)
    return sum(4 * recipe.settled().r * (layer.in_features + layer.out_features) for layer in adapted)


def trainable(adaptation: Adaptation) -> list[nn.Parameter]:
    """The parameters that are trained."""
    return [parameter for parameter in adaptation.model.parameters() if parameter.requires_grad]


def snapshot(adaptation: Adaptation) -> list[Tensor]:
    """Copies of the trained parameters, on the CPU."""
    return [parameter.detach().to("cpu", copy=True) for parameter in trainable(adaptation)]


def restore(adaptation: Adaptation, state: list[Tensor]) -> None:
    """Puts a snapshot back, bit for bit."""
    for parameter, value in zip(trainable(adaptation), state, strict=True):
        parameter.data.copy_(value)
