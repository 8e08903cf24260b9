"""Many copies of matrices in one launch, in Triton: destination = scale * source, rounded once.

A table on the device has a row for each program: where it reads and writes, and how much of which matrix.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, ENTRIES = 2048, 6
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _copy_kernel(
    table_ptr, scales_ptr, SOURCE: tl.constexpr, DESTINATION: tl.constexpr, ENTRIES: tl.constexpr, BLOCK: tl.constexpr
):
    entry = table_ptr + tl.program_id(0) * ENTRIES
    source = tl.load(entry).to(tl.pointer_type(SOURCE))
    destination = tl.load(entry + 1).to(tl.pointer_type(DESTINATION))
    # An adapter has fewer than 2^31 elements; where they go may lie farther apart.
    elements = tl.load(entry + 2).to(tl.int32) + tl.arange(0, BLOCK)
    width, stride = tl.load(entry + 4).to(tl.int32), tl.load(entry + 5)
    mask = elements < tl.load(entry + 3)
    values = tl.load(source + elements, mask=mask, other=0.0).to(tl.float32) * tl.load(scales_ptr + tl.program_id(0))
    rows = elements // width
    tl.store(destination + rows * stride + elements - rows * width, values.to(DESTINATION), mask=mask)


def can_copy(copies: Sequence[tuple[Tensor, Tensor, float]]) -> bool:
    """Whether one launch can make these copies: sources are contiguous, rows of destinations are, of one dtype each."""
    dtypes = {(source.dtype, destination.dtype) for source, destination, _ in copies}
    places = all(source.is_contiguous() and destination.stride(1) == 1 for source, destination, _ in copies)
    return len(dtypes) == 1 and all(dtype in TYPES for dtype in next(iter(dtypes))) and places


class CopyTable:
    """The table of some copies, on their device; it keeps their tensors."""

    def __init__(self, copies: Sequence[tuple[Tensor, Tensor, float]]):
        self._copies, programs, scales = list(copies), [], []
        for source, destination, scale in copies:
            pointers, (_, width) = (source.data_ptr(), destination.data_ptr()), source.shape
            starts = range(0, source.numel(), BLOCK)
            programs += [(*pointers, start, source.numel(), width, destination.stride(0)) for start in starts]
            scales += [scale] * len(starts)
        device = copies[0].destination.device
        self._programs = torch.tensor(programs, dtype=torch.int64).reshape(-1, ENTRIES).to(device)
        self._scales = torch.tensor(scales, dtype=torch.float32).to(device)

    def run(self) -> None:
        """Makes the copies."""
        if number := len(self._programs):
            source, destination, _ = self._copies[0]
            types = {"SOURCE": TYPES[source.dtype], "DESTINATION": TYPES[destination.dtype]}
            _copy_kernel[number,](self._programs, self._scales, **types, ENTRIES=ENTRIES, BLOCK=BLOCK)
