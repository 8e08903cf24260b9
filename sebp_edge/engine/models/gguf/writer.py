"""A model's tensors and settings under their names in GGUF."""

from collections.abc import Iterator

from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGUFWriter
from torch import Tensor

from sebp_edge.engine.models.gguf.families import FAMILIES, LACKS, SETTINGS, head_size, refusal
from sebp_edge.engine.models.gguf.rotary import add_rope, rope_of, rope_tensors
from sebp_edge.errors import ExportError


class GgufModel:
    """A model of a config in GGUF; raises an ExportError if llama.cpp does not compute it."""

    def __init__(self, config):
        written = [model_type for model_type, family in FAMILIES.items() if family.check is not None]
        if config.model_type not in written:
            raise ExportError(
                f"{config.model_type} models cannot be written as GGUF; these can: {', '.join(written)}. Use --format "
                "merged, or peft."
            )
        self.config, self._family, self._values = config, FAMILIES[config.model_type], config.to_dict()
        self.arch = MODEL_ARCH_NAMES[self._family.arch]
        # Checks the settings before anything is written.
        self.add_settings(GGUFWriter(None, self.arch))

    def name(self, name: str) -> str:
        """Returns a tensor's name in GGUF."""
        found = self._family.other_name(name)
        if found is None:
            raise ExportError(f"GGUF has no name for the weight {name!r} of this {self.config.model_type} model.")
        return found

    def convert(self, name: str, tensor: Tensor) -> Tensor:
        """Converts a tensor of transformers to GGUF's."""
        return self._family.convert(self.name(name), tensor, self._values, back=False)

    def restore(self, name: str, tensor: Tensor) -> Tensor:
        """Converts a tensor of GGUF back to transformers'."""
        return self._family.convert(self.name(name), tensor, self._values, back=True)

    def refuse_adapter(self) -> None:
        """Refuses an adapter alone if GGUF orders a layer's inputs otherwise, or llama.cpp does not adapt a layer."""
        keys, values = (self._values.get(f"linear_num_{kind}_heads") for kind in ("key", "value"))
        if keys != values or self._values.get("hidden_size_per_layer_input"):
            raise ExportError(
                f"An adapter of this {self.config.model_type} model cannot be written as GGUF by itself; use --format "
                "gguf, which merges it, or peft."
            )

    def extra_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields tensors that GGUF has besides the model's own: the factors of rotary frequencies."""
        return rope_tensors(self.config, head_size(self.config))

    @property
    def context_length(self) -> int:
        """The longest text that llama.cpp computes as transformers does: it has no windows in some families."""
        config, lacks_windows = self.config, self._family.arch in (MODEL_ARCH.LLAMA, MODEL_ARCH.PHI3)
        window = (getattr(config, "sliding_window", None) if lacks_windows else None) or config.max_position_embeddings
        return min(window, config.max_position_embeddings)

    def add_settings(self, writer: GGUFWriter) -> None:
        """Writes the model's settings."""
        config, values = self.config, self._values
        for name, what in LACKS.items():
            if values.get(name):
                raise refusal(config, what)
        expected = "gelu_pytorch_tanh" if self.arch.startswith("gemma") else "silu"
        activation = values.get("hidden_activation") or values.get("hidden_act", expected)
        if activation != expected:
            raise refusal(config, f"with the activation {activation}")
        if not add_rope(writer, config, head_size(config)):
            raise refusal(config, f"with its rotary embeddings ({rope_of(config)['rope_type']})")
        values = values | {"max_position_embeddings": self.context_length, "head_dim": head_size(config)}
        values |= self._family.check(writer, config) or {}
        for key, (name, kind, *_) in (SETTINGS | self._family.settings).items():
            _add(writer, key, values[name] if isinstance(values[name], list) else kind(values[name]))


def _add(writer: GGUFWriter, key: str, value: float | list[int]) -> None:
    if isinstance(value, list) and len({*value}) == 1:
        value = value[0]
    kinds = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    kinds[type(value)](f"{writer.arch}.{key}", value)
