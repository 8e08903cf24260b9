"""Turns a Hub id into a local folder: the cached one, or else a download.

The Hub is contacted only to download a requested model. huggingface_hub obeys `HF_HOME`, `HF_HUB_OFFLINE` and
`HF_TOKEN`.
"""

import errno
import os
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_download, hf_hub_url, snapshot_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RemoteEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from sebp_edge.basics.files import check_free_space, storage_errors
from sebp_edge.engine.models.catalog import bundled_config
from sebp_edge.engine.models.hub_cache import has_weights, local_path, repository_folder
from sebp_edge.errors import ModelAccessError, ModelError, ModelOfflineError, StorageError
from sebp_edge.values.model_reference import ModelReference
from sebp_edge.values.preparation_progress import SECONDS, Progress

# Safetensors only: other weight formats are pickles. Subfolders hold copies in other formats.
_WANTED = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
_UNWANTED = ["*/*", "consolidated*"]


def config_folder(reference: ModelReference) -> Path:
    """Returns a folder with the model's config.json; if the model is not here, downloads only that file."""
    return local_path(reference) or Path(_contact(reference, hf_hub_download, filename="config.json")).parent


def config_path(reference: ModelReference) -> Path:
    """Returns the path of a model's folder or config file; downloads a config that is neither here nor bundled."""
    return local_path(reference) or bundled_config(reference) or config_folder(reference)


def model_folder(reference: ModelReference) -> Path:
    """Returns a folder with the complete model; downloads it if it is not here."""
    if (folder := local_path(reference)) is not None:
        return folder
    folder = Path(_contact(reference, snapshot_download, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    if not has_weights(folder):
        raise ModelError(f"{reference.location} has no weights in the safetensors format; choose another model.")
    return folder


def download(reference: ModelReference, progress: Progress) -> None:
    """Downloads a model unless it is on this machine; goes on with what was downloaded before.

    Raises a StorageError if it does not fit on the disk, and what `model_folder` raises.
    """
    if local_path(reference) is not None:
        return
    files, key = _contact(reference, HfApi().model_info, files_metadata=True).siblings, attrgetter("rfilename")
    wanted = filter_repo_objects(files, allow_patterns=_WANTED, ignore_patterns=_UNWANTED, key=key)
    size, blobs = sum(each.size or 0 for each in wanted), repository_folder(reference.location) / "blobs"
    with storage_errors("Cannot write to", blobs):
        blobs.mkdir(parents=True, exist_ok=True)
        check_free_space("The model", size - _size_of(blobs), blobs)
    progress.begin("downloading", size)
    with ThreadPoolExecutor(1) as pool:
        whole, done = pool.submit(model_folder, reference), 0
        while not wait([whole], SECONDS).done:
            with suppress(FileNotFoundError):  # a file has got its last name
                before, done = done, _size_of(blobs)
                progress.advance(done - before)
    whole.result()
    progress.end()


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _contact(reference: ModelReference, download, **options):
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
    except (AttributeError, LookupError, NameError, TypeError):
        raise  # a mistake, and no news of the network
    except Exception as error:
        # The network's errors differ with the version of huggingface_hub (httpx, httpx2) and with xet.
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise StorageError(f"{name} could not be downloaded: {os.strerror(error.errno)}.") from error
        raise ModelOfflineError(
            f"{name} is not on this machine and the Hub cannot be reached ({type(error).__name__}); check the network, "
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
