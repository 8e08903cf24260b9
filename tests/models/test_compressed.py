"""Compressed N:M weights: read as they were written, of the stated size, refused if damaged."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from sebp_edge.errors import OptionError
from sebp_edge.models.compressed import CompressedFile, compress, decompress, write_compressed
from sebp_edge.ops import prune_
from sebp_edge.recipe import Pattern

PATTERNS = ["1:2", "2:4", "1:4", "3:4", "7:8", "3:7", "1:16", "5:16", "1:31", "1:32", "31:32"]


def pruned(pattern, rows=5, dtype=torch.bfloat16):
    weight = torch.randn(rows, 6 * pattern.m, generator=torch.Generator().manual_seed(pattern.n)).to(dtype)
    out = torch.empty_like(weight)
    prune_(out, weight, pattern.n, pattern.m)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("text", PATTERNS)
def test_a_weight_is_read_bit_for_bit(text, dtype):
    pattern = Pattern.parse(text)
    weight = pruned(pattern, dtype=dtype)
    # Groups with fewer values than the pattern leaves.
    weight[0, : 2 * pattern.m] = 0
    weight[1].clamp_(min=0)
    found = decompress(*compress(weight, pattern), pattern)
    assert found.dtype == dtype
    assert torch.equal(found, weight)
    assert torch.equal(found.signbit(), weight.signbit())


@pytest.mark.parametrize(("text", "share"), [("2:4", 9 / 16), ("1:4", 9 / 32), ("1:16", 5 / 64), ("1:32", 21 / 512)])
def test_in_bf16_a_weight_takes_the_stated_share_of_its_bytes(text, share):
    weight = pruned(Pattern.parse(text), rows=64)
    parts = compress(weight, Pattern.parse(text))
    assert sum(part.nbytes for part in parts) == math.ceil(share * weight.nbytes)


@pytest.mark.parametrize("shape", [(3, 8), (8,), (3, 6), (0, 8), (2, 2, 4)])
def test_what_is_not_pruned_is_not_compressed(shape):
    assert compress(torch.ones(shape), Pattern(2, 4)) is None


def test_a_file_has_pruned_tensors_compressed_and_others_as_they_are(tmp_path):
    pattern = Pattern(2, 4)
    tensors = {"up.weight": pruned(pattern), "norm.weight": torch.randn(7), "head.weight": torch.randn(5, 8)}
    write_compressed(tmp_path / "x", tensors, pattern)
    assert load_file(tmp_path / "x").keys() == {"up.weight.values", "up.weight.positions", "norm.weight", "head.weight"}
    file = CompressedFile(tmp_path / "x")
    assert file.shapes == {name: tensor.shape for name, tensor in tensors.items()}
    assert all(torch.equal(file.read(name), tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("text", "damage"),
    [
        ("2:4", lambda positions: positions[:-1]),
        ("2:4", lambda positions: positions.to(torch.int8)),
        ("2:4", torch.zeros_like),
        ("2:4", lambda positions: positions | 1),
        ("2:7", lambda positions: torch.full_like(positions, 255)),  # column 7 of 0 to 6
        ("2:16", torch.zeros_like),  # the same column twice
    ],
)
def test_damaged_positions_are_refused(text, damage):
    pattern = Pattern.parse(text)
    values, positions = compress(pruned(pattern), pattern)
    with pytest.raises(ValueError, match="positions"):
        decompress(values, damage(positions), pattern)


def test_a_file_without_a_pattern_is_refused(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "x")
    with pytest.raises(OptionError):
        CompressedFile(tmp_path / "x")
