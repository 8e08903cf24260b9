"""Finds the base models on this machine: those of Ollama, LM Studio and the Hub's cache, and in given folders."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from sebp_edge.errors import ModelError
from sebp_edge.files import walk
from sebp_edge.models.catalog import CATALOG
from sebp_edge.models.hub import cached_models
from sebp_edge.models.installed import GGUF, list_installed


def find_local_models(folders: Iterable[Path] = ()) -> list[str]:
    """Returns what --model takes for each model that is not in the catalog; reads no model.

    Raises:
        ModelError: a folder does not exist, or cannot be listed.
    """
    known = {entry.repository for entry in CATALOG.values()}
    cached = [repository for repository in cached_models() if repository not in known]
    return [*(model.name for model in list_installed()), *cached, *_models_in(folders)]


def _models_in(folders: Iterable[Path]) -> Iterator[str]:
    for folder in folders:
        if not folder.is_dir():
            raise ModelError(f"There is no folder {str(folder)!r}; give folders with models.")
        try:
            paths = [path for path in walk(folder) if path.is_file()]
        except OSError as error:
            raise ModelError(
                f"The folder {str(error.filename)!r} cannot be listed: {error.strerror}; give folders that can be read."
            ) from error
        with_weights = {path.parent for path in paths if path.suffix == ".safetensors"}
        found = [path for path in paths if path.suffix == GGUF]
        found += [path.parent for path in paths if path.name == "config.json" and path.parent in with_weights]
        yield from map(str, sorted(found))
