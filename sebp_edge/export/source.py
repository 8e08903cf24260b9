"""What is exported: a saved adapter and its base model's files, checked before anything is written."""

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from sebp_edge.engine.models import hub
from sebp_edge.engine.models.fingerprint import file_fingerprint, fingerprint
from sebp_edge.engine.models.loading import local_tokenizer, model_from_config, raising_model_error
from sebp_edge.errors import BaseModelMismatch
from sebp_edge.export.model_weights import MergedWeights
from sebp_edge.store.record import AdapterRecord
from sebp_edge.values.model_reference import ModelReference


@dataclass(frozen=True)
class Source:
    """A saved adapter and its base model.

    Attributes:
        base_path: the base model's folder, or its GGUF file.
        model: the base model on "meta".
        weights: the base model's weights with the adapter merged in.
    """

    name: str
    folder: Path
    record: AdapterRecord
    reference: ModelReference
    base_path: Path
    model: nn.Module
    tokenizer: object
    weights: MergedWeights

    @classmethod
    def open(cls, name: str, folder: Path, record: AdapterRecord, reference: ModelReference) -> "Source":
        """Opens an adapter and its base model, which must be its own; loads no weights."""
        model = model_from_config(reference)
        base_path = hub.model_folder(reference)
        with raising_model_error(reference, "has no weights that can be read"):
            identity = (
                file_fingerprint(base_path) if reference.is_gguf else fingerprint(type(model).__name__, base_path)
            )
        if record.fingerprint != identity:
            raise BaseModelMismatch(
                f"The adapter was made for {record.base_model}, not for these weights of {reference.public_name}; give "
                "the model that it was made for."
            )
        weights = MergedWeights(model, base_path, folder)
        return cls(name, folder, record, reference, base_path, model, local_tokenizer(reference), weights)

    @property
    def config(self):
        """The base model's config."""
        return self.model.config

    @property
    def is_lora(self) -> bool:
        return self.weights.factors is not None

    @property
    def merged_into(self) -> str | None:
        """The weights that a LoRA adapter is merged into, in words; None for a fully fine-tuned model."""
        if not self.is_lora:
            return None
        dtype = "dequantised" if self.reference.is_gguf else str(self.weights.dtype).removeprefix("torch.")
        trained = ", not the 4-bit ones that it was trained on" if self.record.recipe.get("load_in_4bit") else ""
        return f"the {dtype} weights of {self.reference.public_name}{trained}"
