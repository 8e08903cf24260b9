"""Counts the memory of patched blocks: what each patch keeps, takes and recomputes, in bytes.

Sizes only, no tensors: a plan imports no torch. The patches beside this file do what is counted here; tests compare
the counts with what autograd really keeps.
"""

from typing import NamedTuple

from sebp_edge.basics.flash_attention import MAX_SHORT_LENGTH, dq_buffer_bytes
from sebp_edge.engine.models.shape import Block, BlockKind, DecoderShape
from sebp_edge.engine.sparse.rows.buckets import Bucket

FP32 = 4  # bytes
# The most bytes for the sums of dq in a backward pass with little memory; beyond that, it takes a few heads at a time.
MAX_DQ_BYTES = 2**25
# Rows of an MLP that are computed at once: then an MLP of a 3B model needs no more memory than attention's backward
# pass over 3,000 tokens. Half as many rows would dequantise a 4-bit base twice as often.
CHUNK_ROWS = 1024
# Rows of joined weights are whole units of this many bytes (see `ops/joined_weight.py`).
JOINED_ROW_UNIT = 128
# Adapters of more bytes in a row are not joined.
MAX_JOINED_RANK_BYTES = 512


class Execution(NamedTuple):
    """How a decoder's blocks run in a training.

    Attributes:
        rank: rank of the LoRA adapter on every linear layer; 0 if all weights are trained.
        itemsize: bytes of one number of the base model and of activations.
        on_gpu: whether the device is an NVIDIA GPU, with captured graphs.
        has_kernels: whether norms, gates and the loss run on our kernels.
    """

    rank: int
    itemsize: int
    on_gpu: bool
    has_kernels: bool

    @property
    def trains_all(self) -> bool:
        """Whether all weights are trained, rather than an adapter."""
        return self.rank == 0

    @property
    def has_flash_attention(self) -> bool:
        """Whether one operation computes attention for all sequences; otherwise it runs sequence by sequence."""
        return self.on_gpu and self.itemsize == 2

    @property
    def attention_itemsize(self) -> int:
        """Bytes of one number in attention, which a CPU computes in fp32 (see `sequence_attention_`)."""
        return self.itemsize if self.on_gpu else FP32


# ------------------------------------------------------------------------------------------------------------ attention


