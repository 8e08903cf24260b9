"""Identifies base models by the weights in their files, regardless of the precision in which they are loaded.

Models in GGUF files are identified by the whole file: quantised weights are not those of the original model.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from sebp_edge.basics.files import keep, read_kept
from sebp_edge.basics.weights import first_non_finite
from sebp_edge.engine.models.installed import digest_in_name
from sebp_edge.errors import ModelError


def fingerprint(architecture: str, folder: Path) -> str:
    """Hashes the architecture's name, all shapes and a sample of every tensor; returns 32 hexadecimal digits.

    Files in fp32 and in bf16 have the same fingerprint, regardless of their shards, and so has a base model loaded in
    4 bits: an adapter works with either precision (Dettmers et al. 2023 train on 4 bits and deploy on either). Of the
    folder's safetensors weights only the pages with the samples are read, and nothing is kept in memory.
    """
    digest = hashlib.sha256(architecture.encode())
    for _, name, tensor in _tensors(folder):
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        # Samples every tensor: fine-tuned models often share the embedding of their base.
        sample = tensor.flatten()[:: max(1, tensor.numel() // 256)].to(torch.bfloat16)
        digest.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def file_fingerprint(path: Path) -> str:
    """Returns the first 32 digits of a file's SHA-256; reads the file only if it is new or has changed."""
    path = path.resolve()
    if (digest := digest_in_name(path)) is None:
        try:
            state = path.stat()
            key = {"path": str(path), "size": state.st_size, "time": state.st_mtime_ns}
            digest = read_kept("gguf", key)
            if not isinstance(digest, str):
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                keep("gguf", key, digest)
        except OSError as error:
            raise ModelError(f"{path.name!r} cannot be read: {error.strerror}.") from error
    return digest[:32]


def non_finite_tensors(folder: Path) -> Iterator[tuple[str, str]]:
    """Yields the file and the name of each tensor with NaN or infinity; reads all tensors."""
    return ((file, name) for file, name, tensor in _tensors(folder) if first_non_finite([(name, tensor)]) is not None)


def _tensors(folder: Path) -> Iterator[tuple[str, str, Tensor]]:
    """Yields file name, tensor name and memory-mapped tensor, sorted by tensor name."""
    whole = folder / "model.safetensors"
    if whole.is_file():  # transformers prefers it too
        shards = {whole}
    else:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        shards = {folder / name for name in index["weight_map"].values()}
    files = {shard.name: safe_open(shard, framework="pt") for shard in shards}
    holders = {name: file for file in files for name in files[file].keys()}  # noqa: SIM118, not a dict
    for name in sorted(holders):
        yield holders[name], name, files[holders[name]].get_tensor(name)
