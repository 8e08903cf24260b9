"""Compiles kernels for architectures without a GPU, and prints what each takes; run it in a process of its own.

    python tests/helpers/compiled_kernels.py '{"ARCHITECTURE": [SHARED_MEMORY, [PART, ...]], ...}'

Launchers choose the tiles, as they do in a training. A launch compiles, and runs nothing. `launches` has the parts.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from types import SimpleNamespace

os.environ.pop("TRITON_INTERPRET", None)

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from sebp_edge.basics.flash_attention import MAX_SHORT_LENGTH
from sebp_edge.engine.training import kernels_ahead
from sebp_edge.ops import ActiveRows, FourBits, QuantisedScales, backend
from sebp_edge.ops.frozen_weights import multiplies_in_4_bits
from sebp_edge.ops.gpu import lora
from sebp_edge.ops.tiles import DWEIGHT_CANDIDATES, DX_CANDIDATES, SAFE_TILES

# Of all variants, these take the most shared memory: the largest heads with tiles of their own, and the highest ranks.
LLAMA = {"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24, "num_key_value_heads": 8}
LLAMA |= {"head_dim": 128, "vocab_size": 128256, "hidden_act": "silu"}
GEMMA = LLAMA | {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256}
GEMMA_4 = GEMMA | {"head_dim": 512}
RANK, RANKS = 64, {torch.float32: lora.MAX_RANK_OF_FP32, torch.bfloat16: lora.MAX_RANK}


class NoDriver:
    """Stands in for a GPU's driver."""

    def __init__(self, architecture: int):
        self._architecture = architecture

    def get_current_target(self):
        return GPUTarget("cuda", self._architecture, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_all(architecture: int, shared_memory: int, parts: list[str], watch) -> None:
    """Compiles the kernels of the parts; calls `watch` with each kernel's name and what it became."""
    driver.set_active(NoDriver(architecture))
    torch.Tensor.is_cuda = property(lambda tensor: True)
    torch.cuda.get_device_capability = lambda device=None: divmod(architecture, 10)
    backend.runs_kernels = lambda tensor: True
    kernels_ahead.pick_dtype = lambda device: torch.bfloat16
    run, seen = JITFunction.run, set()

    def compile_only(kernel, *args, grid, warmup, **options):
        compiled = run(kernel, *args, grid=grid, warmup=True, **options)
        if compiled.hash not in seen:
            seen.add(compiled.hash)
            watch(kernel.__name__, compiled)

    JITFunction.run = compile_only
    for launch in launches(shared_memory, parts):
        launch()


def launches(shared_memory: int, parts: list[str]):
    """Yields functions that launch the kernels."""
    for config, part in ((LLAMA, "training"), (GEMMA, "largest heads"), (GEMMA_4, "largest heads")):
        for launch in kernels_ahead.launches(SimpleNamespace(**config), RANK, torch.device("cpu"), True):
            attends = getattr(getattr(launch, "func", None), "__name__", "") == "attend"
            # Of attention the longest, with both passes.
            if part in parts and (launch.args[0] == MAX_SHORT_LENGTH if attends else part == "training"):
                yield launch
    for dtype, rank in RANKS.items():
        of_dtype = f" in {dtype.itemsize} bytes"
        yield from [partial(multiply_loras, rank, dtype)] * (f"highest ranks{of_dtype}" in parts)
        yield from [partial(multiply_rows, dtype, shared_memory)] * (f"products{of_dtype}" in parts)
    yield from [attend_linearly] * ("linear attention" in parts)
    yield from [convolve] * ("short convolutions" in parts)
    yield from (partial(multiply_in_4_bits, num_rows) for num_rows in (64, 128) if "4 bits" in parts)


def multiply_loras(rank, dtype):
    def new(*size):
        return torch.zeros(size, dtype=dtype)

    for num_rows in (64, 256):
        wide, low, lora_A = new(num_rows, 256), new(num_rows, rank), new(rank, 256)
        backend.kernels("lora").lora_up(low, lora_A.T.contiguous(), None, (256,), 1.0)
        backend.kernels("lora").lora_up_backward(wide, low, lora_A.T.contiguous(), (256,), 1.0)
        backend.kernels("gated").gated_lora_backward(wide.clone(), low, lora_A, wide, wide, "silu")


def multiply_rows(dtype, shared_memory):
    rows, kernels = ActiveRows.from_ids(torch.arange(0, 64, 2), 64), backend.kernels("products")
    dout, weight, x = (torch.zeros(size, 256, dtype=dtype) for size in (64, 256, 32))
    # In fp32, each of those that are measured takes seconds to compile.
    measured = dtype.itemsize == 2
    for tiles in largest([*SAFE_TILES, *(DX_CANDIDATES * measured)], dtype.itemsize, shared_memory):
        kernels.dx(dout, weight, rows, tiles)
    for tiles in largest([*SAFE_TILES, *(DWEIGHT_CANDIDATES * measured)], dtype.itemsize, shared_memory):
        kernels.dweight(dout, x, rows, tiles, x_has_all_rows=False, with_bias=True)


def attend_linearly():
    """With the largest heads of published models; kernels that erase nothing are parts of these."""
    heads, decays, chunks = torch.zeros(64, 2, 128).bfloat16(), torch.zeros(64, 2), torch.zeros(2).int()
    inputs, kernels = (heads, heads, heads, decays, decays), backend.kernels("delta_rule")
    kernels.gated_delta_rule(*inputs, (chunks, chunks[:1], chunks), True)
    kernels.gated_delta_rule_backward(heads, *inputs, (chunks, chunks[:1], chunks), True)


def largest(candidates, itemsize, shared_memory):
    """Those of the tiles that fit, by their estimate, which take the most."""
    fitting = dict.fromkeys(each._replace(splits=1) for each in candidates if each.fits(itemsize, shared_memory))
    most = max(map(taken, fitting))
    return [each for each in fitting if taken(each) == most]


def taken(tiles):
    return tiles.num_stages * tiles.depth * (tiles.rows + tiles.columns)


def multiply_in_4_bits(num_rows):
    def weight(num_outputs, num_inputs):
        blocks = num_outputs * num_inputs // 64
        packed, scales = (torch.zeros(size, dtype=torch.uint8) for size in (blocks * 32, blocks))
        of_scales = QuantisedScales(torch.zeros(256), torch.zeros(-(-blocks // 256)), torch.zeros(()), 256)
        return FourBits(packed[:, None], torch.zeros(16), scales, 64, of_scales)

    kernels, columns = backend.kernels("four_bit_products"), (128, 128, 128)
    weights = [weight(each, 256) for each in columns]
    x, dout = (torch.zeros(num_rows, width, dtype=torch.bfloat16) for width in (256, sum(columns)))
    stacked_A, stacked_B = torch.zeros(3 * RANK, 256).bfloat16(), torch.zeros(sum(columns), RANK).bfloat16()
    if multiplies_in_4_bits(weights, 256, x):
        kernels.outputs_and_low(x, weights, columns, stacked_A)
        kernels.inputs_and_low(dout, weights, columns, 256, stacked_B, 1.0)
    backend.kernels("four_bits").dequantise(weights, [torch.zeros(each, 256).bfloat16() for each in columns])


def convolve():
    x, weight, positions = torch.zeros(64, 2048).bfloat16(), torch.zeros(2048, 4).bfloat16(), torch.zeros(64).int()
    kernels, given = backend.kernels("short_convolution"), (weight, weight[:, 0], positions, "silu")
    kernels.short_convolution(x, *given)
    for needs_dweight in (False, True):
        kernels.short_convolution_backward(x, x, *given, needs_dweight=needs_dweight)


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and the bytes of its stack, which registers are spilled to."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(re.search(rf"{key}:(\d+)", told)[1]) for name, key in (("registers", "REG"), ("stack", "STACK"))}


def tell(architecture, name, compiled):
    taken = {"shared": compiled.metadata.shared, "threads": 32 * compiled.metadata.num_warps}
    row = {"architecture": architecture, "kernel": name} | taken | resources(compiled.asm["cubin"])
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    for architecture, (shared_memory, parts) in json.loads(sys.argv[1]).items():
        # Triton keeps what it has compiled for the one GPU that a process has.
        if not (process := os.fork()):
            compile_all(int(architecture), shared_memory, parts, partial(tell, int(architecture)))
            sys.exit()
        if code := os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]):
            sys.exit(code)
