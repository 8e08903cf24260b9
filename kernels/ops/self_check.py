"""Tries each family of kernels on a few rows before a machine relies on it: against PyTorch in fp64.

A driver, a compiler or a card may be wrong: elsewhere, kernels have returned success and written nothing. So new tensors
are filled with NaN. What was found is kept for this GPU, its driver, the versions of torch and Triton, and the sources of
these operations.
"""

import ctypes
import functools
import hashlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sebp_edge.basics.files import keep, read_kept
from sebp_edge.basics.out_of_memory import ran_out_of_memory

from . import backend, choices, reference
from .adamw import AdamW, Moments, adamw_
from .attention import Scores, sequence_attention_
from .copies import TensorCopy, repeatedly
from .frozen_weights import dequantise
from .gated import ACTIVATIONS, GatedInputs, gated
from .gated_lora_linear import gated_lora_linear
from .linear_cross_entropy import linear_cross_entropy
from .lora_group import LoraGroup, LoraProjection
from .lora_linear import lora_linear
from .move_rows import gather_rows, scatter_rows
from .prune import prune_, shrink_pruned_
from .quantised import FourBits, QuantisedScales, QuantisedWeight
from .rms_norm import rms_norm
from .select_rows import detect, nonzero_rows, row_norms
from .sparse_linear import sparse_linear

logger = logging.getLogger(__name__)


@functools.cache
def failed(device: torch.device) -> str:
    """The families of kernels that fail on this GPU, separated by commas; "" if none does, as it is kept.

    Raises:
        RuntimeError: memory ran out.
    """
    key = conditions(device)
    found = read_kept("kernels", key)
    if not isinstance(found, str):
        dtype = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
        found = ", ".join(try_all(device, dtype))
        keep("kernels", key, found)
    return found


