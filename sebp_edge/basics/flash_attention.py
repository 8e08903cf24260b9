"""Sizes of attention's kernels, which both the operations and the memory plan need, and which need no torch."""

# The longest sequence that our attention kernels take, in tokens; torch's flash attention takes longer ones, unless
# heads are too large for it.
MAX_SHORT_LENGTH = 128
# The sizes of heads that they take, and the largest that flash attention does.
HEAD_SIZES, MAX_FLASH_HEAD = (32, 64, 128, 256, 512), 256
# Flash attention accumulates dq in fp32, with this many extra rows per sequence.
EXTRA_ROWS = 128


def dq_buffer_bytes(num_rows: int, num_heads: int, head_size: int, num_sequences: int) -> int:
    """Returns the bytes in which flash attention's backward pass accumulates dq."""
    return 4 * (num_rows + EXTRA_ROWS * num_sequences) * num_heads * -(-head_size // 32) * 32
