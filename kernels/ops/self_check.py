"""Tries each file of kernels on a few rows before they are used on a GPU: against PyTorch in fp64.

A card, its driver or the compiler may fail, and kernels have returned success elsewhere and written nothing. So new
tensors are filled with NaN. What was found is kept for this GPU, its driver, the versions of torch and Triton, and the
sources of these operations.
"""

import functools
import hashlib
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sebp_edge.basics.files import keep, read_kept
from sebp_edge.basics.out_of_memory import ran_out_of_memory
from sebp_edge.machine.devices import pick_dtype, release_memory
from sebp_edge.machine.host import driver_release

from .. import ops
from . import backend, choices, reference
from .copies import TensorCopy, repeatedly
from .frozen_weights import dequantise

logger = logging.getLogger(__name__)

# A third of a compilation is Python, so more threads would only wait for each other.
THREADS = 12


@functools.cache
def failed(device: torch.device) -> str:
    """The files whose kernels fail on this GPU, separated by commas; "" if none do, as it is kept."""
    key = conditions(device)
    found = read_kept("kernels", key)
    if not isinstance(found, str):
        raised = try_all(device, pick_dtype(device))
        found = ", ".join(raised)
        # An error may pass, such as that of a full disk while a kernel is compiled.
        if not any(raised.values()):
            keep("kernels", key, found)
        release_memory(device)
    return found


def try_all(device: torch.device, dtype: torch.dtype) -> dict[str, bool]:
    """The files whose kernels fail, and whether by an error; on a GPU they are compiled before, side by side."""
    if device.type == "cuda":
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(partial(compile_kernels, device, dtype), TRIED))
    found = [(name, *_try(device, dtype, name)) for name in TRIED]
    return {name: raised for name, passes, raised in found if not passes}


def compile_kernels(device: torch.device, dtype: torch.dtype, name: str) -> None:
    """Launches a file's kernels on numbers of no meaning; their errors are raised again where they are tried."""
    with suppress(Exception):
        _results(name, device, dtype, True, _WithoutProducts())


def _try(device: torch.device, dtype: torch.dtype, name: str) -> tuple[bool, bool]:
    """Whether the error of a file's kernels is at most twice PyTorch's in this dtype plus 1e-4; whether they raise."""
    results = partial(_results, name, device)
    try:
        found, plain, truth = results(dtype, True), results(dtype, False), results(torch.float64, False)
        allowed = [2 * (one - true).norm() + 1e-4 * true.norm() for one, true in zip(plain, truth, strict=True)]
        # No comparison with NaN is true.
        return all((one - true).norm() <= most for one, true, most in zip(found, truth, allowed, strict=True)), False
    except Exception as error:
        if ran_out_of_memory(error):
            raise
        logger.info("The kernels of %s raised %s: %s", name, type(error).__name__, error)
        return False, True


def _results(
    name: str, device: torch.device, dtype: torch.dtype, by_kernels: bool, mode: TorchDispatchMode | None = None
) -> list[Tensor]:
    # All in this thread, whatever mode it is in.
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        torch.autograd.set_multithreading_enabled(False),
        torch.cuda.device_of(torch.empty(0, device=device)),
        backend.tried(by_kernels),
        mode or _FilledWithNan(),
    ):
        return [each.double() for each in getattr(_Trial(device, dtype), name)()]


class _FilledWithNan(TorchDispatchMode):
    """New tensors have NaN in them, or 127, so that what no kernel has written shows."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty):
            out.fill_(torch.nan if out.is_floating_point() else 127)
        return out


class _WithoutProducts(TorchDispatchMode):
    """Leaves products out: in each thread, cuBLAS takes a handle for them, and with it 70 MB of the GPU for good."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name not in ("mm", "bmm", "addmm", "baddbmm", "addmm_", "baddbmm_"):
            return func(*args, **kwargs)
        if name.endswith("_") or "out" in kwargs:
            return kwargs.get("out", args[0])
        *_, left, right = (each for each in args if isinstance(each, Tensor))
        dtype = next((each for each in args if isinstance(each, torch.dtype)), left.dtype)
        # Of zeros, no row would have a gradient.
        return left.new_ones(*left.shape[:-1], right.shape[-1], dtype=dtype)


# Those that compile longest come first.
TRIED = (
    *("delta_rule", "short_attention", "joined_lora", "gated", "lora", "products", "four_bit_products"),
    *("short_convolution", "move_rows", "reduce_rows", "rms_norm", "rotate", "cross_entropy", "adamw", "prune"),
    *("copies", "four_bits"),
)


