"""The op on plain PyTorch: the formula, its gradients, and what it keeps. Its kernels are in test_small_kernels."""

import pytest
import torch
import torch.nn.functional as F

from sebp_edge.ops import rms_norm


def draw(*size, dtype=torch.float64, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (2, 3, 9), (1, 4, 2, 8), (0, 6)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_it_equals_torchs_norm_with_an_offset(shape, offset):
    x, weight = draw(*shape), draw(shape[-1], seed=1)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5, offset), F.rms_norm(x, shape[-1:], offset + weight, 1e-5))


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 2, 3)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("trained", [True, False])
def test_its_gradients_are_the_derivatives(shape, offset, trained):
    x, weight = draw(*shape).requires_grad_(), draw(shape[-1], seed=1).requires_grad_(trained)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3, offset), (x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_error_is_no_larger_than_a_decoders_own_in_the_same_dtype(dtype):
    inputs = [draw(65, 96, dtype=dtype), draw(96, dtype=dtype, seed=1)]
    dout = draw(65, 96, dtype=dtype, seed=2)

    def outputs_and_gradients(function, inputs, dout):
        inputs = [tensor.clone().requires_grad_() for tensor in inputs]
        out = function(*inputs)
        return out, *torch.autograd.grad(out, inputs, dout)

    def plain(x, weight):
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    exact = outputs_and_gradients(
        lambda x, w: F.rms_norm(x, (96,), w, 1e-6), [tensor.double() for tensor in inputs], dout.double()
    )
    found = outputs_and_gradients(lambda x, w: rms_norm(x, w, 1e-6), inputs, dout)
    for one, other, truth in zip(found, outputs_and_gradients(plain, inputs, dout), exact, strict=True):
        assert one.dtype == dtype
        error, allowed = ((value.double() - truth).norm() / truth.norm() for value in (one, other))
        assert error <= 2 * allowed + 1e-4


def test_it_keeps_its_input_and_one_number_a_row():
    x, weight = draw(2, 50, 8, dtype=torch.bfloat16).requires_grad_(), draw(8, dtype=torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rms_norm(x, weight, 1e-6)
    assert [tensor.data_ptr() for tensor in kept[:2]] == [x.data_ptr(), weight.data_ptr()]
    assert [(tensor.shape, tensor.dtype) for tensor in kept[2:]] == [((2, 50), torch.float32)]


def test_a_frozen_weight_gets_no_gradient():
    x, weight = draw(3, 5).requires_grad_(), draw(5, seed=1)
    rms_norm(x, weight, 1e-6).sum().backward()
    assert weight.grad is None
    assert x.grad is not None
