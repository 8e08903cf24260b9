"""Compiles the kernels of a LoRA training side by side, while the weights are loaded.

Triton compiles a kernel when it is first launched: half a second for each of twenty, one after the other. Here each is
launched once on scratch tensors, in other threads. A later launch with other sizes finds its kernel compiled, as long
as strides are divisible by 16 as these are; else it is compiled then. So what is launched decides only about time.
"""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from threading import Event, Thread

import torch
from torch import Tensor

from sebp_edge.basics.flash_attention import MAX_FLASH_HEAD, MAX_SHORT_LENGTH
from sebp_edge.engine.models.architecture import head_size_of, per_layer
from sebp_edge.machine.devices import pick_dtype
from sebp_edge.ops import AdamW, Moments, backend
from sebp_edge.ops.copies import TensorCopy, repeatedly
from sebp_edge.ops.joined_weight import JoinedWeight
from sebp_edge.recipe import Recipe

logger = logging.getLogger(__name__)

# More threads would only wait for each other, since a third of a compilation is Python. Scratch tensors have few rows,
# so that each takes less than a megabyte.
THREADS, ROWS, SIZE = 12, 16, 64
# Longest sequences for which attention has different kernels: in a block's trial, in probes, and in short texts.
TRIAL, PROBES, SHORT = 7, (16, 32, 64), (MAX_SHORT_LENGTH, 64)


@contextmanager
def compiling_ahead(config, recipe: Recipe, device: torch.device, typical_characters: float) -> Iterator[None]:
    """Context whose end waits for other threads that compile, unless it ends with an error.

    Attention has other kernels for short texts, so this depends on the characters of a typical one. The threads log
    their errors: the launch that needs the kernel raises them again.
    """
    if recipe.method != "lora" or not backend.has_kernels(device):
        yield
        return
    are_short = typical_characters <= 4 * MAX_SHORT_LENGTH  # about 4 characters are a token
    each, stopped = launches(config.get_text_config(), recipe.r, device, are_short), Event()
    # Not a daemon: Python would end with an abort if that is in Triton's compiler.
    thread = Thread(target=launch_each, args=(each, device, stopped), name="sebp-edge kernels ahead")
    thread.start()
    try:
        yield
        thread.join()
    finally:
        stopped.set()


def launch_each(launches: Iterator[Callable[[], object]], device: torch.device, stopped: Event) -> None:
    """Calls the functions in a few threads, the first one before the others, until `stopped` is set; logs errors."""

    def run(launch: Callable[[], object]) -> None:
        with _logging_errors(), torch.cuda.device(device):
            if not stopped.is_set():
                launch()

    with _logging_errors(), ThreadPoolExecutor(THREADS) as pool:
        run(next(launches))  # It starts Triton's driver.
        pool.map(run, launches)


@contextmanager
def _logging_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        logger.info("A kernel was not compiled ahead (%s: %s).", type(error).__name__, error)


def _heads(config) -> tuple[int, int, int]:
    """The numbers of a layer's heads and key/value heads, and their size."""
    heads = config.num_attention_heads
    return heads, getattr(config, "num_key_value_heads", None) or heads, head_size_of(config)


