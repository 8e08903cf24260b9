"""Tells base models apart by the weights in their files, in whatever format they are loaded."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from sebp_edge.models.weights import first_non_finite


def fingerprint(architecture: str, folder: Path) -> str:
    """A hash of the architecture's name, all shapes and a sample of all weights; 32 hexadecimal digits.

    Files in fp32 and bf16 have the same one, however they are sharded. So does a base that is loaded in 4 bits: an
    adapter serves a model in either precision (Dettmers et al. 2023 train on 4 bits and deploy on either).

    Args:
        folder: with safetensors weights. Pages of a few samples are read of each tensor, and kept by nobody.
    """
    digest = hashlib.sha256(architecture.encode())
    for _, name, tensor in _tensors(folder):
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        # Of every tensor: fine-tuned models often share their base's embedding.
        sample = tensor.flatten()[:: max(1, tensor.numel() // 256)].to(torch.bfloat16)
        digest.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def non_finite_tensors(folder: Path) -> Iterator[tuple[str, str]]:
    """The file and the name of each tensor with NaN or infinity; all of them are read."""
    for file, name, tensor in _tensors(folder):
        if first_non_finite([(name, tensor)]) is not None:
            yield file, name


def _tensors(folder: Path) -> Iterator[tuple[str, str, Tensor]]:
    """All tensors with their files' names and their own, in these' order; each lies in its file until it is read."""
    whole = folder / "model.safetensors"
    if whole.is_file():  # which transformers prefers too
        shards = {whole}
    else:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        shards = {folder / name for name in index["weight_map"].values()}
    files = {shard.name: safe_open(shard, framework="pt") for shard in shards}
    holders = {name: file for file in files for name in files[file].keys()}  # noqa: SIM118, it is no dict
    for name in sorted(holders):
        yield holders[name], name, files[holders[name]].get_tensor(name)
