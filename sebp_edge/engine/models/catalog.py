"""Resolves a model name to the bundled model, a local folder, a GGUF file, or a Hub id."""

import re
from dataclasses import dataclass
from pathlib import Path

from sebp_edge.basics.files import check_is_utf8
from sebp_edge.engine.models.installed import GGUF, LM_STUDIO, OLLAMA, digest_in_name, find_installed
from sebp_edge.errors import ModelError, suggest
from sebp_edge.values.model_reference import BUNDLED_FOLDER, ModelReference

DEFAULT_MODEL = "tiny"
_CONFIGS = Path(__file__).parent / "configs"
_HUB_ID = re.compile(r"(?!.*(--|\.\.))\w[\w.-]{0,47}/\w[\w.-]{0,95}(?<![.-])", re.ASCII)


@dataclass(frozen=True)
class CatalogEntry:
    """A model known by a short name."""

    repository: str | None  # its Hub id; None for the bundled model
    parameters: float  # in billions
    licence: str
    description: str
    open_alternative: str | None = None  # for a gated model, the short name of an open one of about the same size


CATALOG = {
    "tiny": CatalogEntry(None, 0.008, "Apache-2.0", "bundled; a demonstrator that works offline, not an assistant"),
    "smollm2-135m": CatalogEntry("HuggingFaceTB/SmolLM2-135M", 0.135, "Apache-2.0", "base"),
    "smollm2-135m-instruct": CatalogEntry("HuggingFaceTB/SmolLM2-135M-Instruct", 0.135, "Apache-2.0", "instruct"),
    "smollm2-360m": CatalogEntry("HuggingFaceTB/SmolLM2-360M", 0.362, "Apache-2.0", "base"),
    "smollm2-360m-instruct": CatalogEntry("HuggingFaceTB/SmolLM2-360M-Instruct", 0.362, "Apache-2.0", "instruct"),
    "smollm2-1.7b": CatalogEntry("HuggingFaceTB/SmolLM2-1.7B", 1.711, "Apache-2.0", "base"),
    "smollm2-1.7b-instruct": CatalogEntry("HuggingFaceTB/SmolLM2-1.7B-Instruct", 1.711, "Apache-2.0", "instruct"),
    "qwen3-0.6b": CatalogEntry("Qwen/Qwen3-0.6B", 0.596, "Apache-2.0", "instruct"),
    "qwen3-1.7b": CatalogEntry("Qwen/Qwen3-1.7B", 1.721, "Apache-2.0", "instruct"),
    "qwen3-4b": CatalogEntry("Qwen/Qwen3-4B", 4.022, "Apache-2.0", "instruct"),
    "qwen3.5-0.8b": CatalogEntry("Qwen/Qwen3.5-0.8B", 0.752, "Apache-2.0", "instruct, its text part"),
    "qwen3.5-2b": CatalogEntry("Qwen/Qwen3.5-2B", 1.882, "Apache-2.0", "instruct, its text part"),
    "qwen3.5-4b": CatalogEntry("Qwen/Qwen3.5-4B", 4.206, "Apache-2.0", "instruct, its text part"),
    "qwen3.5-9b": CatalogEntry("Qwen/Qwen3.5-9B", 8.954, "Apache-2.0", "instruct, its text part"),
    "gemma-4-e2b": CatalogEntry("google/gemma-4-E2B", 4.629, "Apache-2.0", "base, its text part"),
    "gemma-4-e2b-instruct": CatalogEntry("google/gemma-4-E2B-it", 4.629, "Apache-2.0", "instruct, its text part"),
    "gemma-4-e4b": CatalogEntry("google/gemma-4-E4B", 7.463, "Apache-2.0", "base, its text part"),
    "gemma-4-e4b-instruct": CatalogEntry("google/gemma-4-E4B-it", 7.463, "Apache-2.0", "instruct, its text part"),
    "lfm2-350m": CatalogEntry("LiquidAI/LFM2-350M", 0.354, "LFM1.0", "instruct"),
    "lfm2-1.2b": CatalogEntry("LiquidAI/LFM2-1.2B", 1.170, "LFM1.0", "instruct"),
    "granite-4.0-350m": CatalogEntry("ibm-granite/granite-4.0-350m", 0.352, "Apache-2.0", "instruct"),
    "granite-4.0-h-350m": CatalogEntry("ibm-granite/granite-4.0-h-350m", 0.340, "Apache-2.0", "instruct"),
    "granite-4.0-micro": CatalogEntry("ibm-granite/granite-4.0-micro", 3.403, "Apache-2.0", "instruct"),
    "granite-4.0-h-micro": CatalogEntry("ibm-granite/granite-4.0-h-micro", 3.191, "Apache-2.0", "instruct"),
    "falcon-h1-0.5b": CatalogEntry("tiiuae/Falcon-H1-0.5B-Base", 0.521, "Falcon-LLM", "base"),
    "falcon-h1-0.5b-instruct": CatalogEntry("tiiuae/Falcon-H1-0.5B-Instruct", 0.521, "Falcon-LLM", "instruct"),
    "llama-3.2-1b": CatalogEntry("meta-llama/Llama-3.2-1B", 1.236, "Llama 3.2", "base, gated", "smollm2-1.7b"),
    "llama-3.2-1b-instruct": CatalogEntry(
        "meta-llama/Llama-3.2-1B-Instruct", 1.236, "Llama 3.2", "instruct, gated", "qwen3-1.7b"
    ),
    "llama-3.2-3b": CatalogEntry("meta-llama/Llama-3.2-3B", 3.213, "Llama 3.2", "base, gated", "qwen3-4b"),
    "llama-3.2-3b-instruct": CatalogEntry(
        "meta-llama/Llama-3.2-3B-Instruct", 3.213, "Llama 3.2", "instruct, gated", "qwen3-4b"
    ),
}


