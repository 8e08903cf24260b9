"""Counts the memory of a micro-batch in addition to weights, gradients and moments: what autograd keeps, and the peak.

A block that runs on active rows keeps the sum of what its patches keep (see `sparse.patches.counts`). Any other block
keeps the input and output of every linear layer, and the hidden states around them. A block in an activation checkpoint
keeps its input.

All figures are bytes.
"""

from dataclasses import dataclass
from functools import cached_property

from sebp_edge.engine.memory.setup import TrainingSetup
from sebp_edge.engine.models.shape import Block, Kept
from sebp_edge.engine.sparse.patches.counts import FP32, has_one_gradient, rows_per_chunk
from sebp_edge.engine.sparse.rows.buckets import Bucket


@dataclass(frozen=True)
class Peak:
    """Bytes of a micro-batch at its peak: those of activations, and those of the loss and its gradients."""

    activations: int
    loss: int

    @property
    def total(self) -> int:
        return self.activations + self.loss


class Activations:
    """Counts the activations of a training's micro-batches."""

    def __init__(self, setup: TrainingSetup):
        self._setup, self._shape, self._options, self._run = setup, setup.shape, setup.options, setup.execution

    def step(self, sizes: Bucket) -> Peak:
        """Returns the peak of a micro-batch with gradients.

        The loss and the head's gradient come first, while everything is kept; then the backward passes of the blocks,
        one after another; the embedding's gradient comes last. When a block in a checkpoint is recomputed, the blocks
        outside checkpoints have freed what they kept. A tied head's gradient waits for the embedding's.
        """
        head = 0 if self._setup.is_lora else self._setup.itemsize * self._shape.head_parameters
        waiting_gradient = head if self._shape.is_tied else 0
        embedding_gradient = 0 if has_one_gradient(self._shape) else head
        loss, kept = self._loss(sizes, with_gradients=True), self.kept(sizes)
        backward = waiting_gradient + self._backward(sizes, kept)
        return Peak(max(kept + loss + head, backward, waiting_gradient + embedding_gradient) - loss - head, loss + head)

    def evaluation(self, sizes: Bucket) -> Peak:
        """Returns the peak of a micro-batch without gradients, which runs one block at a time."""
        loss = self._loss(sizes, with_gradients=False)
        each = (self._backward_of(block, sizes, with_gradients=False) for block in self._shape.distinct_blocks)
        return Peak(max(0, max(each) - loss), loss)

    def kept(self, sizes: Bucket) -> int:
        """Returns the bytes that autograd keeps of a micro-batch between forward and backward pass."""
        of_loss = self._run.kept_by_loss(sizes.loss_rows, self._shape.hidden)
        return sizes.tokens * self._kept_per_token + of_loss

    def widest(self, sizes: Bucket) -> int:
        """Returns the size of the widest tensor: gate and up, or queries, keys and values, or logits."""
        rows, numbers = self._mlp_rows(sizes.tokens), [self._logits(sizes)]
        for block in self._shape.distinct_blocks:
            if block.kind is None:
                numbers.append(sizes.tokens * max(linear.outputs for linear in block.linears.values()))
            else:
                numbers += [rows * block.gate_and_up, sizes.tokens * (block.queries + 2 * block.keys)]
        return self._setup.itemsize * max(numbers)

    def temporary(self, sizes: Bucket) -> int:
        """Returns the bytes that a model family's own code allocates and frees within a block."""
        tokens, rows, run = sizes.tokens, self._mlp_rows(sizes.tokens), self._run
        known = (block for block in self._shape.distinct_blocks if block.kind is not None)
        each = (tokens * run.temporary_in_attention(block) + rows * run.temporary_in_mlp(block) for block in known)
        return max(each, default=0)

    # -------------------------------------------------------------------------------------------------- kept per token

    @cached_property
    def _kept_per_token(self) -> int:
        of_each = list(map(self._block_bytes_per_token, self._shape.distinct_blocks))
        blocks = sum(of_each[number] for number in self._shape.order[self._options.checkpoints :])
        return self._bytes_of_inputs(self._inputs_on_device) + blocks + self._kept_outside_blocks()

    @property
    def _inputs_on_device(self) -> int:
        """Number of inputs of checkpointed blocks that the device keeps; if they are offloaded, only the last one."""
        return min(1, self._options.checkpoints) if self._options.offload else self._options.checkpoints

    def _kept(self, kept: Kept) -> int:
        """Bytes of each token."""
        run = 2 * self._run.trains_all + self._setup.itemsize // FP32
        return (kept.by_run_of_kernels if self._run.has_kernels else kept.by_run)[run]

    def _bytes_of_inputs(self, number: int) -> int:
        return self._setup.itemsize * number * self._shape.hidden

    def _block_bytes_per_token(self, block: Block) -> int:
        if block.kept is not None:
            return self._kept(block.kept) + self._run.kept_by_lora(len(block.linears))
        if block.kind is None:
            numbers = sum(linear.features for linear in block.linears.values()) + 4 * self._shape.hidden
            return self._setup.itemsize * numbers + FP32 * 2 + self._run.kept_by_lora(len(block.linears))
        run, head_size = self._run, self._shape.head_size
        attention = run.kept_by_attention(block, head_size) + run.kept_by_lora(len(block.kind.attention_in) + 1)
        mlp = run.kept_by_chunks(block) if self._options.chunked_blocks else self._mlp_bytes_per_token(block)
        return run.kept_by_norms(block, head_size) + attention + mlp

    def _mlp_bytes_per_token(self, block: Block) -> int:
        return self._run.kept_by_mlp(block) + self._run.kept_by_lora(len(block.kind.mlp_in) + 1)

    def _kept_outside_blocks(self) -> int:
        """Returns the bytes kept per token outside of blocks.

        These are the last norm's input, the head's input if all weights are trained, and two sets of rotary angles: for
        blocks with a window and for those without.
        """
        shape, itemsize = self._shape, self._setup.itemsize
        if shape.kept_outside is not None:
            return self._kept(shape.kept_outside)
        states = (1 if self._setup.is_lora else 2) * shape.hidden
        of_norm = shape.hidden * self._run.kept_by_norm(shape.blocks[-1].kind)
        return itemsize * (states + 4 * shape.head_size) + of_norm

    # ----------------------------------------------------------------------------------------------- allocated at once

    def _backward(self, sizes: Bucket, kept: int) -> int:
        """Returns the peak of the blocks' backward passes, the last one first, if all of them keep so many bytes.

        When a block in a checkpoint is recomputed, the blocks outside checkpoints have freed what they kept.
        """
        blocks, order, checkpoints = self._shape.distinct_blocks, self._shape.order, self._options.checkpoints
        kept_by, left = [sizes.tokens * self._block_bytes_per_token(block) for block in blocks], {}
        for number in reversed(order[checkpoints:]):
            left.setdefault(number, kept)  # when the last of these blocks has its turn
            kept -= kept_by[number]
        # An offloaded input is fetched while the next one is used.
        inputs = sizes.tokens * self._bytes_of_inputs(self._inputs_on_device + self._options.offload)
        recomputed = [(number, inputs + kept_by[number]) for number in order[:checkpoints]]
        found = {*left.items(), *recomputed}
        return max(each + self._backward_of(blocks[number], sizes, with_gradients=True) for number, each in found)

    def _backward_of(self, block: Block, sizes: Bucket, *, with_gradients: bool) -> int:
        """Returns the peak of a block's backward pass, in addition to what is kept; without gradients, a bound."""
        if block.kind is None:
            widest = max((max(linear.inputs, linear.outputs) for linear in block.linears.values()), default=0)
            hidden, bytes_each = self._shape.hidden, self._setup.itemsize * sizes.tokens
            beside = self._run.taken_by_attention(block.kept, sizes, with_gradients=with_gradients)
            # While attention runs, the gradients of other layers are freed, or not there yet.
            return max(bytes_each * (3 * widest + 2 * hidden), bytes_each * (widest + 2 * hidden) + beside)
        head_size, mlp_bytes_per_token = self._shape.head_size, self._mlp_bytes_per_token(block)
        if self._options.chunked_blocks:
            attention = self._run.backward_of_attention(block, head_size, sizes, heads_in_groups=True)
            bytes_per_row = self._run.gradients_in_mlp(block) + mlp_bytes_per_token
            return max(attention, self._run.backward_of_chunks(block, sizes.tokens, bytes_per_row))
        # By then the MLP has freed what it kept.
        attention = self._run.backward_of_attention(block, head_size, sizes) - sizes.tokens * mlp_bytes_per_token
        return max(attention, self._run.backward_of_mlp(block, sizes.tokens))

    def _loss(self, sizes: Bucket, *, with_gradients: bool) -> int:
        hidden = self._shape.hidden
        return self._run.bytes_of_loss(sizes.loss_rows, self._logits(sizes), hidden, with_gradients=with_gradients)

    def _logits(self, sizes: Bucket) -> int:
        """Number of logits that exist at once: of as many loss rows as the options allow, but at least one."""
        vocabulary = self._shape.vocabulary
        return vocabulary * min(sizes.loss_rows, max(1, self._options.max_logits // vocabulary))

    def _mlp_rows(self, tokens: int) -> int:
        return rows_per_chunk(tokens) if self._options.chunked_blocks else tokens
