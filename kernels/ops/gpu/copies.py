"""Many copies of matrices in one launch, in Triton: destination = scale * source, rounded once.

A table on the device has a row for each program: where it reads and writes, and how much of which matrix, in chunks of
elements that lie side by side everywhere.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, ENTRIES, MAX_CHUNK = 2048, 6, 16
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _copy_kernel(
    table_ptr,
    scales_ptr,
    SOURCE: tl.constexpr,
    DESTINATION: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    entry = table_ptr + tl.program_id(0) * ENTRIES
    source = tl.multiple_of(tl.load(entry).to(tl.pointer_type(SOURCE)), CHUNK * SOURCE.primitive_bitwidth // 8)
    destination = tl.load(entry + 1).to(tl.pointer_type(DESTINATION))
    destination = tl.multiple_of(destination, CHUNK * DESTINATION.primitive_bitwidth // 8)
    # An adapter has fewer than 2^31 elements; where they go may lie farther apart.
    chunks, elements = tl.load(entry + 2).to(tl.int32) + tl.arange(0, BLOCK // CHUNK), tl.arange(0, CHUNK)[None, :]
    chunks_in_row, stride = tl.load(entry + 4).to(tl.int32), tl.load(entry + 5)
    mask = (chunks < tl.load(entry + 3).to(tl.int32))[:, None]
    values = tl.load(source + chunks[:, None] * CHUNK + elements, mask=mask, other=0.0).to(tl.float32)
    values *= tl.load(scales_ptr + tl.program_id(0))
    rows = chunks // chunks_in_row
    begins = tl.multiple_of(rows * stride + (chunks - rows * chunks_in_row) * CHUNK, CHUNK)
    tl.store(destination + begins[:, None] + elements, values.to(DESTINATION), mask=mask)


def can_copy(copies: Sequence[tuple[Tensor, Tensor, float]]) -> bool:
    """Whether one launch can make these copies: sources are contiguous, rows of destinations are, of one dtype each."""
    dtypes = {(source.dtype, destination.dtype) for source, destination, _ in copies}
    places = all(source.is_contiguous() and destination.stride(1) == 1 for source, destination, _ in copies)
    return len(dtypes) == 1 and all(dtype in TYPES for dtype in next(iter(dtypes))) and places


class CopyTable:
    """The table of some copies, on their device; it keeps their tensors."""

    def __init__(self, copies: Sequence[tuple[Tensor, Tensor, float]]):
        self._copies, programs, scales = list(copies), [], []
        self._chunk = _chunk_of(copies)
        for source, destination, scale in copies:
            pointers, (_, width) = (source.data_ptr(), destination.data_ptr()), source.shape
            num_chunks, stride = source.numel() // self._chunk, destination.stride(0)
            starts = range(0, num_chunks, BLOCK // self._chunk)
            programs += [(*pointers, start, num_chunks, width // self._chunk, stride) for start in starts]
            scales += [scale] * len(starts)
        device = copies[0].destination.device
        self._programs = torch.tensor(programs, dtype=torch.int64).reshape(-1, ENTRIES).to(device)
        self._scales = torch.tensor(scales, dtype=torch.float32).to(device)

    def run(self) -> None:
        """Makes the copies."""
        if number := len(self._programs):
            source, destination, _ = self._copies[0]
            types = {"SOURCE": TYPES[source.dtype], "DESTINATION": TYPES[destination.dtype]}
            _copy_kernel[number,](
                self._programs, self._scales, **types, ENTRIES=ENTRIES, BLOCK=BLOCK, CHUNK=self._chunk
            )


def _chunk_of(copies: Sequence[tuple[Tensor, Tensor, float]]) -> int:
    """How many elements lie side by side, and begin at a multiple of their size, in all rows of all matrices."""
    chunk = MAX_CHUNK
    for source, destination, _ in copies:
        for number in (source.shape[1], destination.stride(0), *map(_first_element, (source, destination))):
            chunk = math.gcd(chunk, number)
    return chunk


def _first_element(matrix: Tensor) -> int:
    return matrix.data_ptr() // matrix.element_size()
