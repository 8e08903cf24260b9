"""Estimates how long a training takes, from measured rates and costs."""

from sebp_edge.engine.memory.amount_of_work import AmountOfWork
from sebp_edge.engine.memory.setup import TrainingSetup
from sebp_edge.engine.sparse.patches.counts import CHUNK_ROWS

# Time of a training over that of its matrix products: for captured steps on an H200, and for eager ones on CPUs.
OVERHEAD_GPU, OVERHEAD_CPU = 1.2, 2.0
# Minimum time of a layer in a captured micro-batch: 9.9 ms for 128 tokens of a 3B model on an H200, less the time of
# reading its weights twice, divided by 28 layers.
SECONDS_PER_LAYER = 0.25e-3
# Maximum slowdown by small buffers: the head is read more often, and each gradient takes a kernel.
SMALL_BUFFERS_SLOWDOWN = 1.03
# Slowdown by chunked blocks, whose products have fewer rows: 193 -> 212 ms with all blocks of a 3B model in checkpoints
# and chunks of 512 rows.
CHUNKED_BLOCKS_SLOWDOWN = 1.1
# Cost of dequantising the weights in every pass, in tokens: it moves 2.5 bytes per weight; a token takes 2
# floating-point operations per weight, of which GPUs do some 200 in the time that they move a byte.
TOKENS_PER_DEQUANTISATION = 250


def estimate_seconds(setup: TrainingSetup, work: AmountOfWork, rate: float, bus: float) -> float:
    """Estimates the time of the work at `rate` floating-point operations and `bus` bytes to the GPU per second.

    Per parameter, a token takes 2 operations forward, 2 for the input's gradient, 2 for the weight's gradient if all
    weights are trained, and 2 if it is recomputed.
    """
    parameters, num_recomputed = setup.shape.parameters, setup.recomputed_parameters
    passes = (2 if setup.is_lora else 3) * parameters + num_recomputed
    tokens = work.trained_tokens
    if setup.recipe.load_in_4bit:
        times = -(-setup.options.max_rows // CHUNK_ROWS) if setup.options.chunked_blocks else 1
        each = TOKENS_PER_DEQUANTISATION * (1 - setup.dequantised_parameters / setup.shape.linear_parameters)
        tokens += each * work.micro_batches * times
    if setup.options.small_buffers:
        tokens *= SMALL_BUFFERS_SLOWDOWN
    if setup.options.chunked_blocks:
        tokens *= CHUNKED_BLOCKS_SLOWDOWN
    operations = 2 * (passes * tokens + parameters * work.evaluated_tokens)
    seconds = (OVERHEAD_GPU if setup.on_gpu else OVERHEAD_CPU) * operations / rate
    if setup.on_gpu:
        layers = len(setup.shape.blocks) * (1 + num_recomputed / parameters / 2)
        seconds = max(seconds, SECONDS_PER_LAYER * layers * work.micro_batches)
    copies = setup.offloaded_per_token * work.trained_tokens / bus
    # Copies to the host overlap with the forward pass, a third of the work; copies back with the backward pass.
    seconds = max(seconds / 3, copies) + max(2 * seconds / 3, copies)
    # Streamed weights are copied for each forward and each backward pass.
    return max(seconds, (2 * work.micro_batches + work.evaluations) * sum(setup.streamed_bytes) / bus)