def resolve(model: str | Path) -> ModelReference:
    """Resolves a model's name, without loading anything and without network access."""
    name = str(model)
    entry = None if isinstance(model, Path) else CATALOG.get(name.lower())
    if entry is not None:
        if entry.repository is None:
            return ModelReference(name.lower(), "bundled", str(BUNDLED_FOLDER))
        return ModelReference(name.lower(), "hub", entry.repository, entry.open_alternative)
    if name.startswith((OLLAMA, LM_STUDIO)) and not isinstance(model, Path):
        return ModelReference(name, "installed", str(find_installed(name)))
    if (folder := _existing(name)) is not None:
        check_is_utf8(folder, ModelError)
    is_file = folder is not None and not folder.is_dir()
    if is_file and (folder.suffix.lower() == GGUF or digest_in_name(folder) is not None):
        return ModelReference(folder.name, "gguf", str(folder))
    if is_file:
        raise ModelError(
            f"{name!r} is neither a folder nor a GGUF file; give the folder that has the model's config.json."
        )
    if folder is not None:
        try:
            has_config = (folder / "config.json").is_file()
        except OSError as error:
            raise ModelError(f"The folder {name!r} cannot be opened: {error.strerror}.") from error
        if not has_config:
            raise ModelError(f"The folder {name!r} contains no model; expected a config.json in it.")
        return ModelReference(folder.resolve().name, "local", str(folder))
    if _HUB_ID.fullmatch(name) and not name.lower().endswith(GGUF) and not isinstance(model, Path):
        return ModelReference(name, "hub", name)
    if isinstance(model, Path) or re.search(r"[/\\~]", name) or name.startswith(".") or name.lower().endswith(GGUF):
        what = "GGUF file" if name.lower().endswith(GGUF) else "folder"
        raise ModelError(
            f"There is no {what} {name!r}; expected a folder or GGUF file with a model, a Hub id or a known name."
        )
    raise ModelError(f"Unknown model {name!r}; {suggest(name.lower(), CATALOG)}")


def bundled_config(reference: ModelReference) -> Path | None:
    """Returns the path of a bundled config with a known model's sizes; None for any other model."""
    path = _CONFIGS / f"{reference.name.removesuffix('-instruct')}.json"
    return path if reference.kind == "hub" and path.is_file() else None


def _existing(name: str) -> Path | None:
    """Returns the file or folder of this name, or None."""
    try:
        path = Path(name).expanduser().absolute()
        return path if path.exists() else None
    except (OSError, RuntimeError):
        # The path is too long, or refers to the home of an unknown user.
        return None
