"""Predicts the peak memory of a training from a decoder's shape.

Weights, adapter, gradients and moments follow from the number of parameters; `activations` counts what
the largest micro-batch adds. The rest is memory that allocators hold in addition to tensors, and a reserve.
"""

from dataclasses import replace

from sebp_edge.engine.memory.activations import Activations
from sebp_edge.engine.memory.footprint import Footprint
from sebp_edge.engine.memory.memory_options import MAX_GRADIENTS_AT_ONCE
from sebp_edge.engine.memory.setup import TrainingSetup
from sebp_edge.engine.models.four_bits import NF4_BYTES
from sebp_edge.engine.sparse.patches.counts import FP32, has_one_gradient
from sebp_edge.engine.sparse.rows.buckets import Bucket

# cuBLAS workspaces in torch's allocator, for a training's two streams; sizes on an H100, smaller on other GPUs.
CUBLAS_WORKSPACES = 2 * 32 * 2**20
# Margins for errors of the count. Weights on a GPU are only rounded up, each to whole pages. The host's heap also keeps
# freed memory: measured peaks on a CPU exceeded the count by 11 to 27 % of activations, loss and context in fp32, and
# by 5 to 14 % in bf16, where products are oneDNN's; by 36 % with linear attention, whose chunks have tensors of many
# sizes.
RESERVE, RESERVE_OF_WEIGHTS = 0.04, 0.01
RESERVE_OF_HEAP, RESERVE_OF_HEAP_IN_BF16, RESERVE_OF_HEAP_WITH_CHUNKS = 0.3, 0.15, 0.4
# Fragmentation of torch's allocator, in units of a micro-batch's widest tensor. Measured in the graph pools of 3B
# models on an H100: 2.9 (LoRA, 4,096 tokens), 2.9 (2,546 tokens, with checkpoints), 2.9 (4 bits).
FRAGMENTS_OF_WIDEST = 3
# What a captured graph takes outside torch's allocator for each pass through a block of no known kind. On an H200,
# graphs of steps with 32 and 42 recomputed blocks took 16 and 26 MB, those of losses 6 and 7.5. Blocks of known kinds
# have fewer kernels, for which the reserve has been enough.
CAPTURED_PASS = 200_000
# Partly used segments of 20 MiB, on the two streams and in the graphs' pool, as many as a small model has.
PARTIAL_SEGMENTS = 4 * 20 * 2**20


def predict_footprint(
    setup: TrainingSetup, trained: list[Bucket], evaluated: list[Bucket], context: int, *, num_trainings: int = 1
) -> Footprint:
    """Predicts the footprint of some trainings, of which each has a best state that is kept.

    Sizes of micro-batches are distinct. Without graphs, those that fit into others may be left out.
    """
    activations = Activations(setup)
    steps = [activations.step(sizes) for sizes in trained]
    # An evaluation's micro-batches may be filled up to a bucket of the training.
    evaluations = [activations.evaluation(sizes) for sizes in (*evaluated, *trained)] if evaluated else []
    if not setup.on_gpu:  # else on the host
        evaluations = [replace(peak, activations=peak.activations + _set_aside(setup)) for peak in evaluations]
    largest = max(steps + evaluations, key=lambda peak: peak.total)
    parts = {
        "weights": _weights(setup),
        "adapter": _adapter(setup, num_trainings),
        "gradients": _gradients(setup),
        "optimizer": _moments(setup),
        "activations": largest.activations + _one_matrix(setup),
        "loss": largest.loss,
        "graphs": _graphs(setup, trained, evaluated),
    }
    return Footprint(**parts, context=context, reserve=_reserve(setup, parts, context))


def host_bytes(setup: TrainingSetup, trained: list[Bucket], *, num_trainings: int = 1) -> int:
    """Returns the bytes of host memory that a training on a GPU uses; 0 on the CPU, where the footprint includes them.

    It holds the states to restore, the offloaded inputs, and one more state while the best one is replaced, or what is
    set aside; and in locked memory, streamed weights and embeddings.
    """
    if not setup.on_gpu:
        return 0
    state = setup.num_trained * (FP32 if setup.is_lora else setup.itemsize)
    offloaded = setup.offloaded_per_token * max(sizes.tokens for sizes in trained)
    more = max(state, _set_aside(setup))
    locked = sum(setup.streamed_bytes) + setup.embeddings_on_host
    return num_states_kept(setup, num_trainings) * state + more + offloaded + locked


def num_states_kept(setup: TrainingSetup, num_trainings: int) -> int:
    """Counts the states of the trained weights that are kept.

    These are the first and the best of each training; with several full fine-tunings one more.
    """
    return 1 + num_trainings + (num_trainings > 1 and not setup.is_lora)


