"""Counts the memory of a micro-batch in addition to weights, gradients and moments: what autograd keeps, and the peak.

A block that runs on active rows keeps the sum of what its patches keep (see `sparse.patches.counts`). Any other block
keeps the input and output of every linear layer, and the hidden states around them. A block in an activation checkpoint
keeps its input.

All figures are bytes.
"""

from dataclasses import dataclass
from functools import cached_property

from sebp_edge.engine.memory.setup import TrainingSetup
from sebp_edge.engine.models.shape import Block, DecoderShape, Kept
from sebp_edge.engine.sparse.patches.counts import (
    FP32,
    Execution,
    backward_of_attention,
    backward_of_chunks,
    backward_of_mlp,
    bytes_of_loss,
    gradients_in_mlp,
    has_one_gradient,
    inputs_on_device,
    kept_by_attention,
    kept_by_chunks,
    kept_by_lora,
    kept_by_loss,
    kept_by_mlp,
    kept_by_norm,
    kept_by_norms,
    logits_at_once,
    max_inputs_on_device,
    rows_per_chunk,
    temporary_in_attention,
    temporary_in_mlp,
)
from sebp_edge.engine.sparse.rows.buckets import Bucket


@dataclass(frozen=True)
class Peak:
    """Bytes of a micro-batch at its peak: those of activations, and those of the loss and its gradients."""

    activations: int
    loss: int

    @property
    def total(self) -> int:
        return self.activations + self.loss


