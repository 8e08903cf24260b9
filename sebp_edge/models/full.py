"""Full fine-tuning: every weight of the base model is trained, and the whole model is what is saved."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import Tensor

from sebp_edge.errors import AdapterError, BaseModelMismatch, ModelError
from sebp_edge.models.loading import BaseModel, without_progress_bars


class FullWeights:
    """All weights of the base model, and a copy of what they were."""

    MARKER = "model.safetensors"

    def __init__(self, base: BaseModel):
        if base.in_4bit:
            raise ModelError(
                f"{base.reference.name!r} is in 4 bits, and full fine-tuning needs all of them; load it in 16 bits."
            )
        self.model = base.model
        self._tokenizer = base.tokenizer
        self._before: dict[str, Tensor] = {
            name: parameter.detach().to("cpu", copy=True) for name, parameter in self.model.named_parameters()
        }

    @classmethod
    def fresh(cls, base: BaseModel) -> "FullWeights":
        """Makes every weight trainable."""
        weights = cls(base)
        base.model.requires_grad_(True)
        return weights

    @classmethod
    def saved(cls, base: BaseModel, folder: Path) -> "FullWeights":
        """Loads a whole saved model over the base model's weights.

        Raises:
            BaseModelMismatch: its tensors are not this base model's.
            AdapterError: its file is damaged.

        Either way the base model is left as it was.
        """
        weights = cls(base)
        try:
            load_model(base.model, folder / cls.MARKER)
        except RuntimeError as error:
            weights.detach()
            raise BaseModelMismatch(
                f"The weights in {folder.name!r} were made from another base model than {base.reference.name!r}."
            ) from error
        except (OSError, SafetensorError) as error:
            raise AdapterError(f"The weights in {folder.name!r} are damaged ({type(error).__name__}).") from error
        return weights

    def save(self, folder: Path) -> None:
        """Writes a model folder that transformers loads, in bf16, the format base models come in."""
        # A tied weight has two names in the state, and one here.
        names = {name for name, _ in (*self.model.named_parameters(), *self.model.named_buffers())}
        state = {
            name: value.to(torch.bfloat16) if value.is_floating_point() else value
            for name, value in self.model.state_dict().items()
            if name in names
        }
        with without_progress_bars():
            self.model.save_pretrained(folder, state_dict=state, max_shard_size="1TB")
        config = copy.deepcopy(self.model.config)
        config.dtype = torch.bfloat16
        config.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Within it the base model's own weights are there, and the trained ones wait where those were."""
        exchanged = []
        try:
            for name, parameter in self.model.named_parameters():
                self._exchange(name, parameter)
                exchanged.append((name, parameter))
            yield
        finally:
            for name, parameter in exchanged:
                self._exchange(name, parameter)

    def _exchange(self, name: str, parameter: Tensor) -> None:
        waiting = parameter.detach().to("cpu", copy=True)
        parameter.data.copy_(self._before[name])
        self._before[name] = waiting

    def detach(self) -> None:
        """Puts the base model's own weights back."""
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(self._before[name])
        self.model.requires_grad_(False)
