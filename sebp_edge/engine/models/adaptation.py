"""Attaches, saves, restores and detaches trained weights, whichever the method: LoRA or full fine-tuning."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from sebp_edge.engine.models.architecture import num_parameters
from sebp_edge.engine.models.full import PRUNED, FullWeights
from sebp_edge.engine.models.loading import BaseModel
from sebp_edge.engine.models.lora import LoraAdapter
from sebp_edge.errors import AdapterError
from sebp_edge.recipe import Recipe

# Trained weights on a base model; they share `model`, `save`, `disabled`, `without_effect` and `detach`.
Adaptation = LoraAdapter | FullWeights


def attach(base: BaseModel, recipe: Recipe, seed: int) -> Adaptation:
    """Attaches fresh trainable weights to `base`, the same for the same seed.

    On a CPU, weights may be mapped from files: they are copied first. A file's pages would stay in memory beside copies
    of the weights that a training stacks, and change with the file.
    """
    if base.device.type == "cpu" and not (base.in_4bit or base.reference.is_gguf):
        for tensor in (*base.model.parameters(), *base.model.buffers()):
            if not getattr(tensor, "is_streamed", False):
                tensor.data = tensor.data.clone()
    if recipe.method == "lora":
        return LoraAdapter.fresh(base, recipe, seed)
    return FullWeights.fresh(base)


def load(base: BaseModel, folder: Path) -> Adaptation:
    """Attaches saved weights to `base`."""
    if (folder / LoraAdapter.FILE).is_file():
        return LoraAdapter.from_folder(base, folder)
    if any((folder / name).is_file() for name in (FullWeights.FILE, PRUNED)):
        return FullWeights.from_folder(base, folder)
    expected = f"{LoraAdapter.FILE}, {FullWeights.FILE}"
    raise AdapterError(f"{folder.name!r} contains no adapter; expected one of {expected}.")


def take(adaptation: Adaptation | None, base: BaseModel, folder: Path) -> bool:
    """Takes saved weights into those that are attached, without new layers; returns False if they do not fit."""
    fits = isinstance(adaptation, LoraAdapter) and (folder / LoraAdapter.FILE).is_file()
    return fits and adaptation.take(base, folder)


def read_state(base: BaseModel, folder: Path) -> list[Tensor]:
    """Reads saved weights as a snapshot; `base`, which has no adapter, is unchanged."""
    if (folder / LoraAdapter.FILE).is_file():
        return LoraAdapter.read_state(base, folder)
    adaptation = load(base, folder)
    try:
        return snapshot(adaptation)
    finally:
        adaptation.detach()


def saved_bytes(base: BaseModel, recipe: Recipe) -> int:
    """Returns the size on disk of an adaptation's saved weights, in bytes."""
    if recipe.method == "full":
        return num_parameters(base.model) * base.dtype.itemsize
    head = base.model.get_output_embeddings()
    adapted = (layer for layer in base.model.modules() if isinstance(layer, nn.Linear) and layer is not head)
    return sum(4 * recipe.with_defaults().r * (layer.in_features + layer.out_features) for layer in adapted)


def trainable(adaptation: Adaptation) -> list[nn.Parameter]:
    """Returns the trained parameters."""
    return [parameter for parameter in adaptation.model.parameters() if parameter.requires_grad]


def snapshot(adaptation: Adaptation) -> list[Tensor]:
    """Copies the trained parameters to the CPU."""
    return [parameter.detach().to("cpu", copy=True) for parameter in trainable(adaptation)]


def restore(adaptation: Adaptation, state: list[Tensor]) -> None:
    """Restores a snapshot, bit for bit."""
    for parameter, value in zip(trainable(adaptation), state, strict=True):
        parameter.data.copy_(value)


def save_snapshots(adaptation: Adaptation, snapshots: Mapping[Path, list[Tensor]]) -> None:
    """Writes snapshots into existing folders, as `save` writes the present state, which stays."""
    if isinstance(adaptation, LoraAdapter):
        for folder, state in snapshots.items():
            adaptation.save(folder, state)
        return
    final = snapshot(adaptation) if snapshots else []
    try:
        for folder, state in snapshots.items():
            restore(adaptation, state)
            adaptation.save(folder)
    finally:
        if snapshots:
            restore(adaptation, final)
