"""Quantised tensors give the same floating-point numbers as the package `gguf`, bit for bit."""

import gguf
import numpy as np
import pytest
import torch

from sebp_edge.engine.models.gguf.quantised import TYPES, dequantise


def expected(raw, number):
    with np.errstate(all="ignore"):  # random scales include infinities
        return torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType(number)).copy())


@pytest.mark.parametrize("number", TYPES, ids=lambda number: TYPES[number].name)
@pytest.mark.parametrize(("rows", "columns"), [(1, 256), (3, 768), (1030, 512)])
def test_random_blocks_give_the_numbers_of_the_package(number, rows, columns):
    kind = TYPES[number]
    assert (kind.weights, kind.size) == gguf.GGML_QUANT_SIZES[number]
    assert kind.name == gguf.GGMLQuantizationType(number).name
    raw = np.random.default_rng(rows).integers(0, 256, (rows, columns // kind.weights * kind.size), dtype=np.uint8)
    found = dequantise(torch.from_numpy(raw).flatten(), kind, torch.empty(rows, columns))
    correct = expected(raw, number)
    known = ~correct.isnan()
    assert known.any()
    assert torch.equal(found.view(torch.int32)[known], correct.view(torch.int32)[known])
    assert torch.equal(found.isnan(), ~known)


def test_weights_are_rounded_to_other_precisions_once():
    kind, number = TYPES[12], 12
    raw = np.random.default_rng(0).integers(0, 100, (4, 144), dtype=np.uint8)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        found = dequantise(torch.from_numpy(raw).flatten(), kind, torch.empty(4, 256, dtype=dtype))
        assert torch.equal(found, expected(raw, number).to(dtype))
