"""Turns a Hub id into a local folder: the cached one, or else a download.

The Hub is contacted only to download a requested model. huggingface_hub obeys `HF_HOME`, `HF_HUB_OFFLINE` and
`HF_TOKEN`.
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

# Safetensors only: other weight formats are pickles. Subfolders hold copies in other formats.
_WANTED = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
_UNWANTED = ["*/*", "consolidated*"]
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def cached_folder(repository: str) -> Path | None:
    """Returns the cache folder of a model that is cached completely, else None."""
    # Not snapshot_download: it also requires files that are never downloaded here, and some versions need a listing of
    # their own.
    config = try_to_load_from_cache(repository, "config.json")
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    return folder if _has_weights(folder) and has_tokenizer(folder) else None


def cached_models() -> list[str]:
    """Returns the Hub ids of all models that are cached completely; the cache itself if it cannot be listed."""
    try:
        folders = [path.name for path in Path(constants.HF_HUB_CACHE).iterdir() if path.match("models--*--*")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError:
        return [constants.HF_HUB_CACHE]
    ids = sorted(name.removeprefix("models--").replace("--", "/") for name in folders)
    return [repository for repository in ids if cached_folder(repository) is not None]


def local_folder(reference: ModelReference) -> Path | None:
    """Returns the folder, or the GGUF file, of a model that is on this machine completely, else None."""
    if reference.kind == "hub":
        return cached_folder(reference.location)
    if reference.is_gguf:
        return Path(reference.location)
    folder = Path(reference.location)
    return folder if _has_weights(folder) and has_tokenizer(folder) else None


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a tokenizer's files."""
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
    """Returns a folder with the model's config.json; if the model is not cached, downloads only that file."""
    cached = cached_folder(reference.location)
    return cached or Path(_contact(reference, hf_hub_download, filename="config.json")).parent


def config_path(reference: ModelReference) -> Path:
    """Returns the path of a model's folder or config file.

    Downloads the config if the model is neither local nor cached, and its config is not bundled.
    """
    if reference.kind != "hub":
        return Path(reference.location)
    return cached_folder(reference.location) or bundled_config(reference) or config_folder(reference)


def model_folder(reference: ModelReference) -> Path:
    """Returns a folder with the complete model; downloads it if it is not cached.

    Raises:
        ModelAccessError: the repository is gated, private or does not exist.
        ModelOfflineError: it is not cached, and the Hub is unreachable or HF_HUB_OFFLINE is set.
    """
    cached = cached_folder(reference.location)
    if cached is not None:
        return cached
    folder = Path(_contact(reference, snapshot_download, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    if not _has_weights(folder):
        raise ModelError(f"{reference.location} has no weights in the safetensors format; choose another model.")
    return folder


def _contact(reference: ModelReference, download, **options) -> str:
    """Calls `download`; turns each failure into a ModelError or StorageError of one sentence."""
    name = reference.location
    if constants.HF_HUB_OFFLINE:
        raise ModelOfflineError(
            f"{name} is not in the cache ({constants.HF_HUB_CACHE}) and HF_HUB_OFFLINE is set; unset it to download, "
            "or use the bundled model 'tiny'."
        )
    try:
        # A metadata request fails at once, whereas a download retries for half a minute.
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
        raise ModelError(f"{name} has no config.json, so transformers cannot load it; choose another model.") from error
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
            f"The Hub refused access to {name} with the given token (HTTP {status}); log in again with "
            "'hf auth login', or correct HF_TOKEN."
        )
    return ModelOfflineError(
        f"The Hub returned HTTP {status} for {name}; try again later, or use the bundled model 'tiny'."
    )
