"""Files of pruned weights: the values that are left, and their positions in their groups.

A weight [O, K] of the pattern N:M becomes `NAME.values`, [O, K N/M] in its dtype, and `NAME.positions`, uint8: bits,
either N column numbers for each group of M or one bit for each weight, whichever is shorter. In bf16, 2:4 takes 9/16 of
the dense weight and 1:16 5/64. Other tensors are stored as they are.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from sebp_edge.models.weights import WeightsFile
from sebp_edge.recipe import Pattern

COMPRESSED = "compressed.safetensors"
_VALUES, _POSITIONS, _PATTERN = ".values", ".positions", "pattern"


def write_compressed(path: Path, tensors: Mapping[str, Tensor], pattern: Pattern) -> None:
    """Writes a model's tensors; compresses those that the pattern has pruned."""
    parts = {}
    for name, tensor in tensors.items():
        compressed = compress(tensor, pattern)
        if compressed is None:
            parts[name] = tensor.contiguous()
        else:
            parts[name + _VALUES], parts[name + _POSITIONS] = compressed
    save_file(parts, path, metadata={"format": "pt", _PATTERN: str(pattern)})


class CompressedFile(WeightsFile):
    """A file that `write_compressed` has written; its names and shapes are those of the dense tensors.

    Raises:
        OSError, SafetensorError: the file cannot be read.
        ValueError, OptionError: it is no such file.
    """

    def __init__(self, path: Path):
        super().__init__(path)
        self._pattern = Pattern.parse((self._file.metadata() or {}).get(_PATTERN, ""))
        parts, self.shapes = self.shapes, {}
        self._compressed = {name.removesuffix(_POSITIONS) for name in parts if name.endswith(_POSITIONS)}
        for name, shape in parts.items():
            dense = name.removesuffix(_VALUES)
            if dense in self._compressed and name != dense:
                rows, columns = shape
                self.shapes[dense] = torch.Size([rows, columns * self._pattern.m // self._pattern.n])
            elif not name.endswith(_POSITIONS):
                self.shapes[name] = shape

    def stored(self, name: str) -> Tensor:
        return super().stored(name + _VALUES if name in self._compressed else name)

    def read(self, name: str) -> Tensor:
        tensor = super().read(name)
        if name not in self._compressed:
            return tensor
        return decompress(tensor, self._file.get_tensor(name + _POSITIONS), self._pattern)


def compress(weight: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor] | None:
    """Returns the values and positions of a weight; None if it is not pruned to the pattern."""
    if weight.dim() != 2 or weight.shape[1] % pattern.m or not weight.numel():
        return None
    groups_GM = weight.reshape(-1, pattern.m)
    is_left = groups_GM != 0
    num_zeros_kept = pattern.n - is_left.sum(dim=1, keepdim=True)
    if (num_zeros_kept < 0).any():
        return None
    # A group with fewer values keeps its first zeros.
    is_kept = is_left | (~is_left & ((~is_left).cumsum(dim=1) <= num_zeros_kept))
    values = groups_GM[is_kept].view(len(weight), -1)
    if _stores_columns(pattern):
        columns_GN = is_kept.nonzero()[:, 1].view(-1, pattern.n)
        bits = (columns_GN[..., None] >> torch.arange(_digits(pattern), device=weight.device)) & 1
        return values, _pack(bits.flatten().bool())
    return values, _pack(is_kept.flatten())


def decompress(values: Tensor, positions: Tensor, pattern: Pattern) -> Tensor:
    """Returns the dense weight."""
    num_groups = values.numel() // pattern.n
    num_bits = num_groups * (pattern.n * _digits(pattern) if _stores_columns(pattern) else pattern.m)
    if values.numel() % pattern.n or positions.dtype != torch.uint8 or positions.shape != (-(-num_bits // 8),):
        raise ValueError("positions")
    bits = ((positions[:, None] >> torch.arange(8, dtype=torch.uint8, device=values.device)) & 1).flatten()[:num_bits]
    is_kept = bits.view(num_groups, -1).bool()
    if _stores_columns(pattern):
        digits_GND = bits.view(num_groups, pattern.n, -1).long()
        columns_GN = (digits_GND << torch.arange(_digits(pattern), device=values.device)).sum(dim=2)
        if num_groups and int(columns_GN.max()) >= pattern.m:
            raise ValueError("positions")
        is_kept = torch.zeros(num_groups, pattern.m, dtype=torch.bool, device=values.device)
        is_kept.scatter_(1, columns_GN, True)
    if not (is_kept.sum(dim=1) == pattern.n).all():
        raise ValueError("positions")
    dense = values.new_zeros(num_groups, pattern.m)
    dense[is_kept] = values.flatten()
    return dense.view(len(values), -1)


def _digits(pattern: Pattern) -> int:
    return math.ceil(math.log2(pattern.m))


def _stores_columns(pattern: Pattern) -> bool:
    return pattern.n * _digits(pattern) < pattern.m


def _pack(bits: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(-1, 8).to(torch.uint8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(dim=1, dtype=torch.uint8)
