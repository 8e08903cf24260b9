"""The base model's weights with an adapter merged in, read a tensor at a time."""

import json
import re
import weakref
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from sebp_edge.basics.weights import WeightsFile, raising_adapter_error, saved_tensors
from sebp_edge.engine.models.full import open_weights
from sebp_edge.engine.models.gguf.file import GgufFile
from sebp_edge.engine.models.gguf.reader import read_weight, shape_of_weight, weight_names
from sebp_edge.engine.models.loading import TEXT_PART
from sebp_edge.engine.models.lora import LoraAdapter, LoraFactors, read_factors
from sebp_edge.errors import BaseModelMismatch, ExportError

Read = Callable[[str], Tensor]


class MergedWeights:
    """A model's weights by name, tied ones once; each is computed when it is read.

    Args:
        model: the base model on "meta".
        adapter_folder: an adapter's folder; None for the base model alone.

    Attributes:
        factors: the adapter's matrices; None for a fully fine-tuned model or the base model alone.
    """

    def __init__(self, model: nn.Module, base_path: Path, adapter_folder: Path | None):
        self._model, self._base_path = model, base_path
        self.shapes = {name: tensor.shape for name, tensor in saved_tensors(model)}
        self.factors: LoraFactors | None = None
        is_lora = adapter_folder is not None and (adapter_folder / LoraAdapter.FILE).is_file()
        if adapter_folder is None or is_lora:
            shapes, self._read = _gguf(base_path) if base_path.is_file() else _safetensors(base_path)
            if any(shapes.get(name) != shape for name, shape in self.shapes.items()):
                self._read = self._refuse
        if is_lora:
            self.factors = read_factors(adapter_folder)
            _refuse_other_layers(self.factors, model, adapter_folder)
        elif adapter_folder is not None:
            with raising_adapter_error(adapter_folder):
                saved = open_weights(adapter_folder)
                saved.refuse_non_finite()
                if saved.shapes != self.shapes:
                    raise BaseModelMismatch(f"The weights in {adapter_folder.name!r} belong to another base model.")
                self._read = saved.read

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of most weights in the files; bf16 for a GGUF file."""
        largest = max(self.shapes, key=lambda name: self.shapes[name].numel())
        return torch.bfloat16 if self._base_path.is_file() else self._read(largest).dtype

    def _refuse(self, name: str) -> Tensor:
        raise ExportError(
            f"The files of this {self._model.config.model_type} model name or shape weights otherwise than "
            "transformers does; only --format peft can be written."
        )

    def of_base(self) -> "MergedWeights":
        """Returns the base model's weights alone."""
        return MergedWeights(self._model, self._base_path, None)

    def read(self, name: str) -> Tensor:
        """Returns a tensor: merged in fp32 if the adapter changes it, else as it is stored."""
        weight = self._read(name)
        if self.factors is None or name not in self.factors.matrices:
            return weight
        lora_A, lora_B = (matrix.float() for matrix in self.factors.matrices[name])
        # Not in place: an fp32 weight is the file's mapped memory.
        return torch.addmm(weight.float(), lora_B, lora_A, alpha=self.factors.scale)


def _gguf(path: Path) -> tuple[dict[str, torch.Size], Read]:
    """Returns the shapes and the reader of a GGUF file, whose tensors are dequantised to fp32."""
    file = GgufFile(path)
    names = weight_names(file)

    def read(name: str) -> Tensor:
        return read_weight(file, names[name], torch.float32)

    weakref.finalize(read, file.close)
    return {name: shape_of_weight(file, own) for name, own in names.items()}, read


def _safetensors(folder: Path) -> tuple[dict[str, torch.Size], Read]:
    """Returns the shapes and the reader of a model's safetensors files, whose tensors stay memory-mapped."""
    whole = folder / "model.safetensors"
    if whole.is_file():
        shards = [whole]
    else:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        shards = [folder / name for name in sorted(set(index["weight_map"].values()))]
    holders = {_of_text(name): (file, name) for file in map(WeightsFile, shards) for name in file.shapes}
    shapes = {own: file.shapes[name] for own, (file, name) in holders.items()}

    def read(own: str) -> Tensor:
        file, name = holders[own]
        return file.stored(name)

    return shapes, read


def _of_text(name: str) -> str:
    """Returns what the text part alone calls a weight."""
    for pattern, own in TEXT_PART.items():
        name = re.sub(pattern, own, name)
    return name


def _refuse_other_layers(factors: LoraFactors, model: nn.Module, folder: Path) -> None:
    """Refuses an adapter of layers that the model does not have, or that do not compute X Wᵀ."""
    layers = {f"{path}.weight": layer for path, layer in model.named_modules() if type(layer) is nn.Linear}
    for name, (lora_A, lora_B) in factors.matrices.items():
        layer = layers.get(name)
        if layer is None or layer.weight.shape != (len(lora_B), lora_A.shape[1]):
            raise BaseModelMismatch(f"The adapter in {folder.name!r} was made for other layers than this model has.")
