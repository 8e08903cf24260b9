"""Describes the base models on this machine: size, licence, and whether an adaptation fits."""

from dataclasses import dataclass
from pathlib import Path

from sebp_edge.errors import MachineError, SebpEdgeError
from sebp_edge.machine import devices
from sebp_edge.memory.refusal import refuse_if_too_big
from sebp_edge.models.catalog import resolve
from sebp_edge.models.gguf.file import GgufFile
from sebp_edge.models.gguf_base import refuse_unknown
from sebp_edge.models.hub import local_folder
from sebp_edge.models.loading import model_from_config
from sebp_edge.recipe import Recipe


@dataclass(frozen=True)
class LocalModel:
    """A base model on this machine.

    Attributes:
        name: what --model takes.
        size: of its files, in bytes.
        parameters: in billions; None if they are not known.
        licence: what its file says; "" if nothing.
        fits: whether an adaptation with the default recipe fits into the free memory.
        problem: why it cannot be adapted; None if it can.
    """

    name: str
    size: int
    parameters: float | None
    licence: str
    fits: bool
    problem: str | None = None


def describe_model(name: str) -> LocalModel:
    """Describes a model on this machine; loads no weights."""
    size, parameters, licence = 0, None, ""
    try:
        reference = resolve(name)
        path = local_folder(reference) or Path(reference.location)
        files = [path] if path.is_file() else path.glob("*.safetensors")
        size = sum(file.stat().st_size for file in files if file.is_file())  # a link may lead nowhere
        if reference.is_gguf:
            with GgufFile(path, reference.name) as file:
                parameters = sum(tensor.num_weights for tensor in file.tensors.values())
                licence = file.get("general.license", str, "")
                refuse_unknown(file)
        else:
            parameters = model_from_config(reference).num_parameters()
        refuse_if_too_big(reference, Recipe.load("notes"), devices.pick_device())
    except SebpEdgeError as error:
        problem = None if isinstance(error, MachineError) else str(error)
        return LocalModel(name, size, _billions(parameters), licence, fits=False, problem=problem)
    return LocalModel(name, size, _billions(parameters), licence, fits=True)


def _billions(parameters: int | None) -> float | None:
    return None if parameters is None else round(parameters / 1e9, 3)
