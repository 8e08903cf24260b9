"""Describes the base models on this machine: size, licence, and whether an adaptation fits."""

from pathlib import Path

from sebp_edge.engine.memory.refusal import refuse_if_too_big
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.gguf.file import GgufFile
from sebp_edge.engine.models.gguf_base import refuse_unknown
from sebp_edge.engine.models.hub_cache import local_folder
from sebp_edge.engine.models.loading import model_from_config
from sebp_edge.errors import MachineError, SebpEdgeError
from sebp_edge.machine import devices
from sebp_edge.recipe import Recipe


def describe_model(name: str) -> dict:
    """Describes a model on this machine; loads no weights.

    Returns:
        The name that --model takes; the size of its files in bytes; its parameters in billions, if known; the licence
        that its file names; whether an adaptation with the default recipe fits into the free memory; and the problem
        that it cannot be adapted for, if there is one.
    """
    known = {"name": name, "size": 0, "parameters": None, "licence": "", "fits": True, "problem": None}
    try:
        reference = resolve(name)
        path = local_folder(reference) or Path(reference.location)
        files = [path] if path.is_file() else path.glob("*.safetensors")
        known["size"] = sum(file.stat().st_size for file in files if file.is_file())  # a link may lead nowhere
        if reference.is_gguf:
            with GgufFile(path, reference.name) as file:
                known["parameters"] = _billions(sum(tensor.num_weights for tensor in file.tensors.values()))
                known["licence"] = file.get("general.license", str, "")
                refuse_unknown(file)
        else:
            known["parameters"] = _billions(model_from_config(reference).num_parameters())
        refuse_if_too_big(reference, Recipe.load("notes"), devices.pick_device())
    except SebpEdgeError as error:
        known |= {"fits": False, "problem": None if isinstance(error, MachineError) else str(error)}
    return known


def _billions(parameters: int) -> float:
    return round(parameters / 1e9, 3)
