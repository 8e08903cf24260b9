"""Counts the memory of patched blocks: what each patch keeps, takes and recomputes, in bytes.

Sizes only, no tensors: a plan imports no torch. The patches beside this file do what is counted here; tests compare
the counts with what autograd really keeps.
"""

from typing import NamedTuple

from sebp_edge.basics.flash_attention import MAX_FLASH_HEAD, MAX_SHORT_LENGTH, dq_buffer_bytes
from sebp_edge.engine.models.shape import Block, BlockKind, DecoderShape, HeadsShape, Kept, RuleShape
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
# Rows of a chunk of linear attention, and numbers computed at once where no kernels run (`ops/chunked_rule.py`).
RULE_CHUNK, RULE_NUMBERS = 32, 2**21


class Execution(NamedTuple):
    """How a decoder's blocks run in a training; counts what that takes."""

    rank: int  # of the LoRA adapter on every linear layer; 0 if all weights are trained
    itemsize: int  # bytes of one number of the base model and of activations
    on_gpu: bool  # whether the device is an NVIDIA GPU, with captured graphs
    has_kernels: bool  # whether norms, gates and the loss run on our kernels

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

    def kept_by_attention(self, block: Block, head_size: int) -> int:
        """Bytes per token that autograd keeps in a block's attention, except the inputs of norms and projections."""
        rotated = block.queries + block.keys
        numbers, others = 2 * block.queries + 2 * block.keys, 0  # queries, keys, values and the output
        if self._runs_fused_attention(block):
            if block.kind.has_head_norms:
                others += rotated  # before their norms and after
        else:
            # Rotation makes new tensors. Its inputs stay too, if they share the values' storage or a norm keeps them.
            is_cast = self.attention_itemsize > self.itemsize
            shares_storage = not is_cast and (not self.trains_all or len(block.kind.attention_in) == 1)
            if block.kind.has_rotary and (shares_storage or block.kind.has_head_norms):
                others += rotated
            if not self.has_flash_attention:
                others += block.queries  # the output of each sequence, and all of them concatenated
        # And the log of each head's softmax sum.
        return self.attention_itemsize * numbers + self.itemsize * others + FP32 * (block.queries // head_size)

    def backward_of_attention(
        self, block: Block, head_size: int, sizes: Bucket, *, heads_in_groups: bool = False
    ) -> int:
        """Bytes that a block's attention takes in its backward pass, beside what is kept; 0 if it runs by sequence.

        These are dout, dq, dk and dv, before and after they are rotated back. Sequences that are not short add dk and
        dv of each query head and the fp32 sums of dq. Heads in groups, which keep these sums below `MAX_DQ_BYTES`, add
        copies of one group's out and dout.
        """
        if not self.has_flash_attention:
            return 0
        queries, keys, dq_bytes, num_groups = block.queries, block.keys, 0, 1
        if sizes.longest > MAX_SHORT_LENGTH:
            dq_bytes = dq_buffer_bytes(sizes.tokens, queries // head_size, head_size, sizes.sequences)
        if heads_in_groups and self._runs_fused_attention(block):
            num_groups = min(max(1, -(-dq_bytes // MAX_DQ_BYTES)), keys // head_size)
        per_group = queries + 2 * keys + (2 * queries if dq_bytes else 0) + (2 * queries if num_groups > 1 else 0)
        numbers = block.hidden + 2 * queries + 2 * keys
        return int(sizes.tokens * self.itemsize * (numbers + per_group / num_groups) + dq_bytes / num_groups)

    def _sums_in_attention(self, heads: HeadsShape, sizes: Bucket) -> int:
        """Bytes that flash attention adds in its backward pass: dq in fp32, and dk and dv of each query head."""
        is_flash = sizes.longest > MAX_SHORT_LENGTH and heads.size <= MAX_FLASH_HEAD
        if not (self.has_flash_attention and is_flash):
            return 0
        dq_bytes = dq_buffer_bytes(sizes.tokens, heads.number, heads.size, sizes.slots)
        return dq_bytes + self.itemsize * sizes.tokens * 2 * heads.number * heads.size

    def temporary_in_attention(self, block: Block) -> int:
        """Bytes per token that the model's own rotation allocates and frees; 0 if ours replaces it.

        These are queries and keys: times cosines, with their halves swapped, times sines, and the sums.
        """
        return 0 if self._runs_fused_attention(block) else self.itemsize * 4 * (block.queries + block.keys)

    def _runs_fused_attention(self, block: Block) -> bool:
        """Whether attention and rotary embedding are one operation (see `FusedAttention`)."""
        return self.has_flash_attention and block.kind.has_fused_attention

    def kept_by_norm(self, kind: BlockKind | None) -> int:
        """Bytes that one norm keeps per number of its input, except that number itself."""
        if kind is None or kind.has_layer_norms or (self.has_kernels and kind.has_fused_norms):
            return 0
        normalised = 1 if self.trains_all else 0  # for the gradient of the norm's own weight
        if kind.has_fused_norms and self.itemsize == FP32:
            return FP32 * normalised
        # It keeps fp32 tensors instead of its input: the input, and the input minus its mean.
        return FP32 * ((1 if kind.has_fused_norms else 2) + normalised) - self.itemsize

    def kept_by_norms(self, block: Block, head_size: int) -> int:
        """Bytes per token that autograd keeps of the inputs and outputs of a block's norms."""
        kind = block.kind
        of_heads = block.queries + block.keys if kind.has_head_norms else 0
        states = kind.num_reads + (0 if self.recomputes_norms(kind) else kind.num_norm_outputs)
        # In fp32: 1/rms, or mean and 1/std.
        scales = (2 if kind.has_layer_norms else 1) * kind.num_norms + of_heads // head_size
        numbers = kind.num_norms * block.hidden + of_heads
        return self.itemsize * states * block.hidden + numbers * self.kept_by_norm(kind) + FP32 * scales

    def recomputes_norms(self, kind: BlockKind) -> bool:
        """Whether the outputs of norms are recomputed in the backward pass instead of kept."""
        return not self.trains_all and self.has_kernels and kind.has_fused_norms

    def kept_by_mlp(self, block: Block) -> int:
        """Bytes per token that autograd keeps in a block's MLP, except its input and what LoRA keeps."""
        is_ours, numbers = self._runs_fused_mlp(block), block.gate_and_up
        if self.trains_all or not is_ours:
            numbers += block.intermediate  # the last layer's input
        if block.has_gate and not is_ours:
            numbers += block.intermediate  # the activated gate
        return self.itemsize * numbers

    def gradients_in_mlp(self, block: Block) -> int:
        """Bytes per token of the gradients in an MLP's backward pass: of gate, up and the last layer's input.

        In the model's own code the gradient of that input reuses the memory of what was kept, and is not counted.
        """
        return self.itemsize * (block.gate_and_up + (block.intermediate if self._runs_fused_mlp(block) else 0))

    def backward_of_mlp(self, block: Block, tokens: int) -> int:
        """Bytes that a block's MLP takes in its backward pass, beside what is kept.

        Includes gradients of hidden states, before and after each norm that follows attention or MLP; and, if all
        weights are trained, the gradient of one weight.
        """
        states = (2 + block.kind.num_norms - block.kind.num_norm_outputs) * block.hidden
        weight_gradient = block.mlp_out.size if self.trains_all else 0
        return tokens * self.gradients_in_mlp(block) + self.itemsize * (tokens * states + weight_gradient)

    def temporary_in_mlp(self, block: Block) -> int:
        """Bytes per row that the model's own MLP allocates and frees; 0 if our gate replaces its own.

        These are the activated gate, and gradients of it and of gate and up.
        """
        if self._runs_fused_mlp(block):
            return 0
        return self.itemsize * (block.gate_and_up + (block.intermediate if block.has_gate else 0))

    def _runs_fused_mlp(self, block: Block) -> bool:
        return self.has_kernels and block.kind.has_fused_mlp

    def taken_by_attention(self, kept: Kept | None, sizes: Bucket, *, with_gradients: bool) -> int:
        """Bytes that attention allocates and frees in a block of no known kind, beside its inputs and results."""
        if kept is not None and kept.rule is not None:
            return self._temporary_in_rule(kept.rule, sizes, with_gradients=with_gradients)
        if kept is not None and kept.heads is not None and with_gradients:
            return self._sums_in_attention(kept.heads, sizes)
        return 0

    def _temporary_in_rule(self, rule: RuleShape, sizes: Bucket, *, with_gradients: bool) -> int:
        """Bytes that linear attention allocates and frees in a layer: of each chunk, a matrix of its rows.

        The kernels' backward pass adds two numbers for each of values and keys, and the states before all chunks but a
        text's first one, with their gradients.
        """
        num_chunks = (sizes.tokens + (RULE_CHUNK - 1) * (sizes.slots if self.on_gpu else sizes.sequences)) // RULE_CHUNK
        if not self.has_kernels:
            return FP32 * self._numbers_in_plain_rule(rule, sizes.tokens, num_chunks) // (1 if with_gradients else 2)
        numbers = num_chunks * RULE_CHUNK**2
        if with_gradients:
            numbers += 2 * ((sizes.tokens - 1) // RULE_CHUNK) * rule.key_size * rule.value_size
            numbers += 2 * sizes.tokens * (rule.key_size + rule.value_size)
        return FP32 * rule.heads * numbers

    def _numbers_in_plain_rule(self, rule: RuleShape, tokens: int, num_chunks: int) -> int:
        """Numbers that linear attention takes in plain PyTorch in its backward pass, as measured.

        These are the gradients of its inputs, and copies of them in fp32; and what autograd keeps of a few heads.
        """
        heads, rows = _heads_at_once(rule, tokens), RULE_CHUNK * num_chunks
        of_inputs = tokens * (2 * rule.keys * rule.key_size + rule.heads * rule.value_size)
        of_keys = 4 * rows * min(heads, rule.keys) * rule.key_size
        of_values = (
            14 * rows * rule.value_size + 5 * rows * RULE_CHUNK + 3 * num_chunks * rule.key_size * rule.value_size
        )
        return (1 if self.itemsize == FP32 else 2) * of_inputs + of_keys + heads * of_values

    def kept_by_lora(self, layers: int) -> int:
        """Bytes per token that autograd keeps of the adapters of `layers` layers: x Aᵀ, as wide as the rank."""
        return self.itemsize * self.rank * layers

    def kept_by_chunks(self, block: Block) -> int:
        """Bytes per token that autograd keeps of a chunked MLP: its input, unless a norm's output is kept anyway."""
        return self.itemsize * block.hidden if self.recomputes_norms(block.kind) and block.kind.num_norm_outputs else 0

    def backward_of_chunks(self, block: Block, tokens: int, bytes_per_row: int) -> int:
        """Bytes that a chunked MLP takes in its backward pass: one chunk, and the gradients that all chunks add to.

        The latter are the gradient of its input and, if all weights are trained, those of its weights, one of which
        exists twice while it is summed.
        """
        weight_gradients = 4 * block.mlp_out.size if self.trains_all else 0
        return rows_per_chunk(tokens) * bytes_per_row + self.itemsize * (tokens * 3 * block.hidden + weight_gradients)

    def bytes_of_loss(self, loss_rows: int, logits: int, hidden: int, *, with_gradients: bool) -> int:
        """Bytes that the loss takes: logits, the loss rows' hidden states, and the gradients of these.

        Gradients of logits overwrite them. Without our kernels the softmax is added, and an fp32 copy of 16-bit logits.
        """
        states = 3 if with_gradients and self.trains_all else 2
        in_fp32 = 0 if self.has_kernels else 1 if self.itemsize == FP32 else 2
        return logits * (self.itemsize + FP32 * in_fp32) + self.itemsize * states * loss_rows * hidden

    def kept_by_loss(self, loss_rows: int, hidden: int) -> int:
        """Bytes that autograd keeps of the loss: with a frozen head, the gradient of the hidden states."""
        return 0 if self.trains_all else self.itemsize * loss_rows * hidden


def _heads_at_once(rule: RuleShape, tokens: int) -> int:
    """Heads of values that linear attention without kernels computes at once."""
    per_key, most = rule.heads // rule.keys, max(1, RULE_NUMBERS // (tokens * rule.value_size))
    if most >= per_key:
        return min(rule.heads, most // per_key * per_key)
    return max(number for number in range(1, most + 1) if per_key % number == 0)


def rows_per_chunk(tokens: int) -> int:
    """Number of rows of a batch of `tokens` that an MLP computes at once."""
    return min(tokens, CHUNK_ROWS)


def parameters_recomputed_in_chunks(block: Block) -> int:
    """Parameters whose products the backward pass of a chunked MLP recomputes: all but the last layer's."""
    return sum(linear.size for linear in block.mlp_in) if block.kind else 0


def has_one_gradient(shape: DecoderShape) -> bool:
    """Whether embedding and head, if trained, share one gradient on active rows."""
    return shape.is_tied and shape.has_plain_embedding and shape.is_hoisted


def parameters_recomputed(block: Block) -> int:
    """Parameters whose products are recomputed for a checkpointed block; a known one stops before the last layer's."""
    return block.parameters - (block.mlp_out.size if block.kind else 0)


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
