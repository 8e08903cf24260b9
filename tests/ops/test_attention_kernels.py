"""Kernels of attention against their reference: rotations, and gradients in place."""

import pytest
import torch
from random_cases import DEVICE, random_heads

from sebp_edge.ops import Scores, reference, sequence_attention_
from sebp_edge.ops.gpu import rotate

LENGTHS = [7, 0, 1, 13]


@pytest.mark.parametrize("heads", [(4, 4, 8), (6, 2, 10), (1, 1, 2), (3, 1, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rotation_kernels_are_the_reference(heads, dtype):
    wide, rotary, _ = random_heads(*heads, dtype, DEVICE, [0, 5])
    split = (heads[0], heads[1], heads[1])
    q, k, v = wide.clone().split(split, dim=1)
    rotate.rotate_(q, k, *rotary)
    expected = [reference.rotate(part, *rotary) for part in wide.split(split, dim=1)[:2]]
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-3, "atol": 2e-3}
    torch.testing.assert_close(q, expected[0], **tolerance)
    torch.testing.assert_close(k, expected[1], **tolerance)
    assert torch.equal(v, wide.split(split, dim=1)[2])
    found, wanted = torch.empty_like(wide), torch.empty_like(wide)
    rotate.rotate_gradients(*wide.split(split, dim=1), *rotary, found.split(split, dim=1))
    reference.rotate_gradients(*wide.split(split, dim=1), *rotary, wanted.split(split, dim=1))
    torch.testing.assert_close(found, wanted, **tolerance)


def test_the_gradient_of_the_rotation_is_its_derivative():
    wide, rotary, _ = random_heads(2, 2, 6, torch.float64)
    q, k, v = wide.split(2, dim=1)
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    rotated = reference.rotate(q, *rotary), reference.rotate(k, *rotary)
    expected = torch.autograd.grad(rotated, (q, k), (dq, dk))
    found = [torch.empty_like(part) for part in (dq, dk, v)]
    reference.rotate_gradients(dq, dk, v, *rotary, found)
    for one, other in zip(found, (*expected, v), strict=True):
        torch.testing.assert_close(one, other)


def test_attention_kernels_write_gradients_side_by_side_and_rotate_only_queries(short_attention):
    heads = (6, 2, 32)
    wide, rotary, cu_seqlens = random_heads(*heads, torch.float16, DEVICE, LENGTHS)
    q, k, v = wide.clone().split([6, 2, 2], dim=1)
    before = [part.clone() for part in (q, k, v)]
    parts = [part.detach().requires_grad_() for part in (q, k, v)]
    out = sequence_attention_(*parts, cu_seqlens, 16, Scores(), rotary)
    dq, dk, dv = torch.autograd.grad(out, parts, torch.randn_like(out))
    assert dk.data_ptr() == dq.data_ptr() + 6 * 32 * 2
    assert dv.data_ptr() == dk.data_ptr() + 2 * 32 * 2
    assert dq.stride() == dk.stride() == dv.stride() == (10 * 32, 32, 1)
    assert torch.equal(k, before[1]) and torch.equal(v, before[2])
    torch.testing.assert_close(q, reference.rotate(before[0], *rotary), rtol=2e-3, atol=2e-3)