def kept_by_attention(block: Block, head_size: int, run: Execution) -> int:
    """Bytes per token that autograd keeps in a block's attention, except the inputs of norms and projections."""
    rotated = block.queries + block.keys
    numbers, others = 2 * block.queries + 2 * block.keys, 0  # queries, keys, values and the output
    if _runs_fused_attention(block, run):
        if block.kind.has_head_norms:
            others += rotated  # before their norms and after
    else:
        # Rotation makes new tensors. Its inputs stay too, if they share the values' storage or a norm keeps them.
        is_cast = run.attention_itemsize > run.itemsize
        shares_storage = not is_cast and (not run.trains_all or len(block.kind.attention_in) == 1)
        if block.kind.has_rotary and (shares_storage or block.kind.has_head_norms):
            others += rotated
        if not run.has_flash_attention:
            others += block.queries  # the output of each sequence, and all of them concatenated
    # And the log of each head's softmax sum.
    return run.attention_itemsize * numbers + run.itemsize * others + FP32 * (block.queries // head_size)


def backward_of_attention(
    block: Block, head_size: int, sizes: Bucket, run: Execution, *, heads_in_groups: bool = False
) -> int:
    """Bytes that a block's attention takes in its backward pass, beside what is kept; 0 if it runs by sequence.

    These are dout, dq, dk and dv, before and after they are rotated back. Sequences that are not short add dk and dv of
    each query head and the fp32 sums of dq. Heads in groups add copies of one group's out and dout.

    Args:
        heads_in_groups: whether the backward pass takes a few heads at a time to keep sums of dq below `MAX_DQ_BYTES`.
    """
    if not run.has_flash_attention:
        return 0
    queries, keys = block.queries, block.keys
    dq_bytes = (
        dq_buffer_bytes(sizes.tokens, queries // head_size, head_size, sizes.sequences)
        if sizes.longest > MAX_SHORT_LENGTH
        else 0
    )
    num_groups = 1
    if heads_in_groups and _runs_fused_attention(block, run):
        num_groups = min(max(1, -(-dq_bytes // MAX_DQ_BYTES)), keys // head_size)
    per_group = queries + 2 * keys + (2 * queries if dq_bytes else 0) + (2 * queries if num_groups > 1 else 0)
    numbers = block.hidden + 2 * queries + 2 * keys
    return int(sizes.tokens * run.itemsize * (numbers + per_group / num_groups) + dq_bytes / num_groups)


def temporary_in_attention(block: Block, run: Execution) -> int:
    """Bytes per token that the model's own rotation allocates and frees; 0 if ours replaces it.

    These are queries and keys: times cosines, with their halves swapped, times sines, and the sums.
    """
    return 0 if _runs_fused_attention(block, run) else run.itemsize * 4 * (block.queries + block.keys)


def _runs_fused_attention(block: Block, run: Execution) -> bool:
    """Whether attention and rotary embedding are one operation (see `FusedAttention`)."""
    return run.has_flash_attention and block.kind.has_fused_attention


# ------------------------------------------------------------------------------------------------------- norms and MLPs


def kept_by_norm(kind: BlockKind | None, run: Execution) -> int:
    """Bytes that one norm keeps per number of its input, except that number itself."""
    if kind is None or kind.has_layer_norms or (run.has_kernels and kind.has_fused_norms):
        return 0
    normalised = 1 if run.trains_all else 0  # for the gradient of the norm's own weight
    if kind.has_fused_norms and run.itemsize == FP32:
        return FP32 * normalised
    # It keeps fp32 tensors instead of its input: the input, and the input minus its mean.
    return FP32 * ((1 if kind.has_fused_norms else 2) + normalised) - run.itemsize


def kept_by_norms(block: Block, head_size: int, run: Execution) -> int:
    """Bytes per token that autograd keeps of the inputs and outputs of a block's norms."""
    kind = block.kind
    of_heads = block.queries + block.keys if kind.has_head_norms else 0
    states = kind.num_reads + (0 if recomputes_norms(kind, run) else kind.num_norm_outputs)
    # In fp32: 1/rms, or mean and 1/std.
    scales = (2 if kind.has_layer_norms else 1) * kind.num_norms + of_heads // head_size
    numbers = kind.num_norms * block.hidden + of_heads
    return run.itemsize * states * block.hidden + numbers * kept_by_norm(kind, run) + FP32 * scales


def recomputes_norms(kind: BlockKind, run: Execution) -> bool:
    """Whether the outputs of norms are recomputed in the backward pass instead of kept."""
    return not run.trains_all and run.has_kernels and kind.has_fused_norms


def kept_by_mlp(block: Block, run: Execution) -> int:
    """Bytes per token that autograd keeps in a block's MLP, except its input and what LoRA keeps."""
    is_ours, numbers = _runs_fused_mlp(block, run), block.gate_and_up
    if run.trains_all or not is_ours:
        numbers += block.intermediate  # the last layer's input
    if block.has_gate and not is_ours:
        numbers += block.intermediate  # the activated gate
    return run.itemsize * numbers


def gradients_in_mlp(block: Block, run: Execution) -> int:
    """Bytes per token of the gradients in an MLP's backward pass: of gate, up and the last layer's input.

    In the model's own code the gradient of that input reuses the memory of what was kept, so it is not counted here.
    """
    return run.itemsize * (block.gate_and_up + (block.intermediate if _runs_fused_mlp(block, run) else 0))


def backward_of_mlp(block: Block, tokens: int, run: Execution) -> int:
    """Bytes that a block's MLP takes in its backward pass, beside what is kept.

    Includes gradients of hidden states, before and after each norm that follows attention or MLP; and, if all weights
    are trained, the gradient of one weight.
    """
    states = (2 + block.kind.num_norms - block.kind.num_norm_outputs) * block.hidden
    weight_gradient = block.mlp_out.size if run.trains_all else 0
    return tokens * gradients_in_mlp(block, run) + run.itemsize * (tokens * states + weight_gradient)


def temporary_in_mlp(block: Block, run: Execution) -> int:
    """Bytes per row that the model's own MLP allocates and frees; 0 if our gate replaces its own.

    These are the activated gate, and gradients of it and of gate and up.
    """
    if _runs_fused_mlp(block, run):
        return 0
    return run.itemsize * (block.gate_and_up + (block.intermediate if block.has_gate else 0))


def _runs_fused_mlp(block: Block, run: Execution) -> bool:
    return run.has_kernels and block.kind.has_fused_mlp


# ------------------------------------------------------------------------------------------------------------- adapters


def kept_by_lora(layers: int, run: Execution) -> int:
    """Bytes per token that autograd keeps of the adapters of `layers` layers: x Aᵀ, as wide as the rank."""
    return run.itemsize * run.rank * layers


# ------------------------------------------------------------------------------------------------------- MLPs in chunks


def rows_per_chunk(tokens: int) -> int:
    """Number of rows of a batch of `tokens` that an MLP computes at once."""
    return min(tokens, CHUNK_ROWS)


def kept_by_chunks(block: Block, run: Execution) -> int:
    """Bytes per token that autograd keeps of a chunked MLP: its input, unless a norm's output is kept anyway."""
    return run.itemsize * block.hidden if recomputes_norms(block.kind, run) and block.kind.num_norm_outputs else 0


def backward_of_chunks(block: Block, tokens: int, bytes_per_row: int, run: Execution) -> int:
    """Bytes that a chunked MLP takes in its backward pass: one chunk, and the gradients that all chunks add to.

    The latter are the gradient of its input and, if all weights are trained, those of its weights, one of which exists
    twice while it is summed.
    """
    weight_gradients = 4 * block.mlp_out.size if run.trains_all else 0
    return rows_per_chunk(tokens) * bytes_per_row + run.itemsize * (tokens * 3 * block.hidden + weight_gradients)


def parameters_recomputed_in_chunks(block: Block) -> int:
    """Parameters whose products the backward pass of a chunked MLP recomputes: all but the last layer's."""
    return sum(linear.size for linear in block.mlp_in) if block.kind else 0


# ------------------------------------------------------------------------------------------------------------- the loss


def logits_at_once(loss_rows: int, vocabulary: int, max_logits: int) -> int:
    """Number of logits that exist at once: of as many loss rows as `max_logits` allows, but at least one."""
    return vocabulary * min(loss_rows, max(1, max_logits // vocabulary))


def bytes_of_loss(loss_rows: int, logits: int, hidden: int, run: Execution, *, with_gradients: bool) -> int:
    """Bytes that the loss takes: logits, the loss rows' hidden states, and the gradients of these.

    Gradients of logits overwrite them. Without our kernels the softmax is added, and an fp32 copy of 16-bit logits.
    """
    states = 3 if with_gradients and run.trains_all else 2
    in_fp32 = 0 if run.has_kernels else 1 if run.itemsize == FP32 else 2
    return logits * (run.itemsize + FP32 * in_fp32) + run.itemsize * states * loss_rows * hidden


def kept_by_loss(loss_rows: int, hidden: int, run: Execution) -> int:
    """Bytes that autograd keeps of the loss: with a frozen head, the gradient of the hidden states."""
    return 0 if run.trains_all else run.itemsize * loss_rows * hidden


# ----------------------------------------------------------------------------------------------------- a tied embedding


def has_one_gradient(shape: DecoderShape) -> bool:
    """Whether embedding and head, if trained, share one gradient on active rows."""
    return shape.is_tied and shape.has_plain_embedding and shape.is_hoisted


# ---------------------------------------------------------------------------------------------------------- checkpoints


def inputs_on_device(checkpoints: int, *, offload: bool) -> int:
    """Number of inputs of checkpointed blocks that the device keeps; with `offload`, only the last one."""
    return min(1, checkpoints) if offload else checkpoints


def max_inputs_on_device(checkpoints: int, *, offload: bool) -> int:
    """The same while a block is recomputed: an offloaded input is fetched while the next one is used."""
    return inputs_on_device(checkpoints, offload=offload) + offload


def parameters_recomputed(block: Block) -> int:
    """Parameters whose products are recomputed for a checkpointed block; a known one stops before the last layer's."""
    return block.parameters - (block.mlp_out.size if block.kind else 0)


# ------------------------------------------------------------------------------------------------------ joined weights


def joined_bytes(block: Block, rank: int, itemsize: int) -> int:
    """What lies beside a block's weights that are joined with their adapters: the adapters' B, and a filler."""
    kind, beside = block.kind, 0
    groups = [(path,) for path in block.linears]
    if kind is not None:
        groups = [kind.attention_in, (kind.attention_out,), kind.mlp_in, (kind.mlp_out,)]
    for paths in groups:
        inputs = block.linears[paths[0]].inputs
        if len(paths) * rank * itemsize > MAX_JOINED_RANK_BYTES:
            continue
        width = (inputs + len(paths) * rank) * itemsize
        filled = -(-width // JOINED_ROW_UNIT) * JOINED_ROW_UNIT
        beside += (filled - inputs * itemsize) * sum(block.linears[path].outputs for path in paths)
    return beside
