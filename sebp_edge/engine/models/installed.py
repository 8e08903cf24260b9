"""Finds the GGUF files that Ollama and LM Studio have on this machine. Reads their folders; never asks the programs."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sebp_edge.basics.files import read_json, read_text
from sebp_edge.errors import ModelError

GGUF = ".gguf"
OLLAMA, LM_STUDIO = "ollama:", "lmstudio:"
_OLLAMA_NAME = re.compile(
    r"((?P<host>[\w.-]+\.[\w.-]+(:\d+)?)/)?((?P<user>[\w.-]+)/)?(?P<model>[\w.-]+)(:(?P<tag>[\w.-]+))?", re.ASCII
)
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_LAYER = "application/vnd.ollama.image."
# Where Ollama's service keeps models on Linux.
_SERVICE = Path("/usr/share/ollama/.ollama/models")


class Installed(NamedTuple):
    """A model of another program, under the name that --model takes."""

    name: str
    path: Path


def find_installed(name: str) -> Path:
    """Returns the GGUF file of a model of Ollama or LM Studio."""
    return _find_in_ollama(name) if name.startswith(OLLAMA) else _find_in_lm_studio(name)


def list_installed() -> Iterator[Installed]:
    """Yields the models of Ollama and LM Studio; leaves out those that cannot be used."""
    for folder in _ollama_folders():
        for manifest in sorted((folder / "manifests").glob("*/*/*/*")):
            host, user, model, tag = manifest.relative_to(folder / "manifests").parts
            user = "" if (host, user) == ("registry.ollama.ai", "library") else f"{user}/"
            host = "" if host == "registry.ollama.ai" else f"{host}/"
            name = f"{OLLAMA}{host}{user}{model}:{tag}"
            try:
                yield Installed(name, _blob(name, folder, manifest))
            except ModelError:
                continue
    for name, path in _lm_studio_files():
        yield Installed(f"{LM_STUDIO}{name}", path)


def _ollama_folders() -> list[Path]:
    chosen = os.environ.get("OLLAMA_MODELS")
    candidates = [Path(chosen)] if chosen else [_home() / ".ollama" / "models", _SERVICE]
    return [folder for folder in candidates if _is_folder(folder / "manifests")]


def _is_folder(path: Path) -> bool:
    """Whether a path is a folder; False if this user may not know, as in another user's home."""
    with suppress(OSError):
        return path.is_dir()
    return False


def _find_in_ollama(name: str) -> Path:
    parts = _OLLAMA_NAME.fullmatch(name.removeprefix(OLLAMA))
    if parts is None or {".", ".."}.intersection(parts.groupdict().values()):
        raise ModelError(f"{name!r} is no name of an Ollama model; expected for example 'ollama:llama3.2:3b'.")
    host, user, tag = parts["host"] or "registry.ollama.ai", parts["user"] or "library", parts["tag"] or "latest"
    for folder in _ollama_folders():
        manifest = folder / "manifests" / host / user / parts["model"] / tag
        if manifest.is_file():
            return _blob(name, folder, manifest)
    known = [model.name for model in list_installed() if model.name.startswith(OLLAMA)]
    raise ModelError(f"Ollama has no model {name!r} on this machine; {_choices(known)}.")


def _blob(name: str, folder: Path, manifest: Path) -> Path:
    """Returns the file of the model that a manifest describes."""
    try:
        layers = read_json(manifest)["layers"]
        kinds = [layer["mediaType"].removeprefix(_LAYER) for layer in layers]
        digests = [_DIGEST.fullmatch(layer["digest"]) for layer in layers]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"Ollama's manifest of {name!r} is damaged; run ollama pull again.") from error
    for kind, what in (("adapter", "an adapter"), ("projector", "vision layers")):
        if kind in kinds:
            raise ModelError(f"{name!r} has {what}, which cannot be read; choose a plain text model.")
    models = [digest for kind, digest in zip(kinds, digests, strict=True) if kind == "model"]
    if len(models) != 1 or models[0] is None:
        raise ModelError(f"{name!r} is not stored as one GGUF file; choose another model.")
    for separator in "-:":
        path = folder / "blobs" / f"sha256{separator}{models[0][1]}"
        if path.is_file():
            return path
    raise ModelError(f"Ollama's file of {name!r} is missing; run ollama pull again.")


def digest_in_name(path: Path) -> str | None:
    """Returns the SHA-256 that Ollama gave a file as its name; None for other files."""
    digest = _DIGEST.fullmatch(path.name)
    return digest[1] if digest and path.parent.name == "blobs" else None


def _lm_studio_files() -> Iterator[tuple[str, Path]]:
    """Yields "publisher/repository/file" and path of each model."""
    for folder in _lm_studio_folders():
        for path in sorted(folder.glob(f"*/*/*{GGUF}")):
            if path.is_file() and not path.name.startswith("mmproj"):
                yield path.relative_to(folder).as_posix().removesuffix(GGUF), path


def _lm_studio_folders() -> list[Path]:
    homes = [_home() / ".lmstudio", _home() / ".cache" / "lm-studio"]
    with suppress(OSError, ValueError):
        homes.insert(0, Path(read_text(_home() / ".lmstudio-home-pointer", 4096).strip()))
    return list(dict.fromkeys(home / "models" for home in homes if _is_folder(home / "models")))


def _find_in_lm_studio(name: str) -> Path:
    wanted = name.removeprefix(LM_STUDIO).lower().removesuffix(GGUF)
    files = list(_lm_studio_files())
    found = {full: path for full, path in files if wanted in _spellings(full.lower())}
    if len(found) == 1:
        return next(iter(found.values()))
    known = [f"{LM_STUDIO}{full}" for full in found or dict(files)]
    state = "several models" if found else "no model"
    raise ModelError(f"LM Studio has {state} {name!r} on this machine; {_choices(known)}.")


def _spellings(full: str) -> set[str]:
    publisher, repository, file = full.split("/")
    return {full, f"{repository}/{file}", f"{publisher}/{repository}", repository, file}


def _choices(known: list[str]) -> str:
    return f"choose from {', '.join(known[:10])}" if known else "it has none"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # the user has none
        return Path()
