"""Full fine-tuning: trains every weight of the base model and saves the whole model."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from sebp_edge.basics.weights import WeightsFile, raising_adapter_error, saved_tensors
from sebp_edge.engine.models.loading import BaseModel, without_progress_bars
from sebp_edge.errors import AdapterError, BaseModelMismatch, ModelError

# The weights of a version that was trained with `[sparsity]` in its recipe, which is not supported any more.
PRUNED = "compressed.safetensors"


class FullWeights:
    """All weights of the base model, with a copy of the original ones on the CPU."""

    FILE = "model.safetensors"

    def __init__(self, base: BaseModel):
        if base.in_4bit:
            raise ModelError(
                f"{base.reference.name!r} is in 4 bits, which full fine-tuning cannot train; load it in 16 bits."
            )
        self.model, self._dtype, self._tokenizer = base.model, base.dtype, base.tokenizer
        self._cpu_weights = {name: tensor.to("cpu", copy=True) for name, tensor in saved_tensors(self.model)}

    @classmethod
    def fresh(cls, base: BaseModel) -> "FullWeights":
        """Makes every weight trainable."""
        weights = cls(base)
        base.model.requires_grad_(True)
        return weights

    @classmethod
    def from_folder(cls, base: BaseModel, folder: Path) -> "FullWeights":
        """Loads a saved model's weights into the base model.

        Raises:
            BaseModelMismatch: its tensors are not this base model's; the base model is unchanged.
            AdapterError: its file is damaged or contains NaN or infinity; the base model is unchanged.
        """
        expected = dict(saved_tensors(base.model))
        with raising_adapter_error(folder):
            saved = open_weights(folder)
            if saved.shapes != {name: tensor.shape for name, tensor in expected.items()}:
                raise BaseModelMismatch(
                    f"The weights in {folder.name!r} belong to a base model other than {base.reference.name!r}."
                )
            saved.refuse_non_finite()
            found = {name: saved.read(name) for name in expected}
        weights = cls(base)
        for name, tensor in expected.items():
            tensor.copy_(found[name])
        return weights

    def save(self, folder: Path) -> None:
        """Writes a model folder in the trained dtype, which transformers loads.

        Loaded on a device of this kind, the model is bit for bit the one that was tested.
        """
        with without_progress_bars():
            self.model.save_pretrained(
                folder, state_dict=dict(saved_tensors(self.model)), max_shard_size="1TB", save_original_format=False
            )
        config = copy.deepcopy(self.model.config)
        config.dtype = self._dtype
        config.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Context in which the model has the base model's weights; the trained ones are on the CPU meanwhile."""
        exchanged = []
        try:
            for name, parameter in self.model.named_parameters():
                self._exchange(name, parameter)
                exchanged.append((name, parameter))
            yield
        finally:
            for name, parameter in exchanged:
                self._exchange(name, parameter)

    without_effect = disabled

    def _exchange(self, name: str, parameter: Tensor) -> None:
        replaced = parameter.detach().to("cpu", copy=True)
        parameter.detach().copy_(self._cpu_weights[name])
        self._cpu_weights[name] = replaced

    def detach(self) -> None:
        """Restores the base model's weights."""
        for name, tensor in saved_tensors(self.model):
            tensor.copy_(self._cpu_weights[name])
        self.model.requires_grad_(False)


def open_weights(folder: Path) -> WeightsFile:
    """Opens a saved model."""
    if (folder / PRUNED).is_file():
        raise AdapterError(
            f"The model in {folder.name!r} is pruned to N:M, which this sebp-edge cannot load; adapt again with "
            "--fresh (fresh=True), or export it with the sebp-edge that saved it."
        )
    return WeightsFile(folder / FullWeights.FILE)
