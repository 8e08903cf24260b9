"""Options that trade time for memory, and fixed limits; with any options, the steps compute the same."""

from dataclasses import dataclass

MAX_ROWS = 4096
# Logits per chunk with small buffers: 33 MB in bf16. With smaller chunks, reading a large head would take longer than
# multiplying by it.
FEW_LOGITS = 2**24
# Otherwise: 134 MB in bf16.
MANY_LOGITS = 2**26
# Logits of a padded micro-batch: half a GB in fp32. Hoisted rows never have all of their logits in memory.
MAX_PADDED_LOGITS = 2**27
# Above this many bytes, gradients are added one by one as they come, not all at once.
MAX_GRADIENTS_AT_ONCE = 2**30


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """What a training holds in memory at once; the defaults are the fastest."""

    max_rows: int = MAX_ROWS  # of a micro-batch; a longer example is a micro-batch of its own
    checkpoints: int = 0  # number of blocks, from the first on, in activation checkpoints
    offload: bool = False  # whether the checkpoints' inputs are offloaded to host memory
    # Whether each MLP runs on a chunk of the rows at a time and is recomputed in the backward pass, and attention's
    # backward pass runs on a few heads at a time.
    chunked_blocks: bool = False
    # Whether the loss uses smaller chunks of logits, and gradients are added one by one as they come.
    small_buffers: bool = False
    dequantised_blocks: int = 0  # number of blocks, from the first on, that also hold their 4-bit weights dequantised
    streamed_blocks: int = 0  # number of blocks whose frozen matrices are in host memory, two on the GPU at a time
    # Whether an adapter's AdamW moments take 8 bits each; those of bf16 weights always do.
    moments_in_8_bits: bool = False

    @property
    def max_logits(self) -> int:
        """Maximum number of logits that exist at once."""
        return FEW_LOGITS if self.small_buffers else MANY_LOGITS


FASTEST = MemoryOptions()