def _weights(setup: TrainingSetup) -> int:
    in_4bit = setup.shape.linear_parameters if setup.recipe.load_in_4bit else 0
    loaded = int(setup.itemsize * (setup.shape.parameters - in_4bit) + NF4_BYTES * in_4bit)
    streamed = setup.streamed_bytes
    on_host = sum(streamed) - 2 * max(streamed, default=0) + setup.embeddings_on_host
    return loaded + setup.itemsize * setup.dequantised_parameters - on_host


def _adapter(setup: TrainingSetup, num_trainings: int) -> int:
    """Counts an adapter in fp32 with its copies in the base model's dtype; on the CPU also the states to restore."""
    snapshots = 0 if setup.on_gpu else num_states_kept(setup, num_trainings) * FP32
    return setup.num_trained * ((FP32 + setup.itemsize if setup.is_lora else 0) + snapshots) + setup.joined_bytes


def _moments(setup: TrainingSetup) -> int:
    in_8_bits = setup.updates_in_backward or setup.options.moments_in_8_bits
    return (2 if in_8_bits else 2 * FP32) * setup.num_trained


def _set_aside(setup: TrainingSetup) -> int:
    """Counts what an adapter goes on from after its first epoch, while the state before that is evaluated."""
    return FP32 * setup.num_trained + _moments(setup) if setup.is_lora else 0


def _gradients(setup: TrainingSetup) -> int:
    if setup.updates_in_backward:
        return 0  # One exists at a time; the largest, the head's, is counted with the loss.
    accumulated = FP32 * setup.num_trained
    # Small gradients all exist at once before they are added (see `Update.take_gradients`).
    one_by_one = setup.options.small_buffers or accumulated > MAX_GRADIENTS_AT_ONCE
    return accumulated * (2 if setup.on_gpu and setup.is_hoisted and not one_by_one else 1)


def _one_matrix(setup: TrainingSetup) -> int:
    """Counts the largest matrix that is dequantised; on the CPU there is another copy of it."""
    blocks = setup.shape.blocks
    if not setup.recipe.load_in_4bit or setup.options.dequantised_blocks == len(blocks):
        return 0
    return (
        setup.itemsize
        * (1 if setup.on_gpu else 2)
        * max((linear.size for block in blocks for linear in block.linears.values()), default=0)
    )


def _graphs(setup: TrainingSetup, trained: list[Bucket], evaluated: list[Bucket]) -> int:
    """Counts what a GPU holds besides the largest run: captured graphs, cuBLAS workspaces and fragmentation."""
    if not setup.on_gpu:
        return 0
    fixed = CUBLAS_WORKSPACES + PARTIAL_SEGMENTS + _fragmentation(setup, max(trained))
    return fixed + CAPTURED_PASS * _captured_passes(setup, len(trained), len(evaluated))


def _captured_passes(setup: TrainingSetup, num_trained: int, num_evaluated: int) -> int:
    """Counts the passes through blocks of no known kind in all graphs."""
    blocks = setup.shape.blocks
    if not setup.is_hoisted or blocks[0].kind is not None:
        return 0
    # Those of steps with examples that have a teacher and without, those of losses and of words.
    steps, evaluations = num_trained * (2 if setup.recipe.general else 1), 2 * num_evaluated
    return steps * (2 * len(blocks) + setup.options.checkpoints) + evaluations * len(blocks)


def _fragmentation(setup: TrainingSetup, sizes: Bucket) -> int:
    """Counts the free blocks of torch's allocator that are too small to be used.

    If all weights are trained, the head's gradient leaves a block that is large enough for other tensors, unless the
    head is tied and its gradient waits for the embedding's. If the two do not share a tensor, the second needs a new
    block.
    """
    head = 0 if setup.is_lora else setup.itemsize * setup.shape.head_parameters
    activations, fragments = Activations(setup), 0
    if setup.is_hoisted:
        fragments = FRAGMENTS_OF_WIDEST * activations.widest(sizes) + activations.temporary(sizes)
    if not setup.shape.is_tied:
        return max(0, fragments - head)
    return fragments if has_one_gradient(setup.shape) else fragments + head


def _reserve(setup: TrainingSetup, parts: dict[str, int], context: int) -> int:
    if setup.on_gpu:
        weights = parts["weights"]
        return int(RESERVE * (sum(parts.values()) - weights) + RESERVE_OF_WEIGHTS * weights)
    on_heap = parts["activations"] + parts["loss"]
    of_heap = RESERVE_OF_HEAP if setup.itemsize == FP32 else RESERVE_OF_HEAP_IN_BF16
    if any(block.kept is not None and block.kept.rule is not None for block in setup.shape.distinct_blocks):
        of_heap = RESERVE_OF_HEAP_WITH_CHUNKS
    return int(RESERVE * (sum(parts.values()) - on_heap) + of_heap * (on_heap + context))
