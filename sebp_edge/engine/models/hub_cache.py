"""Finds models on this machine, those in the Hub's cache among them; needs neither the Hub's client nor torch."""

import json
import os
from pathlib import Path

from sebp_edge.values.model_reference import ModelReference

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def cache_of_the_hub() -> Path:
    """Returns the folder in which huggingface_hub caches models: it says where by the same environment variables."""
    home = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", f"{home}/huggingface")
    folder = os.environ.get("HF_HUB_CACHE", os.environ.get("HUGGINGFACE_HUB_CACHE", f"{home}/hub"))
    # As the client does, which takes "~nobody" as it is.
    return Path(os.path.expandvars(os.path.expanduser(folder)))  # noqa: PTH111


def repository_folder(repository: str) -> Path:
    """Returns the folder of the cache that has all of a repository."""
    return cache_of_the_hub() / f"models--{repository.replace('/', '--')}"


def cached_folder(repository: str) -> Path | None:
    """Returns the cache folder of a model that is cached completely, else None."""
    cache = repository_folder(repository)
    try:
        revision = (cache / "refs" / "main").read_text(encoding="utf-8")
        folder = cache / "snapshots" / revision
        is_whole = (folder / "config.json").is_file() and has_weights(folder) and has_tokenizer(folder)
    except (OSError, ValueError):
        return None
    return folder if is_whole else None


def local_path(reference: ModelReference) -> Path | None:
    """Returns the folder, or the GGUF file, of a model; None for one of the Hub that is not cached completely."""
    return cached_folder(reference.location) if reference.kind == "hub" else Path(reference.location)


def cached_models() -> list[str]:
    """Returns the Hub ids of all models that are cached completely; the cache itself if it cannot be listed."""
    try:
        folders = [path.name for path in cache_of_the_hub().iterdir() if path.match("models--*--*")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError:
        return [str(cache_of_the_hub())]
    ids = sorted(name.removeprefix("models--").replace("--", "/") for name in folders)
    return [repository for repository in ids if cached_folder(repository) is not None]


def local_folder(reference: ModelReference) -> Path | None:
    """Returns the folder, or the GGUF file, of a model that is on this machine completely, else None."""
    path = local_path(reference)
    is_whole = reference.kind == "hub" or reference.is_gguf or (has_weights(path) and has_tokenizer(path))
    return path if is_whole else None


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a tokenizer's files."""
    return any((folder / name).is_file() for name in _TOKENIZERS)


def has_weights(folder: Path) -> bool:
    index = folder / "model.safetensors.index.json"
    try:
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    except FileNotFoundError:
        shards = ["model.safetensors"]
    except (ValueError, LookupError, TypeError, AttributeError, NotADirectoryError):
        return False
    return all((folder / name).is_file() for name in shards)


def tokenizer_folder(reference: ModelReference) -> Path | None:
    """Returns the folder with the model's own tokenizer; None if it is not on this machine."""
    folder = local_path(reference)
    return folder if folder is not None and has_tokenizer(folder) else None


def has_own_tokenizer(reference: ModelReference) -> bool:
    """Whether the model's own tokenizer is on this machine; else the bundled model's takes its place."""
    return reference.is_gguf or tokenizer_folder(reference) is not None
