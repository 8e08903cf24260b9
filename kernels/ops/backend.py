"""Chooses the implementation of an op: our kernels on NVIDIA GPUs, plain PyTorch everywhere else.

An op names the file of `gpu/` that computes it and calls what it needs there:

    backend.implementation(x, "rms_norm").rms_norm(x, weight_D, eps, offset)

Where kernels do not run this calls `reference.rms_norm`, whose docstring says what both compute. No file of `gpu/` is
imported before its kernels run, so the ops work without Triton. On a GPU where a kernel fails its first trial
(`self_check`), none runs. Tests replace `runs_kernels` to run the kernels in Triton's interpreter.
"""

import functools
import importlib
import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType

import torch
from torch import Tensor

from sebp_edge.basics.flash_attention import HEAD_SIZES, MAX_FLASH_HEAD

from . import reference

logger = logging.getLogger(__name__)

# Whether kernels compute what is tried now; None if nothing is.
_TRIED: ContextVar[bool | None] = ContextVar("tried", default=None)


def implementation(tensor: Tensor, name: str) -> ModuleType:
    """The file `gpu/<name>.py` if our kernels compute with this tensor, else `reference`."""
    return kernels(name) if runs_kernels(tensor) else reference


@functools.cache
def kernels(name: str) -> ModuleType:
    """The file `gpu/<name>.py`, for what only kernels do; most of them need Triton."""
    return importlib.import_module(f".gpu.{name}", __package__)


def runs_kernels(tensor: Tensor) -> bool:
    """Whether our kernels compute with this tensor."""
    return can_run_kernels(tensor) and has_kernels(tensor.device)


def can_run_kernels(tensor: Tensor) -> bool:
    """Whether our kernels are made for this tensor."""
    # torch.compile fuses plain PyTorch itself.
    return not torch.compiler.is_compiling() and tensor.is_cuda and tensor.dtype != torch.float64


def has_kernels(device: torch.device) -> bool:
    """Whether our kernels compute on this GPU: Triton is there, and none of them fails; tries them when first asked."""
    tried = _TRIED.get()
    return has_triton() and (failed_kernels(device) == "" if tried is None else tried)


def failed_kernels(device: torch.device) -> str:
    """The kernels that fail on this GPU, by the names of their files, separated by commas; "" if none does."""
    # It needs the operations, and these need this file.
    can_fail = device.type == "cuda" and has_triton()
    return importlib.import_module(".self_check", __package__).failed(device) if can_fail else ""


@contextmanager
def tried(by_kernels: bool) -> Iterator[None]:
    """Context in which kernels compute, or do not, whatever is known of this GPU."""
    token = _TRIED.set(by_kernels)
    try:
        yield
    finally:
        _TRIED.reset(token)


@functools.cache
def has_triton() -> bool:
    """Whether this machine's GPUs can run our kernels; logs once if they cannot."""
    if torch.version.cuda is None or importlib.util.find_spec("triton") is None:
        logger.info("No Triton for this GPU: the row-sparse operations run in plain PyTorch.")
        return False
    return True


def runs_short_attention(q_AHE: Tensor, k_AGE: Tensor, v_AGE: Tensor) -> bool:
    """Whether our attention kernels can compute with these: where flash attention runs, and heads of some sizes."""
    if not (_runs_attention(q_AHE) and runs_kernels(q_AHE)):
        return False
    return q_AHE.shape[-1] in HEAD_SIZES and all(x.stride(-1) == 1 for x in (q_AHE, k_AGE, v_AGE))


def runs_flash_attention(q_AHE: Tensor) -> bool:
    """Whether torch's flash attention takes these queries: half precision, on an NVIDIA GPU since Ampere."""
    return _runs_attention(q_AHE) and q_AHE.shape[-1] <= MAX_FLASH_HEAD


def _runs_attention(q_AHE: Tensor) -> bool:
    return (
        q_AHE.is_cuda
        and torch.version.cuda is not None
        and q_AHE.dtype in (torch.bfloat16, torch.float16)
        and q_AHE.shape[-1] % 8 == 0
        and torch.cuda.get_device_capability(q_AHE.device) >= (8, 0)
    )
