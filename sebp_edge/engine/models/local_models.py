"""Finds the base models on this machine: those of Ollama, LM Studio and the Hub's cache, and in given folders."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from sebp_edge.engine.models.catalog import CATALOG
from sebp_edge.engine.models.hub_cache import cached_models
from sebp_edge.engine.models.installed import GGUF, list_installed
from sebp_edge.errors import ModelError


def find_local_models(folders: Iterable[Path] = ()) -> list[str]:
    """Returns what --model takes for each model that is not in the catalog; reads no model.

    Folders that cannot be listed are among them, since what opens them says why.
    """
    known = {entry.repository for entry in CATALOG.values()}
    cached = [repository for repository in cached_models() if repository not in known]
    return [*(model.name for model in list_installed()), *cached, *_models_in(folders)]


def _models_in(folders: Iterable[Path]) -> Iterator[str]:
    for folder in folders:
        try:
            exists = folder.is_dir()
        except OSError:  # the path is too long
            exists = False
        if not exists:
            raise ModelError(f"There is no folder {str(folder)!r}; give folders with models.")
        found = []
        for name, folders_in_it, files in os.walk(folder, onerror=lambda error: found.append(Path(error.filename))):  # noqa: B023
            found += [Path(name, file) for file in files if file.endswith(GGUF) and Path(name, file).is_file()]
            # A config that is no file makes the folder one that cannot be used, which is said.
            if "config.json" in {*folders_in_it, *files} and any(file.endswith(".safetensors") for file in files):
                found.append(Path(name))
        yield from map(str, sorted(found))
