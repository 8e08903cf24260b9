"""How a training spends memory to save time, or time to save memory. Whatever is chosen, its steps are the same."""

from dataclasses import dataclass

from sebp_edge.ops.linear_cross_entropy import CHUNK_LOGITS

MAX_ROWS = 4096
# Logits of a chunk where memory is short: 33 MB in bf16. Smaller chunks would read a large head more often than they
# multiply by it.
FEW_LOGITS = 2**24


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """What is held in memory at once; by default all that makes a training fast.

    Attributes:
        max_rows: most rows that one micro-batch may have; a single longer example stands alone.
        checkpoints: of how many blocks, the first ones, only the input is kept for the backward pass, which computes
            the rest of them again.
        offload: whether these inputs wait in the host's memory.
        blocks_in_pieces: whether MLPs run on a piece of the rows at a time, and again in the backward pass, where heads
            of attention take turns.
        in_pieces: whether the loss comes in smaller chunks, and gradients are added up one by one as they come.
        moments_in_8_bits: whether AdamW's moments of an adapter take 8 bits each, as those of bf16 weights always do.
    """

    max_rows: int = MAX_ROWS
    checkpoints: int = 0
    offload: bool = False
    blocks_in_pieces: bool = False
    in_pieces: bool = False
    moments_in_8_bits: bool = False

    @property
    def max_logits(self) -> int:
        """How many logits there are at once."""
        return FEW_LOGITS if self.in_pieces else CHUNK_LOGITS


FASTEST = MemoryOptions()
