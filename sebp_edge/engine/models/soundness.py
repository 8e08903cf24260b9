"""Refuses damaged or hostile model folders before they cost time or memory."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from torch import Tensor, nn
from transformers import PreTrainedModel

from sebp_edge.basics.units import gigabytes
from sebp_edge.basics.weights import first_non_finite
from sebp_edge.engine.models.architecture import blocks_of
from sebp_edge.engine.models.fingerprint import non_finite_tensors
from sebp_edge.errors import ModelError
from sebp_edge.recipe import LEAST_CONTEXT

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


def refuse_too_small_sizes(name: str, model: PreTrainedModel) -> None:
    """Raises a ModelError if a config gives a model no layers, too few positions, or weights without elements."""
    for key, least in (("num_hidden_layers", 1), ("max_position_embeddings", LEAST_CONTEXT)):
        if (value := getattr(model.config, key, None)) is not None and value < least:
            raise ModelError(f"The config of {name!r} has {key} {value}; expected at least {least}.")
    for path, weight in model.named_parameters():
        if not weight.numel():
            raise ModelError(
                f"The config of {name!r} gives the weight {path!r} the shape {list(weight.shape)}; expected positive "
                "sizes."
            )


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


def refuse_other_weights(name: str, model: PreTrainedModel, report: Mapping) -> None:
    """Raises a ModelError if a folder's weights are not those of its config's model.

    Args:
        report: what transformers says of the loading. It draws missing weights, and those of other shapes, at random.
    """
    again = "download the model again"
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"The model {name!r} lacks {len(missing)} of its weight tensors, such as {missing[0]!r}; {again}."
        )
    for weight, found, expected in sorted(report["mismatched_keys"]):
        raise ModelError(
            f"The model {name!r} has {weight!r} of shape {list(found)}, but its config has {list(expected)}; {again}."
        )
    if foreign := sorted(_of_blocks(report["unexpected_keys"], model)):
        raise ModelError(f"The model {name!r} has {foreign[0]!r}, which its config does not have; {again}.")


def _of_blocks(names: Iterable[str], model: nn.Module) -> Iterator[str]:
    """Yields the names of blocks' weights and biases; others are of parts that do not belong to a decoder's texts."""
    first, known = blocks_of(model)[:1], {name for name, _ in model.named_parameters()}
    places = tuple(path.rpartition(".")[0] + "." for path, module in model.named_modules() if module in first)
    for name in names:
        # Older checkpoints have buffers of masks that are called a bias.
        is_bias = name.endswith(".bias") and f"{name.removesuffix('bias')}weight" in known
        if name.startswith(places) and (is_bias or name.endswith(".weight")):
            yield name


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
