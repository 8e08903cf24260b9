"""Compiles the kernels of a LoRA training side by side, while the weights are loaded.

Triton compiles a kernel when it is first launched: half a second for each of twenty, one after the other. Here each is
launched once on scratch tensors, in a thread of its own. A later launch with other sizes finds its kernel compiled, as
long as strides are divisible by 16 as these are; else it is compiled then. So this list decides only about time.

Shapes: A rows, D hidden, F columns of gate and up, H heads, G key/value heads, E head size, V vocabulary, R rank.
"""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Thread

import torch
from torch import Tensor

from sebp_edge.basics.flash_attention import MAX_SHORT_LENGTH
from sebp_edge.machine.devices import pick_dtype
from sebp_edge.models.architecture import head_size_of
from sebp_edge.ops import backend
from sebp_edge.recipe import Recipe

logger = logging.getLogger(__name__)

# Rows of the scratch tensors, few enough that each takes less than a megabyte, so that none shares its memory with
# weights; longest sequences for which attention's kernels differ.
ROWS, LENGTHS = 16, (16, 64, MAX_SHORT_LENGTH)


@dataclass(frozen=True)
class Sizes:
    """What the kernels depend on: a decoder's sizes and dtype, and the rank of its adapter."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    activation: str
    rank: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config, rank: int, dtype: torch.dtype) -> "Sizes | None":
        """Reads a decoder's config; returns None if it lacks one of them."""
        config = config.get_text_config()
        try:
            heads, act = config.num_attention_heads, getattr(config, "hidden_act", None) or config.hidden_activation
            kv_heads = getattr(config, "num_key_value_heads", None) or heads
            sizes = config.hidden_size, config.intermediate_size, heads, kv_heads, head_size_of(config)
            return cls(*sizes, config.vocab_size, "silu" if act == "silu" else "gelu_tanh", rank, dtype)
        except AttributeError:
            return None


def compile_ahead(config, recipe: Recipe, device: torch.device) -> Callable[[], None]:
    """Begins to compile in other threads, if this device runs our kernels; returns a function that waits for the end.

    Errors are logged: the launch that needs the kernel raises them again.
    """
    sizes = Sizes.of(config, recipe.r, pick_dtype(device))
    if sizes is None or recipe.method != "lora" or not backend.has_triton():
        return lambda: None
    thread = Thread(target=_launch_each, args=(sizes, device), daemon=True)
    thread.start()
    return thread.join


def _launch_each(sizes: Sizes, device: torch.device) -> None:
    def run(launch: Callable[[], object]) -> None:
        with _logging_errors(), torch.cuda.device(device):
            launch()

    with _logging_errors():
        first, *others = launches(sizes, device)
        run(first)  # alone, since it starts Triton's driver
        with ThreadPoolExecutor(len(others)) as pool:
            pool.map(run, others)


@contextmanager
def _logging_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        logger.info("A kernel was not compiled ahead (%s: %s).", type(error).__name__, error)


def launches(sizes: Sizes, device: torch.device) -> Iterator[Callable[[], object]]:
    """Yields a launch of each kernel, with the sizes and strides that a training gives it."""

    def new(*shape: int, dtype: torch.dtype = sizes.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def states() -> tuple[Tensor, ...]:
        parts = new(ROWS, queries + 2 * keys).split((queries, keys, keys), dim=1)
        return tuple(part.unflatten(1, (-1, sizes.head_size)) for part in parts)

    op, rank = backend.kernels, sizes.rank
    queries, keys = sizes.heads * sizes.head_size, sizes.kv_heads * sizes.head_size
    hidden, angles, sums = new(ROWS, sizes.hidden), (new(ROWS, sizes.head_size),) * 2, new(ROWS, dtype=torch.float32)
    slots, weight = new(ROWS, dtype=torch.int64), new(sizes.hidden)
    yield lambda: op("move_rows").gather_rows(hidden, slots)
    yield lambda: op("move_rows").scatter_rows(hidden, slots.int())
    yield lambda: op("rms_norm").rms_norm(hidden, weight, 1.0, 0.0)
    yield lambda: op("rms_norm").rms_norm_backward(hidden, hidden, weight, sums, 0.0, needs_dweight=False)
    gates = new(ROWS, 2 * sizes.intermediate).chunk(2, dim=1)
    lora_A, up = new(rank, sizes.intermediate), new(ROWS, rank)
    yield lambda: op("gated").gated(*gates, sizes.activation)
    yield lambda: op("gated").gated_lora_backward(gates[0].clone(), up, lora_A, *gates, sizes.activation)
    yield lambda: op("lora").lora_up(up, new(sizes.hidden, rank), None, (sizes.hidden,), 1.0)
    for columns in ((sizes.hidden,), 2 * (sizes.intermediate,), (queries, keys, keys)):
        down, lora_B, dout = new(ROWS, len(columns) * rank), new(sum(columns), rank), new(ROWS, sum(columns))
        yield partial(op("lora").lora_up_backward, dout, down, lora_B, columns, 1.0)
    for needs_gradient in (False, True):
        rows = new(1, sizes.vocabulary), slots[:1], 1.0, None
        yield partial(op("cross_entropy").cross_entropy_and_dlogits_, *rows, needs_gradient=needs_gradient)
    cu_seqlens, out = torch.tensor([0, ROWS], dtype=torch.int32, device=device), new(ROWS, sizes.heads, sizes.head_size)
    logsumexp = new(ROWS, sizes.heads, dtype=torch.float32)
    for length in LENGTHS:
        options = length, 1.0, None, True
        yield partial(op("short_attention").short_attention_, *states(), angles, cu_seqlens, *options)
        kept = angles, cu_seqlens, out, logsumexp
        yield partial(op("short_attention").short_attention_backward, out, *states(), *kept, *options)
    yield partial(op("rotate").rotate_, *states()[:2], *angles)
    yield partial(op("rotate").rotate_gradients, out, *states()[1:], *angles, states())