def launches(config, rank: int, device: torch.device, texts_are_short: bool) -> Iterator[Callable[[], object]]:
    """Yields functions that launch each kernel with the strides of a training, those that compile longest first."""
    op, dtype, columns, head_size = backend.kernels, pick_dtype(device), config.intermediate_size, head_size_of(config)
    all_heads = dict.fromkeys(map(_heads, per_layer(config)))
    heads, kv_heads, _ = largest = max(all_heads, key=itemgetter(2))
    queries, keys = heads * head_size, kv_heads * head_size
    activation = "silu" if getattr(config, "hidden_act", None) == "silu" else "gelu_tanh"

    def new(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def states(heads: int, kv_heads: int, size: int) -> tuple[Tensor, ...]:
        return new(ROWS, heads + 2 * kv_heads, size).split((heads, kv_heads, kv_heads), dim=1)

    def attend(length: int, rotates: bool = True, *, backward: bool = False) -> None:
        kernels = op("short_attention")
        for each in all_heads:
            (q, k, v), angles = states(*each), (new(ROWS, each[2]),) * 2 if rotates and has_replaced_blocks else None
            out, logsumexp = kernels.short_attention_(q, k, v, angles, starts, length, 1.0, None, True)
            if backward:
                kernels.short_attention_backward(out, q, k, v, angles, starts, out, logsumexp, length, 1.0, None, True)

    def add_loras_backward() -> None:
        for ends in ((hidden.shape[1],), (columns, columns), (queries, keys, keys)):
            dout, down = new(ROWS, sum(ends)), new(ROWS, len(ends) * rank)
            op("lora").lora_up_backward(dout, down, new(sum(ends), rank), ends, 1.0)

    def place_of(elements: int) -> Tensor:
        return torch.tensor([new(elements, dtype=torch.float32).data_ptr()], device=device)

    def finish_joined(num_projections: int) -> None:
        # Small, since only what divides a size decides about its kernel; and no product, for which cuBLAS would take a
        # workspace in each thread.
        ends, kernels = (SIZE,) * num_projections, op("joined_lora")
        joined = JoinedWeight.of((new(SIZE, SIZE),) * num_projections, rank)
        with_down, with_up = (new(ROWS, width) for width in joined.matrix.shape)
        product, low = with_down.tensor_split([sum(ends)], dim=1)
        out, down = kernels.add_lora(product, low, new(sum(ends), rank), None, ends, 1.0)
        (dx, up), place = with_up.tensor_split([SIZE], dim=1), place_of(2 * num_projections * SIZE * rank)
        kernels.joined_backward(dx, up, out, new(ROWS, SIZE), down, joined.stacked_A, ends, 1.0, place)

    def finish_gated() -> None:
        lora_A, place = new(rank, columns), place_of(rank * (columns + hidden.shape[1]))
        op("gated").joined_gated_backward(gate.clone(), low, lora_A, gate, up, activation, hidden, low, 1.0, place)

    # Otherwise the model's own code rotates; see `Hoisted`.
    has_replaced_blocks = head_size <= MAX_FLASH_HEAD
    hidden, norm, sums = new(ROWS, config.hidden_size), new(config.hidden_size), new(ROWS, dtype=torch.float32)
    adamw = AdamW.on(device, weight_decay=0.0)
    slots, starts = new(ROWS, dtype=torch.int64), torch.tensor([0, ROWS], dtype=torch.int32, device=device)
    angle, (gate, up), low = new(ROWS, head_size), new(ROWS, 2 * columns).chunk(2, dim=1), new(ROWS, rank)
    yield lambda: op("lora").lora_up(low, new(config.hidden_size, rank), None, (config.hidden_size,), 1.0)
    yield from (partial(attend, length, backward=True) for length in SHORT if texts_are_short)
    yield from (partial(finish_joined, number) for number in (1, 2, 3) if JoinedWeight.can_hold((norm,) * number, rank))
    yield lambda: repeatedly([TensorCopy(new(ROWS, rank, dtype=torch.float32), low)])()
    yield add_loras_backward
    yield from (partial(attend, length) for length in (TRIAL, *PROBES))
    yield partial(attend, TRIAL, rotates=False)
    yield finish_gated
    yield lambda: op("gated").gated_lora_backward(gate.clone(), low, new(rank, columns), gate, up, activation)
    yield lambda: op("gated").gated(gate, up, activation)
    yield lambda: op("adamw").adamw_(sums, sums.clone(), Moments.of(sums), adamw, 0, adamw.learning_rate)
    losses = partial(op("cross_entropy").cross_entropy_and_dlogits_, new(1, config.vocab_size), slots[:1], 1.0, None)
    yield from (partial(losses, needs_gradient=needs_gradient) for needs_gradient in (True, False))
    yield lambda: op("rms_norm").rms_norm(hidden, norm, 1.0, 0.0)
    yield lambda: op("rms_norm").rms_norm_backward(hidden, hidden, norm, sums, 0.0, needs_dweight=False)
    yield lambda: op("rotate").rotate_(*states(*largest)[:2], angle, angle)
    yield lambda: op("rotate").rotate_gradients(*states(*largest), angle, angle, states(*largest))
    yield lambda: (op("move_rows").gather_rows(hidden, slots), op("move_rows").scatter_rows(hidden, slots.int()))
