"""Refuses damaged or hostile model folders before they cost time or memory."""

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor, nn

from sebp_edge.basics.units import gigabytes
from sebp_edge.basics.weights import first_non_finite
from sebp_edge.engine.models.fingerprint import non_finite_tensors
from sebp_edge.errors import ModelError

# Endings of config keys that count modules. The deepest known model has 126 layers.
_MODULE_COUNTS = ("layer", "layers", "num_labels", "experts")
_MAX_MODULES = 2000
# Models with fewer weights are harmless, whatever their files contain.
_SMALL = 10**7


def refuse_too_many_modules(name: str, config: dict) -> None:
    """Raises a ModelError if a config asks for so many layers or labels that creating them would not end."""
    for key, value in config.items():
        if isinstance(value, dict):
            refuse_too_many_modules(name, value)
        if type(value) is int and key.endswith(_MODULE_COUNTS) and value > _MAX_MODULES:
            raise ModelError(f"The config of {name!r} has {key} {value:.6g}; expected at most {_MAX_MODULES}.")


def refuse_special_files(name: str, folder: Path) -> None:
    """Raises a ModelError if a model's folder has a pipe or a device, since reading it might never end."""
    for path in folder.iterdir():
        if not (path.is_file() or path.is_dir() or (path.is_symlink() and not path.exists())):
            raise ModelError(f"The folder of the model {name!r} contains a pipe or a device: {path.name!r}.")


def refuse_missing_weights(name: str, on_meta: nn.Module, folder: Path) -> None:
    """Raises a ModelError if the files contain far fewer weights than the config would allocate."""
    weights = sum(parameter.numel() for parameter in on_meta.parameters())
    stored = sum(path.stat().st_size for path in folder.iterdir() if path.suffix == ".safetensors" and path.is_file())
    # Even 2-bit weights would take this much.
    if weights > _SMALL and stored < weights / 4:
        raise ModelError(
            f"The model {name!r} cannot be loaded: its config.json has {weights / 1e6:,.1f} million weights, but its "
            f"safetensors files have only {gigabytes(stored)}."
        )


def refuse_non_finite(name: str, model: nn.Module, folder: Path | None = None) -> None:
    """Raises a ModelError that names the first tensor with NaN or infinity."""
    tensor = first_non_finite(_numbers(model))
    if tensor is None:
        return
    file, tensor = next(non_finite_tensors(folder) if folder else iter(()), (None, tensor))
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    where = f" of {file}" if file else f" in {str(dtype).removeprefix('torch.')}"
    raise ModelError(
        f"The model {name!r} contains NaN or infinity, in the tensor {tensor!r}{where}; download it again."
    )


def _numbers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields a model's weights by name, and the scales of those in 4 bits, where NaN shows."""
    for name, parameter in model.named_parameters():
        if getattr(parameter, "is_streamed", False):
            continue  # checked before it moved to the host
        state = getattr(parameter, "quant_state", None)
        yield name, parameter.detach()
        if state is not None:
            yield name, state.absmax
            if state.nested:
                yield name, state.offset
                yield name, state.state2.absmax
