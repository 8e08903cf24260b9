"""Examines this machine: what it has, and what will run on it."""

import importlib.metadata
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import constants

from sebp_edge.basics.units import gigabytes, plural, sizes_apart
from sebp_edge.engine.memory.this_machine import kernels_problem
from sebp_edge.machine import devices
from sebp_edge.machine.host import driver_release
from sebp_edge.ops import backend
from sebp_edge.store.adapter_store import AdapterStore


@dataclass(frozen=True)
class Finding:
    """The result of one check; `problem` says what needs attention, or is None."""

    subject: str
    state: str
    problem: str | None = None


def examine() -> list[Finding]:
    """Checks everything an adaptation depends on; changes nothing and contacts nobody."""
    return [*_versions(), _device(), _driver(), _kernels(), _memory(), _hub_cache(), _adapters()]


def _versions() -> Iterator[Finding]:
    yield Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    names = ("torch", "transformers", "peft", "safetensors", "tokenizers")
    yield Finding("libraries", ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names))


def _device() -> Finding:
    device = devices.pick_device()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability = f"compute capability {properties.major}.{properties.minor}"
        state = f"{properties.name}, {gigabytes(properties.total_memory)}, {capability}"
        no_bf16 = "It has no bf16, so models run in fp32 and take twice the memory."
        return Finding("device", state, no_bf16 if devices.lacks_bf16(device) else None)
    name = "Apple GPU (mps)" if device.type == "mps" else f"CPU, {os.cpu_count()} cores, {torch.get_num_threads()} used"
    return Finding("device", name)


def _driver() -> Finding:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    driver = f"NVIDIA driver {release}" if (release := driver_release()) else "no NVIDIA driver found"
    return Finding("driver", f"torch is built for {build}; {driver}", devices.driver_problem())


def _kernels() -> Finding:
    # Triton's distribution has another name on some systems.
    packages = importlib.metadata.packages_distributions().get("triton")
    triton = f"Triton {importlib.metadata.version(packages[0])} is installed" if packages else "Triton is not installed"
    device = devices.pick_device()
    state = "Triton, checked on this GPU" if device.type == "cuda" and backend.has_kernels(device) else "plain PyTorch"
    return Finding("kernels", f"{state}; {triton}", kernels_problem(device))


def _memory() -> Finding:
    device = devices.pick_device()
    free, total = devices.free_memory(device), devices.total_memory(device)
    return Finding("memory", "{} free of {} on {}".format(*sizes_apart(free, total), device.type))


def _hub_cache() -> Finding:
    folder = Path(constants.HF_HUB_CACHE)
    offline = "; offline mode is on" if constants.HF_HUB_OFFLINE else ""
    count = len(list(folder.glob("models--*"))) if folder.is_dir() else 0
    return Finding("model cache", f"{folder}, {plural(count, 'model')}{offline}", _write_problem(folder))


def _adapters() -> Finding:
    store = AdapterStore()
    return Finding("adapters", f"{store.folder}, {plural(len(store.names()), 'adapter')}", _write_problem(store.folder))


def _write_problem(folder: Path) -> str | None:
    """Why a folder, or its nearest existing parent, cannot be written to; None if it can."""
    try:
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        if free < 1e9:
            return f"It has only {gigabytes(free)} of free disk space."
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"It cannot be written to: {error.strerror}."