def try_all(device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """Tries all families; yields the names of those that fail."""
    for name, compute in FAMILIES.items():
        results = functools.partial(_results, compute, device)
        try:
            found, plain, truth = results(dtype, True), results(dtype, False), results(torch.float64, False)
            is_right = all(map(_is_as_good, found, plain, truth))
        except Exception as error:
            if ran_out_of_memory(error):
                raise
            logger.info("The kernels of %s raised %s: %s", name, type(error).__name__, error)
            is_right = False
        if not is_right:
            yield name


def _results(compute: Callable, device: torch.device, dtype: torch.dtype, by_kernels: bool) -> list[Tensor]:
    generator, rounded = torch.Generator("cpu").manual_seed(0), torch.bfloat16 if dtype == torch.float64 else dtype

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cpu").to(rounded).to(device, dtype)

    # All in this thread, whatever mode it is in.
    with (
        backend.tried(by_kernels),
        torch.autograd.set_multithreading_enabled(False),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        _FilledWithNan(),
    ):
        return [each.double() for each in compute(draw)]


class _FilledWithNan(TorchDispatchMode):
    """New tensors have NaN in them, integers their largest number, so that what no kernel has written shows."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty):
            out.fill_(torch.nan if out.is_floating_point() else torch.iinfo(out.dtype).max)
        return out


def _is_as_good(found: Tensor, plain: Tensor, truth: Tensor) -> bool:
    """Whether the error is at most twice PyTorch's in the same dtype, plus 1e-4; not of NaN."""
    return bool((found - truth).norm() <= 2 * (plain - truth).norm() + 1e-4 * truth.norm())


def _with_gradients(draw: Callable[..., Tensor], function: Callable, *inputs: Tensor) -> list[Tensor]:
    """The outputs, and the gradients of the inputs for random ones of the outputs."""
    leaves = [each.requires_grad_() for each in inputs]
    outs = function(*leaves)
    outs = [outs] if isinstance(outs, Tensor) else list(outs)
    return outs + list(torch.autograd.grad(outs, leaves, [draw(*out.shape).to(out.dtype) for out in outs]))


# ------------------------------------------------------------------------------------------------------------- families


def _move_rows(draw):
    x = draw(9, 40)
    ids = torch.tensor([1, 2, 6], device=x.device)
    return _with_gradients(draw, lambda x: scatter_rows(gather_rows(x, ids), ids, 9), x)


def _reduce_rows(draw):
    x = draw(9, 40)
    x[3] = 0
    return row_norms(x), nonzero_rows(x)


def _rms_norm(draw):
    return _with_gradients(draw, lambda x, weight: rms_norm(x, weight, 1e-5, 1.0), draw(5, 96), draw(96))


def _rotate(draw):
    q, k, v, cos, sin = draw(9, 4, 64), draw(9, 2, 64), draw(9, 2, 64), draw(9, 64), draw(9, 64)
    kernels, outs = backend.implementation(q, "rotate"), [torch.empty_like(each) for each in (q, k, v)]
    kernels.rotate_gradients(q, k, v, cos, sin, outs)
    kernels.rotate_(q, k, cos, sin)
    return q, k, *outs


def _short_attention(draw):
    states, rotary = (draw(80, 4, 64), draw(80, 2, 64), draw(80, 2, 64)), (draw(80, 64), draw(80, 64))
    starts = torch.tensor([0, 70, 70, 80], dtype=torch.int32, device=rotary[0].device)

    def attend(q, k, v):
        return sequence_attention_(q.clone(), k.clone(), v, starts, 70, Scores(), rotary)

    return _with_gradients(draw, attend, *states)


def _gated(draw):
    for activation in ACTIVATIONS:
        yield from _with_gradients(draw, lambda gate, up: gated(gate, up, activation), draw(5, 40), draw(5, 40))
    yield from _through_a_gate(draw, joined=False)


def _through_a_gate(draw, *, joined: bool):
    weight = draw(48, 64)

    def multiply(gate, up, lora_A, lora_B):
        group = LoraGroup.stack([LoraProjection(weight, None, lora_A, lora_B, 1.5)], joined=joined)
        return gated_lora_linear(gated(gate, up, "silu"), GatedInputs(gate, up, "silu"), group)

    return _with_gradients(draw, multiply, draw(9, 64), draw(9, 64), draw(4, 64), draw(48, 4))


def _cross_entropy(draw):
    hidden, weight = draw(5, 64), draw(70, 64)
    targets = torch.tensor([0, 69, 3, 3, 12], device=hidden.device)
    return _with_gradients(draw, lambda x: linear_cross_entropy(x, weight, targets, softcap=20.0), hidden)


def _two_projections(draw, weights, *, joined: bool):
    def multiply(x, *adapters):
        parts = zip(weights, adapters[::2], adapters[1::2], strict=True)
        group = LoraGroup.stack([LoraProjection(one, None, a, b, 1.5) for one, a, b in parts], joined=joined)
        return lora_linear(x, group)

    return _with_gradients(draw, multiply, draw(9, 64), draw(4, 64), draw(48, 4), draw(4, 64), draw(24, 4))


def _lora(draw):
    return _two_projections(draw, [draw(48, 64), draw(24, 64)], joined=False)


def _joined_lora(draw):
    yield from _two_projections(draw, [draw(48, 64), draw(24, 64)], joined=True)
    yield from _through_a_gate(draw, joined=True)


def _products(draw):
    x, weight, bias, scale = draw(9, 64), draw(48, 64), draw(48), draw(9, 1)
    scale[::2] = 0  # rows without gradient
    return _with_gradients(draw, lambda *layer: sparse_linear(*layer, rows=detect) * scale, x, weight, bias)


def _adamw(draw):
    weight, adamw = draw(600), AdamW.on(draw(1).device, weight_decay=0.1)
    weight = weight.to(torch.bfloat16 if weight.element_size() == 2 else torch.float32)
    moments = Moments.of(weight, in_8_bits=weight.element_size() == 2)
    for _ in range(2):
        adamw.begin_step(0.1)
        adamw_(weight, draw(600).to(weight.dtype), moments, adamw, seed=1)
    if moments.exponents is None:
        return weight, moments.first, moments.second
    codes = zip(moments[:2], moments.exponents, (True, False), strict=True)
    return weight, *(reference.decode(*each) for each in codes)


def _prune(draw):
    weight, pruned = draw(12, 40), draw(12, 40)
    prune_(pruned, weight, 2, 4)
    shrink_pruned_(weight, pruned, 0.1, seed=1, step=1)
    return weight, pruned


def _copies(draw):
    source, destination = draw(7, 48), draw(7, 48)
    repeatedly([TensorCopy(source.float(), destination, 1.5)])()
    return (destination,)


def _in_4_bits(draw, num_outputs: int) -> QuantisedWeight:
    """A weight [num_outputs, 64] of random codes and quantised scales."""
    packed, scales = (draw(size, 1).sigmoid().mul(256).to(torch.uint8) for size in (num_outputs * 32, num_outputs))
    code, scale_code, second = (draw(size).float().tanh() for size in (16, 256, num_outputs))
    code, scales = code.sort().values, scales.flatten()

    def write(out: Tensor) -> None:
        codes = torch.stack([packed >> 4, packed & 15], dim=-1).view(num_outputs, 64).int()
        out.copy_(code[codes] * (scale_code[scales.int()] * second)[:, None])

    four_bits = FourBits(packed, code, scales, 64, QuantisedScales(scale_code, second, torch.zeros_like(code[0]), 1))
    return QuantisedWeight(draw(1).dtype, write, four_bits=four_bits)


def _four_bits(draw):
    weights = [_in_4_bits(draw, 48), _in_4_bits(draw, 24)]
    matrices = [draw(48, 64), draw(24, 64)]
    dequantise(weights, matrices)
    return matrices


def _four_bit_products(draw):
    return _two_projections(draw, [_in_4_bits(draw, 48), _in_4_bits(draw, 24)], joined=True)


FAMILIES = {
    compute.__name__.removeprefix("_"): compute
    for compute in (
        *(_move_rows, _reduce_rows, _rms_norm, _rotate, _short_attention, _gated, _cross_entropy, _lora, _joined_lora),
        *(_products, _adamw, _prune, _copies, _four_bits, _four_bit_products),
    )
}
"""What computes with each file of kernels in `gpu/`."""


# ----------------------------------------------------------------------------------------------------------- conditions


def conditions(device: torch.device) -> dict[str, str]:
    """What a trial's outcome depends on."""
    index = choices.device_index(device)
    major, minor = torch.cuda.get_device_capability(index)
    release = {"capability": f"{major}.{minor}", "release": _driver_release()}
    # What is measured of this machine is the same for each of the driver's releases for a CUDA.
    return choices.machine(index) | release | {"ops": _digest()}


def _driver_release() -> str:
    """The release of NVIDIA's driver; "" without NVML, whose library tells it."""
    release = ctypes.create_string_buffer(96)
    with suppress(OSError):
        nvml = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
        nvml.nvmlInit_v2()
        nvml.nvmlSystemGetDriverVersion(release, len(release))
    return release.value.decode()


def _digest() -> str:
    """A hash of the sources of these operations."""
    folder = Path(__file__).parent
    sources = [each.read_bytes() for each in sorted(folder.rglob("*.py"))]
    return hashlib.sha256(b"\0".join(sources)).hexdigest()