@dataclass(frozen=True)
class Activations:
    """Counts the activations of a training's micro-batches."""

    setup: TrainingSetup

    def step(self, sizes: Bucket) -> Peak:
        """Returns the peak of a micro-batch with gradients.

        The loss and the head's gradient come first, while everything is kept; then the backward passes of the blocks,
        one after another; the embedding's gradient comes last. When a block in a checkpoint is recomputed, the blocks
        outside checkpoints have freed what they kept. A tied head's gradient waits for the embedding's.
        """
        head = 0 if self.setup.is_lora else self.setup.itemsize * self._shape.head_parameters
        waiting_gradient = head if self._shape.is_tied else 0
        embedding_gradient = 0 if has_one_gradient(self._shape) else head
        loss, kept, backward = self._loss(sizes, with_gradients=True), self.kept(sizes), self._backward(sizes)
        peaks = [kept + loss + head, kept + backward + waiting_gradient, waiting_gradient + embedding_gradient]
        if self.setup.options.checkpoints:
            of_rows = map(self._padded_bytes, self._shape.distinct_blocks)
            recomputed = sizes.tokens * self._recomputed_per_token + self._padded_rows(sizes) * max(of_rows)
            peaks.append(recomputed + backward + waiting_gradient)
        return Peak(max(peaks) - loss - head, loss + head)

    def evaluation(self, sizes: Bucket) -> Peak:
        """Returns the peak of a micro-batch without gradients, which runs one block at a time."""
        loss = self._loss(sizes, with_gradients=False)
        return Peak(max(0, self._backward(sizes) - loss), loss)

    def kept(self, sizes: Bucket) -> int:
        """Returns the bytes that autograd keeps of a micro-batch between forward and backward pass."""
        of_loss = kept_by_loss(sizes.loss_rows, self._shape.hidden, self._execution)
        padded = self._padded_rows(sizes) * sum(
            map(self._padded_bytes, self._shape.blocks[self.setup.options.checkpoints :])
        )
        return sizes.tokens * self._kept_per_token + padded + of_loss

    def widest(self, sizes: Bucket) -> int:
        """Returns the size of the widest tensor: gate and up, or queries, keys and values, or logits."""
        rows = self._mlp_rows(sizes.tokens)
        numbers = [self._logits(sizes)]
        for block in self._shape.distinct_blocks:
            if block.kind is None:
                numbers.append(sizes.tokens * max(linear.outputs for linear in block.linears.values()))
            else:
                numbers += [rows * block.gate_and_up, sizes.tokens * (block.queries + 2 * block.keys)]
        return self.setup.itemsize * max(numbers)

    def temporary(self, sizes: Bucket) -> int:
        """Returns the bytes that a model family's own code allocates and frees within a block."""
        of_tokens, of_rows, run = sizes.tokens, self._mlp_rows(sizes.tokens), self._execution
        known = (block for block in self._shape.distinct_blocks if block.kind is not None)
        each = (of_tokens * temporary_in_attention(one, run) + of_rows * temporary_in_mlp(one, run) for one in known)
        return max(each, default=0)

    # -------------------------------------------------------------------------------------------------- kept per token

    @cached_property
    def _kept_per_token(self) -> int:
        options = self.setup.options
        inputs = inputs_on_device(options.checkpoints, offload=options.offload)
        of_each = list(map(self._block_bytes_per_token, self._shape.distinct_blocks))
        blocks = sum(of_each[number] for number in self._shape.order[options.checkpoints :])
        return self._bytes_of_inputs(inputs) + blocks + self._kept_outside_blocks()

    @cached_property
    def _recomputed_per_token(self) -> int:
        """Bytes kept per token while a block in a checkpoint is recomputed: the checkpoints' inputs, and that block."""
        options = self.setup.options
        inputs = max_inputs_on_device(options.checkpoints, offload=options.offload)
        return self._bytes_of_inputs(inputs) + max(map(self._block_bytes_per_token, self._shape.distinct_blocks))

    def _padded_bytes(self, block: Block) -> int:
        """Bytes that a block keeps per row of padded texts, in layers whose state restarts at each text."""
        return 0 if block.kept is None else self._kept(block.kept)[1]

    def _kept(self, kept: Kept) -> tuple[int, int]:
        return kept.by_run[2 * self._execution.trains_all + self.setup.itemsize // 4]

    def _padded_rows(self, sizes: Bucket) -> int:
        """Rows of padded texts, in layers whose state restarts at each text; 0 without these."""
        multiple = self._shape.multiple_of_padded
        return sizes.padded_rows(multiple, with_filler=self.setup.on_gpu) if multiple else 0

    def _bytes_of_inputs(self, number: int) -> int:
        return self.setup.itemsize * number * self._shape.hidden

    def _block_bytes_per_token(self, block: Block) -> int:
        if block.kept is not None:
            return self._kept(block.kept)[0] + kept_by_lora(len(block.linears), self._execution)
        if block.kind is None:
            numbers = sum(linear.features for linear in block.linears.values()) + 4 * self._shape.hidden
            return self.setup.itemsize * numbers + FP32 * 2 + kept_by_lora(len(block.linears), self._execution)
        norms = kept_by_norms(block, self._shape.head_size, self._execution)
        attention = kept_by_attention(block, self._shape.head_size, self._execution)
        attention += kept_by_lora(len(block.kind.attention_in) + 1, self._execution)
        is_chunked = self.setup.options.chunked_blocks
        return (
            norms
            + attention
            + (kept_by_chunks(block, self._execution) if is_chunked else self._mlp_bytes_per_token(block))
        )

    def _mlp_bytes_per_token(self, block: Block) -> int:
        return kept_by_mlp(block, self._execution) + kept_by_lora(len(block.kind.mlp_in) + 1, self._execution)

    def _kept_outside_blocks(self) -> int:
        """Returns the bytes kept per token outside of blocks.

        These are the last norm's input, the head's input if all weights are trained, and two sets of rotary angles: for
        blocks with a window and for those without.
        """
        shape, itemsize = self._shape, self.setup.itemsize
        if shape.kept_outside is not None:
            return self._kept(shape.kept_outside)[0]
        states = (1 if self.setup.is_lora else 2) * shape.hidden
        of_norm = shape.hidden * kept_by_norm(shape.blocks[-1].kind, self._execution)
        return itemsize * (states + 4 * shape.head_size) + of_norm

    # ----------------------------------------------------------------------------------------------- allocated at once

    def _backward(self, sizes: Bucket) -> int:
        """Returns the peak of a block's backward pass, in addition to what is kept."""
        return max(self._backward_of(block, sizes) for block in self._shape.distinct_blocks)

    def _backward_of(self, block: Block, sizes: Bucket) -> int:
        if block.kind is None:
            widest = max((max(linear.inputs, linear.outputs) for linear in block.linears.values()), default=0)
            of_states = self._padded_rows(sizes) * self._padded_bytes(block)
            return self.setup.itemsize * sizes.tokens * (3 * widest + 2 * self._shape.hidden) + of_states
        head_size, mlp_bytes_per_token = self._shape.head_size, self._mlp_bytes_per_token(block)
        if self.setup.options.chunked_blocks:
            attention = backward_of_attention(block, head_size, sizes, self._execution, heads_in_groups=True)
            bytes_per_row = gradients_in_mlp(block, self._execution) + mlp_bytes_per_token
            return max(attention, backward_of_chunks(block, sizes.tokens, bytes_per_row, self._execution))
        # By then the MLP has freed what it kept.
        attention = backward_of_attention(block, head_size, sizes, self._execution) - sizes.tokens * mlp_bytes_per_token
        return max(attention, backward_of_mlp(block, sizes.tokens, self._execution))

    def _loss(self, sizes: Bucket, *, with_gradients: bool) -> int:
        hidden = self._shape.hidden
        return bytes_of_loss(
            sizes.loss_rows, self._logits(sizes), hidden, self._execution, with_gradients=with_gradients
        )

    def _logits(self, sizes: Bucket) -> int:
        return logits_at_once(sizes.loss_rows, self._shape.vocabulary, self.setup.options.max_logits)

    def _mlp_rows(self, tokens: int) -> int:
        return rows_per_chunk(tokens) if self.setup.options.chunked_blocks else tokens

    @property
    def _shape(self) -> DecoderShape:
        return self.setup.shape

    @cached_property
    def _execution(self) -> Execution:
        return self.setup.execution
