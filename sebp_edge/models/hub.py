"""A Hub id becomes a local folder: from the cache if it is there, from the Hub if it was asked for and is not.

The Hub is contacted for nothing else. `HF_HOME`, `HF_HUB_OFFLINE` and `HF_TOKEN` are obeyed by huggingface_hub.
"""

import json
import os
from pathlib import Path

from huggingface_hub import constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

from sebp_edge.errors import ModelAccessError, ModelError, ModelOfflineError, StorageError
from sebp_edge.models.catalog import ModelReference

# Safetensors only: other weight formats are pickles. Sub-folders hold copies in other formats.
_WANTED = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
_UNWANTED = ["*/*", "consolidated*"]


def cached_folder(repository: str) -> Path | None:
    """The folder of a model that is in the cache whole, else None."""
    try:
        folder = Path(snapshot_download(repository, local_files_only=True))
    except (LocalEntryNotFoundError, FileNotFoundError, ValueError):
        return None
    return folder if _is_whole(folder) else None


def _is_whole(folder: Path) -> bool:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    else:
        shards = {"model.safetensors"}
    return all((folder / name).is_file() for name in ("config.json", *shards))


def config_folder(reference: ModelReference) -> Path:
    """A folder with the model's config.json; of a model that is not cached, only that file is downloaded."""
    cached = cached_folder(reference.location)
    return cached or Path(_contact(reference, hf_hub_download, filename="config.json")).parent


def model_folder(reference: ModelReference) -> Path:
    """A folder with the whole model, downloaded if it is not cached.

    Raises:
        ModelAccessError: gated, or no such repository.
        ModelOfflineError: not cached, and offline or unreachable.
    """
    cached = cached_folder(reference.location)
    if cached is not None:
        return cached
    folder = Path(_contact(reference, snapshot_download, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    if not _is_whole(folder):
        raise ModelError(f"{reference.location} has no weights in the safetensors format; choose another model.")
    return folder


def _contact(reference: ModelReference, download, **options) -> str:
    """Calls the Hub, and turns each of its refusals into one sentence."""
    name = reference.location
    if constants.HF_HUB_OFFLINE:
        raise ModelOfflineError(
            f"{name} is not in the cache ({constants.HF_HUB_CACHE}) and HF_HUB_OFFLINE is set; unset it to download, "
            "or use the bundled model 'tiny'."
        )
    try:
        return download(name, **options)
    except GatedRepoError as error:
        alternative = f", or use the open model {reference.open_alternative!r}" if reference.open_alternative else ""
        raise ModelAccessError(
            f"{name} is gated: accept its licence at huggingface.co/{name}, then run 'hf auth login' "
            f"or set HF_TOKEN{alternative}."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelAccessError(
            f"The Hub has no model {name!r}, or it is private; check the name, or log in with 'hf auth login'."
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, ConnectionError) as error:
        raise ModelOfflineError(
            f"{name} is not on this machine and the Hub cannot be reached; check the network, "
            "or use the bundled model 'tiny'."
        ) from error
    except OSError as error:
        if error.errno is None:
            raise ModelOfflineError(f"{name} could not be downloaded; check the network and try again.") from error
        raise StorageError(f"{name} could not be downloaded: {os.strerror(error.errno)}.") from error
