"""Tells without loading a base model whether its files are those of an earlier adaptation; imports no torch."""

from hashlib import blake2b
from pathlib import Path

from sebp_edge.engine.models.hub_cache import local_path
from sebp_edge.values.model_reference import ModelReference

# Parts of each weight file that are read, and their size in bytes.
_NUM_PARTS, _PART = 64, 4096
_OTHERS = ("*.json", "*.model", "*.jinja", "*.txt")


def files_digest(reference: ModelReference) -> str | None:
    """Returns a digest of a model's small files, and of a sample of its weights; None if they are not on this machine.

    The same files have the same digest wherever they are. After loading, `BaseModel.fingerprint` has the last word.
    """
    try:
        path = local_path(reference)
        if path is None:
            return None
        if not path.is_dir():
            return _digest([], [path])
        # Unlike glob, iterdir raises if the folder cannot be listed.
        files = sorted(path.iterdir())
        others = [file for file in files if any(map(file.match, _OTHERS))]
        return _digest(others, [file for file in files if file.match("*.safetensors")])
    except OSError:
        return None


def _digest(whole: list[Path], sampled: list[Path]) -> str:
    digest = blake2b(digest_size=16)
    for path in whole:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode(errors="surrogateescape") + content)
    for path in sampled:
        size = path.stat().st_size
        digest.update(f"weights {size} ".encode())
        with path.open("rb") as file:
            for part in range(_NUM_PARTS):
                file.seek(max(0, size - _PART) * part // (_NUM_PARTS - 1))
                digest.update(file.read(_PART))
    return digest.hexdigest()
