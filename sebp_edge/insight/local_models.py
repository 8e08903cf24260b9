"""Lists the base models on this machine: those of Ollama, LM Studio and the Hub's cache, and in given folders."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from sebp_edge.errors import MachineError, ModelError, SebpEdgeError
from sebp_edge.gguf.file import GgufFile
from sebp_edge.machine import devices
from sebp_edge.memory.refusal import refuse_if_too_big
from sebp_edge.models.catalog import CATALOG, ModelReference, resolve
from sebp_edge.models.gguf_base import refuse_unknown
from sebp_edge.models.hub import cached_models, local_folder
from sebp_edge.models.installed import GGUF, list_installed
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


def list_local_models(folders: Iterable[Path] = ()) -> Iterator[LocalModel]:
    """Yields the models that are not known by name.

    Raises:
        ModelError: a folder does not exist.
    """
    device, recipe = devices.pick_device(), Recipe.load("notes")
    known = {entry.repository for entry in CATALOG.values()}
    names = [*(model.name for model in list_installed()), *(name for name in cached_models() if name not in known)]
    for model in [*names, *_models_in(folders)]:
        try:
            reference = resolve(model)
        except ModelError:  # removed meanwhile
            continue
        yield _describe(reference, str(model), recipe, device)


def _models_in(folders: Iterable[Path]) -> list[Path]:
    found = []
    for folder in folders:
        if not folder.is_dir():
            raise ModelError(f"There is no folder {str(folder)!r}; give folders with models.")
        found += [path for path in folder.rglob(f"*{GGUF}") if path.is_file()]
        found += [path.parent for path in folder.rglob("config.json") if any(path.parent.glob("*.safetensors"))]
    return sorted(found)


def _describe(reference: ModelReference, name: str, recipe: Recipe, device: torch.device) -> LocalModel:
    path = local_folder(reference) or Path(reference.location)
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    parameters, licence = None, ""
    try:
        if reference.is_gguf:
            with GgufFile(path, reference.name) as file:
                parameters = sum(tensor.num_weights for tensor in file.tensors.values())
                licence = file.get("general.license", str, "")
                refuse_unknown(file)
        else:
            parameters = model_from_config(reference).num_parameters()
        refuse_if_too_big(reference, recipe, device)
    except SebpEdgeError as error:
        problem = None if isinstance(error, MachineError) else str(error)
        return LocalModel(name, size, _billions(parameters), licence, fits=False, problem=problem)
    return LocalModel(name, size, _billions(parameters), licence, fits=True)


def _billions(parameters: int | None) -> float | None:
    return None if parameters is None else round(parameters / 1e9, 3)
