"""Full fine-tuning: every weight of the base model is trained, and the whole model is what is saved."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor, nn

from sebp_edge.errors import BaseModelMismatch, ModelError
from sebp_edge.models.loading import BaseModel, without_progress_bars
from sebp_edge.models.weights import blamed_on_adapter, read_weights, refuse_non_finite


class FullWeights:
    """All weights of the base model, and a copy of what they were."""

    MARKER = "model.safetensors"

    def __init__(self, base: BaseModel):
        if base.in_4bit:
            raise ModelError(
                f"{base.reference.name!r} is in 4 bits, and full fine-tuning needs all of them; load it in 16 bits."
            )
        self.model = base.model
        self._dtype, self._tokenizer = base.dtype, base.tokenizer
        self._before = {name: tensor.to("cpu", copy=True) for name, tensor in _tensors(self.model)}

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
            AdapterError: its file is damaged, or holds NaN.

        Either way the base model is left as it was.
        """
        with blamed_on_adapter(folder):
            found = read_weights(folder / cls.MARKER)
        expected = dict(_tensors(base.model))
        if {name: tensor.shape for name, tensor in found.items()} != {n: t.shape for n, t in expected.items()}:
            raise BaseModelMismatch(
                f"The weights in {folder.name!r} were made from another base model than {base.reference.name!r}."
            )
        refuse_non_finite(found.items(), folder, cls.MARKER)
        weights = cls(base)
        for name, tensor in expected.items():
            tensor.copy_(found[name])
        return weights

    def save(self, folder: Path) -> None:
        """Writes a model folder that transformers loads, in the dtype that was trained: what is loaded on such a device
        is bit for bit what was judged."""
        with without_progress_bars():
            self.model.save_pretrained(
                folder, state_dict=dict(_tensors(self.model)), max_shard_size="1TB", save_original_format=False
            )
        config = copy.deepcopy(self.model.config)
        config.dtype = self._dtype
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
        for name, tensor in _tensors(self.model):
            tensor.copy_(self._before[name])
        self.model.requires_grad_(False)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What is saved of a model, by name: a tied weight, which has two names in the state, has one here."""
    own = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    return ((name, tensor) for name, tensor in model.state_dict().items() if name in own)