class _Trial:
    """Computes with what each file of `gpu/` is for, on random numbers that are the same in all dtypes."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype, self._generator = device, dtype, torch.Generator("cpu").manual_seed(0)

    def draw(self, *size: int) -> Tensor:
        numbers = torch.randn(size, generator=self._generator, device="cpu")
        return (numbers.bfloat16() if self.dtype != torch.float16 else numbers.half()).to(self.device, self.dtype)

    def with_gradients(self, function: Callable, *sizes: tuple[int, ...]) -> list[Tensor]:
        """The outputs for random inputs, and the inputs' gradients for random ones of the outputs."""
        inputs = [self.draw(*size).requires_grad_() for size in sizes]
        outs = function(*inputs)
        outs = [outs] if isinstance(outs, Tensor) else list(outs)
        douts = [self.draw(*out.shape).to(out.dtype) for out in outs]
        return [*outs, *torch.autograd.grad(outs, inputs, douts)]

    def move_rows(self) -> Iterable[Tensor]:
        ids = torch.tensor([1, 2, 6], device=self.device)
        return self.with_gradients(lambda x: ops.scatter_rows(ops.gather_rows(x, ids), ids, 9), (9, 40))

    def reduce_rows(self) -> Iterable[Tensor]:
        x = self.draw(9, 40)
        x[3] = 0
        return ops.row_norms(x), ops.nonzero_rows(x)

    def rms_norm(self) -> Iterable[Tensor]:
        return self.with_gradients(lambda x, weight: ops.rms_norm(x, weight, 1e-5, 1.0), (5, 96), (96,))

    def rotate(self) -> Iterable[Tensor]:
        q, k, v, cos, sin = (self.draw(9, *size) for size in ((4, 64), (2, 64), (2, 64), (64,), (64,)))
        kernels, outs = backend.implementation(q, "rotate"), [torch.empty_like(each) for each in (q, k, v)]
        kernels.rotate_gradients(q, k, v, cos, sin, outs)
        kernels.rotate_(q, k, cos, sin)
        return q, k, *outs

    def short_attention(self) -> Iterable[Tensor]:
        starts = torch.tensor([0, 70, 70, 80], dtype=torch.int32, device=self.device)
        rotary = self.draw(80, 64), self.draw(80, 64)

        def attend(q, k, v):
            return ops.sequence_attention_(q.clone(), k.clone(), v, starts, 70, ops.Scores(), rotary)

        return self.with_gradients(attend, (80, 4, 64), (80, 2, 64), (80, 2, 64))

    def gated(self) -> Iterable[Tensor]:
        for activation in ops.ACTIVATIONS:
            yield from self.with_gradients(partial(ops.gated, activation=activation), (5, 40), (5, 40))
        yield from self._through_a_gate(joined=False)

    def cross_entropy(self) -> Iterable[Tensor]:
        weight, targets = self.draw(70, 64), torch.tensor([0, 69, 3, 3, 12], device=self.device)
        return self.with_gradients(lambda x: ops.linear_cross_entropy(x, weight, targets, softcap=20.0), (5, 64))

    def lora(self) -> Iterable[Tensor]:
        return self._by_two_weights([self.draw(48, 64), self.draw(24, 64)], joined=False)

    def joined_lora(self) -> Iterable[Tensor]:
        yield from self._by_two_weights([self.draw(48, 64), self.draw(24, 64)], joined=True)
        yield from self._through_a_gate(joined=True)

    def products(self) -> Iterable[Tensor]:
        scale = self.draw(9, 1)
        scale[::2] = 0  # rows without gradient
        layer = partial(ops.sparse_linear, rows=ops.detect)
        return self.with_gradients(lambda *inputs: layer(*inputs) * scale, (9, 64), (48, 64), (48,))

    def adamw(self) -> Iterable[Tensor]:
        weight, is_small = self.draw(600), self.dtype.itemsize == 2
        weight = weight.to(torch.bfloat16 if is_small else torch.float32)
        moments, adamw = ops.Moments.of(weight), ops.AdamW.on(self.device, weight_decay=0.1)
        for _ in range(2):
            adamw.begin_step(0.1)
            ops.adamw_(weight, self.draw(600).to(weight.dtype), moments, adamw, seed=1)
        if not is_small:
            return weight, *moments[:2]
        codes = zip(moments[:2], moments.exponents, (True, False), strict=True)
        return weight, *(reference.decode(*each) for each in codes)

    def prune(self) -> Iterable[Tensor]:
        weight, pruned = self.draw(12, 40), self.draw(12, 40)
        ops.prune_(pruned, weight, 2, 4)
        ops.shrink_pruned_(weight, pruned, 0.1, seed=1, step=1)
        return weight, pruned

    def copies(self) -> Iterable[Tensor]:
        source, destination = self.draw(7, 48).float(), self.draw(7, 48)
        repeatedly([TensorCopy(source, destination, 1.5)])()
        return (destination,)

    def four_bits(self) -> Iterable[Tensor]:
        weights, matrices = [self._in_4_bits(48), self._in_4_bits(24)], [self.draw(48, 64), self.draw(24, 64)]
        dequantise(weights, matrices)
        return matrices

    def four_bit_products(self) -> Iterable[Tensor]:
        return self._by_two_weights([self._in_4_bits(48), self._in_4_bits(24)], joined=True)

    def delta_rule(self) -> Iterable[Tensor]:
        chunks = ops.Chunks.of(torch.tensor([0, 40, 40, 50], dtype=torch.int32, device=self.device), 50)

        def attend(q, k, v, decays, strengths):
            rules = ops.gated_delta_rule, ops.gated_linear_attention
            return [rule(q, k, v, -decays.exp(), strengths.sigmoid(), chunks) for rule in rules]

        return self.with_gradients(attend, (50, 2, 16), (50, 2, 16), (50, 4, 16), (50, 4), (50, 4))

    def short_convolution(self) -> Iterable[Tensor]:
        positions = torch.tensor([0, 1, 2, 3, 4, 0, 0, 1, 2], dtype=torch.int32, device=self.device)

        def convolve(x, weight, bias):
            return ops.short_convolution(x, weight, bias, positions, "silu")

        return self.with_gradients(convolve, (9, 40), (40, 4), (40,))

    def _by_two_weights(self, weights, *, joined: bool) -> list[Tensor]:
        def multiply(x, *adapters):
            parts = zip(weights, adapters[::2], adapters[1::2], strict=True)
            projections = [ops.LoraProjection(weight, None, *pair, 1.5) for weight, *pair in parts]
            return ops.lora_linear(x, ops.LoraGroup.stack(projections, joined=joined))

        return self.with_gradients(multiply, (9, 64), (4, 64), (48, 4), (4, 64), (24, 4))

    def _through_a_gate(self, *, joined: bool) -> list[Tensor]:
        weight = self.draw(48, 64)

        def multiply(gate, up, lora_A, lora_B):
            group = ops.LoraGroup.stack([ops.LoraProjection(weight, None, lora_A, lora_B, 1.5)], joined=joined)
            inputs = ops.GatedInputs(gate, up, "silu")
            return ops.gated_lora_linear(ops.gated(*inputs), inputs, group)

        return self.with_gradients(multiply, (9, 64), (9, 64), (4, 64), (48, 4))

    def _in_4_bits(self, num_outputs: int) -> ops.QuantisedWeight:
        """A weight [num_outputs, 64] of random codes, a row to a block, with quantised scales."""
        packed, scales = (self.draw(size, 1).sigmoid().mul(256).byte() for size in (num_outputs * 32, num_outputs))
        code, scale_code, second = (self.draw(size).float() for size in (16, 256, num_outputs))
        of_scales = ops.QuantisedScales(scale_code, second, torch.zeros_like(code[0]), 1)

        def write(out: Tensor) -> None:
            codes = torch.stack([packed >> 4, packed & 15], dim=-1).view(num_outputs, 64).int()
            out.copy_(code[codes] * (scale_code[scales.int()] * second[:, None]))

        return ops.QuantisedWeight(self.dtype, write, four_bits=ops.FourBits(packed, code, scales[:, 0], 64, of_scales))


def conditions(device: torch.device) -> dict[str, str]:
    """What a trial's outcome depends on."""
    index = choices.device_index(device)
    sources = [each.read_bytes() for each in sorted(Path(__file__).parent.rglob("*.py"))]
    return choices.machine(index) | {
        "capability": "{}.{}".format(*torch.cuda.get_device_capability(index)),
        "release": driver_release(),
        "sources": hashlib.sha256(b"\0".join(sources)).hexdigest(),
    }
