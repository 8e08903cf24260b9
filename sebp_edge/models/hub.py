"""A Hub id becomes a local folder: from the cache if it is there, from the Hub if it was asked for and is not.

The Hub is contacted for nothing else. `HF_HOME`, `HF_HUB_OFFLINE` and `HF_TOKEN` are obeyed by huggingface_hub.
"""

import errno
import json
import os
from pathlib import Path

from huggingface_hub import (
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RemoteEntryNotFoundError, RepositoryNotFoundError

from sebp_edge.errors import ModelAccessError, ModelError, ModelOfflineError, StorageError
from sebp_edge.models.catalog import ModelReference, bundled_config

# Safetensors only: other weight formats are pickles. Sub-folders hold copies in other formats.
_WANTED = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
_UNWANTED = ["*/*", "consolidated*"]
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def cached_folder(repository: str) -> Path | None:
    """The folder of a model that is in the cache whole, else None."""
    # Not snapshot_download: it misses files that we never want, and some of its versions miss what it has not listed.
    config = try_to_load_from_cache(repository, "config.json")
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    return folder if _has_weights(folder) and has_tokenizer(folder) else None


def folder_at_hand(reference: ModelReference) -> Path | None:
    """The folder of a model that is on this machine whole, else None."""
    if reference.kind == "hub":
        return cached_folder(reference.location)
    folder = Path(reference.location)
    return folder if _has_weights(folder) and has_tokenizer(folder) else None


def has_tokenizer(folder: Path) -> bool:
    """Whether there are a tokenizer's files in a folder."""
    return any((folder / name).is_file() for name in _TOKENIZERS)


def _has_weights(folder: Path) -> bool:
    index = folder / "model.safetensors.index.json"
    try:
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    except FileNotFoundError:
        shards = ["model.safetensors"]
    except (ValueError, LookupError, TypeError, AttributeError, NotADirectoryError):
        return False
    return all((folder / name).is_file() for name in shards)


def config_folder(reference: ModelReference) -> Path:
    """A folder with the model's config.json; of a model that is not cached, only that file is downloaded."""
    cached = cached_folder(reference.location)
    return cached or Path(_contact(reference, hf_hub_download, filename="config.json")).parent


def config_path(reference: ModelReference) -> Path:
    """What says how large a model is: its folder or its config's file. Downloaded only if the model is not known."""
    if reference.kind != "hub":
        return Path(reference.location)
    return cached_folder(reference.location) or bundled_config(reference) or config_folder(reference)


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
    if not _has_weights(folder):
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
        # A question first: it gets its answer, or none, at once, where a download tries again for half a minute.
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
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
    except RemoteEntryNotFoundError as error:
        raise ModelError(f"{name} has no config.json, so transformers cannot load it; choose another.") from error
    except HfHubHTTPError as error:
        raise _refusal(name, error.response.status_code) from error
    except Exception as error:
        # The network's errors differ with the version of huggingface_hub (httpx, httpx2) and with xet.
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise StorageError(f"{name} could not be downloaded: {os.strerror(error.errno)}.") from error
        raise ModelOfflineError(
            f"{name} is not on this machine and the Hub cannot be reached; check the network, "
            "or use the bundled model 'tiny'."
        ) from error


def _refusal(name: str, status: int) -> ModelError:
    if status in (401, 403):
        return ModelAccessError(
            f"The Hub refuses {name} with the token that it was sent (HTTP {status}); log in again with "
            "'hf auth login', or correct HF_TOKEN."
        )
    return ModelOfflineError(
        f"The Hub answers HTTP {status} for {name}; try again later, or use the bundled model 'tiny'."
    )
