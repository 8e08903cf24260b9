"""Describes how a training runs: all that its memory depends on, except the sizes of its micro-batches."""

from dataclasses import dataclass

from sebp_edge.basics.flash_attention import HEAD_SIZES
from sebp_edge.engine.memory.memory_options import FASTEST, MemoryOptions
from sebp_edge.engine.models.four_bits import NF4_BYTES
from sebp_edge.engine.models.shape import Block, DecoderShape, spread
from sebp_edge.engine.sparse.patches.counts import (
    Execution,
    joined_bytes,
    parameters_recomputed,
    parameters_recomputed_in_chunks,
)
from sebp_edge.recipe import Recipe


@dataclass(frozen=True)
class TrainingSetup:
    """How a training of one recipe, with a value for every choice, runs on one device."""

    shape: DecoderShape
    recipe: Recipe
    on_gpu: bool
    has_kernels: bool
    itemsize: int
    options: MemoryOptions = FASTEST

    @property
    def is_lora(self) -> bool:
        return self.recipe.method == "lora"

    @property
    def execution(self) -> Execution:
        """What the patches must know to count memory."""
        return Execution(self.recipe.r if self.is_lora else 0, self.itemsize, self.on_gpu, self.has_kernels)

    @property
    def is_hoisted(self) -> bool:
        """Whether the model is expected to compute active rows only; the trial before the training decides."""
        return self.shape.is_hoisted

    @property
    def shares_prefixes(self) -> bool:
        """Whether what sequences begin with in common is expected to be computed once; a trial decides.

        On a GPU this takes our kernels of attention.
        """
        if not self.is_hoisted or self.shape.has_states or not self.on_gpu:
            return self.is_hoisted and not self.shape.has_states
        kinds = [block.kind for block in self.shape.distinct_blocks]
        blocks_fit = all(kind and kind.has_fused_attention and not kind.has_softcap for kind in kinds)
        return blocks_fit and self.has_kernels and self.itemsize == 2 and self.shape.head_size in HEAD_SIZES

    @property
    def num_trained(self) -> int:
        """Number of trained parameters."""
        return self.shape.adapter_parameters(self.recipe.r) if self.is_lora else self.shape.parameters

    @property
    def updates_in_backward(self) -> bool:
        """Whether all weights are trained in bf16: then moments take 8 bits, and gradients are not kept."""
        return not self.is_lora and self.itemsize == 2

    @property
    def recomputed_parameters(self) -> int:
        """Number of parameters that the backward pass multiplies by again, to recompute checkpoints and chunks."""
        blocks, number = self.shape.blocks, self.options.checkpoints
        num_recomputed = sum(map(parameters_recomputed, blocks[:number]))
        if self.options.chunked_blocks:
            num_recomputed += sum(map(parameters_recomputed_in_chunks, blocks[number:]))
        return num_recomputed

    @property
    def dequantised_parameters(self) -> int:
        """Number of parameters in 4 bits that are also in memory dequantised."""
        return sum(block.parameters for block in self.shape.blocks[: self.options.dequantised_blocks])

    @property
    def streamed_bytes(self) -> list[int]:
        """Bytes of the frozen matrices of each block that is streamed from host memory."""
        each = NF4_BYTES if self.recipe.load_in_4bit else self.itemsize
        return [int(each * block.parameters) for block in self._split_blocks[0]]

    @property
    def embeddings_on_host(self) -> int:
        """Bytes of the embeddings in host memory: of lookup tables, and beside streamed blocks of those not tied."""
        if not (self.is_lora and self.on_gpu):
            return 0
        first = self.shape.head_parameters if self.options.streamed_blocks and not self.shape.is_tied else 0
        return self.itemsize * (self.shape.table_parameters + first)

    @property
    def _split_blocks(self) -> tuple[list[Block], list[Block]]:
        """The blocks that are streamed, and the others."""
        streamed, split = spread(self.options.streamed_blocks, len(self.shape.blocks)), ([], [])
        for number, block in enumerate(self.shape.blocks):
            split[number not in streamed].append(block)
        return split

    @property
    def joined_bytes(self) -> int:
        """Bytes of the copies that lie beside weights which are joined with their adapters."""
        options, blocks = self.options, self._split_blocks[1]
        is_joined = self.is_lora and self.on_gpu and self.has_kernels and self.is_hoisted
        if not is_joined or options.checkpoints or options.chunked_blocks:
            return 0
        if self.recipe.load_in_4bit:
            blocks = blocks[: options.dequantised_blocks]
        return sum(joined_bytes(block, self.recipe.r, self.itemsize) for block in blocks)

    @property
    def offloaded_per_token(self) -> int:
        """Bytes per token that are copied to host memory and back: those of the checkpoints' inputs."""
        return self.itemsize * self.options.checkpoints * self.shape.hidden if self.options.offload else 0
