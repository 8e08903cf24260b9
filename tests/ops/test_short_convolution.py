"""The convolution of packed rows equals torch's on each text, and so do its gradients: in plain PyTorch, and in our
kernels, on a GPU where there is one, else in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F
from random_cases import DEVICE, DTYPES, assert_as_good, assert_no_worse_than_torch, draw

from sebp_edge.ops import backend, reference, short_convolution

# Texts without rows, of one, shorter than the weight's columns, longer than a tile of rows.
LENGTHS = [(), (0,), (1,), (2, 0, 1, 9, 0, 3, 1), (70, 1, 140)]
# Columns of the weight, and channels that are no power of two or more than a tile.
SIZES = [(1, 3), (3, 5), (4, 130)]


def positions_of(lengths, device="cpu"):
    return torch.cat([torch.arange(0), *map(torch.arange, lengths)]).to(device, torch.int32)


def inputs_of(lengths, columns, channels, dtype=torch.float64, device="cpu", *, has_bias=True):
    sizes = (sum(lengths), channels), (channels, columns), (channels,)
    x, weight, bias = (draw(*size, seed=seed).to(device, dtype) for seed, size in enumerate(sizes))
    return [x, weight, bias][: 2 + has_bias]


def text_by_text(x_AC, weight_CK, bias_C=None, *, lengths, activation):
    """torch's convolution of each text, padded on the left."""
    outs = []
    for text_TC in x_AC.split(list(lengths)):
        padded_CT = F.pad(text_TC.T, (weight_CK.shape[1] - 1, 0))
        # torch takes no text without rows.
        out_CT = F.conv1d(padded_CT, weight_CK[:, None], bias_C, groups=len(weight_CK)) if len(text_TC) else text_TC.T
        outs.append((out_CT if activation is None else F.silu(out_CT)).T)
    return torch.cat([x_AC[:0], *outs])


def results(function, inputs, dout):
    leaves = [each.detach().requires_grad_() for each in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout, materialize_grads=True)]


def packed(lengths, activation, device="cpu"):
    positions = positions_of(lengths, device)
    return lambda x, weight, bias=None: short_convolution(x, weight, bias, positions, activation)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("columns", "channels"), SIZES)
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_it_is_torchs_convolution_of_each_text(lengths, columns, channels, activation, has_bias):
    inputs = inputs_of(lengths, columns, channels, has_bias=has_bias)
    dout = draw(sum(lengths), channels, seed=9).cpu().double()
    expected = results(lambda *each: text_by_text(*each, lengths=lengths, activation=activation), inputs, dout)
    found = results(packed(lengths, activation), inputs, dout)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_its_gradients_are_the_derivatives(activation):
    lengths = (2, 1, 7)
    inputs = [each.requires_grad_() for each in inputs_of(lengths, 4, 3)]
    assert torch.autograd.gradcheck(packed(lengths, activation), inputs)


def test_it_keeps_its_input_and_gives_gradients_to_what_is_trained():
    x, weight, bias = inputs_of((3, 4), 3, 5)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
        out = packed((3, 4), "silu")(x.requires_grad_(), weight, bias)
    assert [each.shape for each in kept] == [x.shape, weight.shape, bias.shape, (7,)]
    assert kept[0].data_ptr() == x.data_ptr()
    out.sum().backward()
    assert x.grad.all()
    assert weight.grad is None


def test_no_text_reads_another():
    x, weight, bias = inputs_of((5, 4, 6), 4, 3)
    x[5:9] = torch.nan
    dout = torch.ones_like(x)
    dout[5:9] = torch.nan
    leaf = x.requires_grad_()
    out = packed((5, 4, 6), None)(leaf, weight, bias)
    (dx,) = torch.autograd.grad(out, leaf, dout)
    others = [*range(5), *range(9, 15)]
    assert out[others].isfinite().all()
    assert dx[others].isfinite().all()


def test_sizes_that_do_not_agree_and_other_activations_are_refused():
    x, weight, bias = inputs_of((3, 4), 3, 5)
    with pytest.raises(ValueError, match="Expected 7 positions"):
        short_convolution(x, weight, bias, positions_of((3, 3)))
    with pytest.raises(ValueError, match="and 5 and 4 channels"):
        short_convolution(x, weight, bias[:4], positions_of((3, 4)))
    with pytest.raises(ValueError, match="Unknown activation 'relu'"):
        short_convolution(x, weight, bias, positions_of((3, 4)), "relu")


class TestKernels:
    @pytest.fixture(autouse=True)
    def kernels(self):
        pytest.importorskip("triton", reason="Triton is not installed on this platform")
        return backend.kernels("short_convolution")

    @pytest.mark.parametrize("lengths", LENGTHS)
    @pytest.mark.parametrize(("columns", "channels"), SIZES)
    @pytest.mark.parametrize(("activation", "has_bias"), [(None, False), ("silu", True), ("silu", False)])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_they_equal_plain_pytorch(
        self, kernels, lengths, columns, channels, activation, has_bias, dtype, poisoned_memory
    ):
        x, weight, *bias = inputs_of(lengths, columns, channels, dtype, DEVICE, has_bias=has_bias)
        given = (weight, bias[0] if bias else None, positions_of(lengths, DEVICE), activation)
        exact = tuple(each.double() if isinstance(each, torch.Tensor) else each for each in given[:2])
        exact += given[2:]
        out, dout = kernels.short_convolution(x, *given), draw(sum(lengths), channels, dtype=dtype, seed=9)
        assert out.dtype == dtype
        assert_as_good(out, reference.short_convolution(x.double(), *exact), dtype)
        expected = reference.short_convolution_backward(dout.double(), x.double(), *exact, needs_dweight=True)
        found = kernels.short_convolution_backward(dout, x, *given, needs_dweight=True)
        again = kernels.short_convolution_backward(dout, x, *given, needs_dweight=True)
        for one, other, truth in zip(found, again, expected, strict=True):
            assert (one is None) == (truth is None)
            if one is not None:
                assert one.dtype == dtype
                assert torch.equal(one, other)
                assert_as_good(one, truth, dtype)
        dx, *others = kernels.short_convolution_backward(dout, x, *given, needs_dweight=False)
        assert others == [None, None]
        assert torch.equal(dx, found[0])

    def test_they_take_any_strides(self, kernels, poisoned_memory):
        lengths = (2, 5, 40)
        x, weight, bias = inputs_of(lengths, 4, 6, torch.float32, DEVICE)
        dout, positions = draw(47, 6, seed=9), positions_of(lengths, DEVICE)
        expected = results(packed(lengths, "silu", DEVICE), [x, weight, bias], dout)
        wide = torch.cat([x, x, x], dim=1)
        for view in (x.T.contiguous().T, wide[:, 6:12], x.repeat_interleave(2, dim=1)[:, ::2]):
            out = kernels.short_convolution(view, weight.T.contiguous().T, bias, positions, "silu")
            found = kernels.short_convolution_backward(
                dout.T.contiguous().T, view, weight.T.contiguous().T, bias, positions, "silu", needs_dweight=True
            )
            assert out.is_contiguous()
            torch.testing.assert_close([out, *found], expected, rtol=1e-5, atol=1e-5)

    def test_a_text_reads_no_other(self, kernels):
        lengths = (5, 4, 6)
        x, weight, bias = inputs_of(lengths, 4, 3, torch.float32, DEVICE)
        dout = torch.ones_like(x)
        x[5:9] = dout[5:9] = torch.nan
        given = (weight, bias, positions_of(lengths, DEVICE), "silu")
        others = [*range(5), *range(9, 15)]
        assert kernels.short_convolution(x, *given)[others].isfinite().all()
        assert kernels.short_convolution_backward(dout, x, *given, needs_dweight=True)[0][others].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(836,), (300, 1, 0, 2, 1500, 70)])
@pytest.mark.parametrize(("columns", "channels", "activation"), [(3, 2048, None), (4, 6144, "silu")])
def test_real_shapes_err_no_more_than_torch(lengths, columns, channels, activation):
    inputs = inputs_of(lengths, columns, channels, torch.bfloat16, DEVICE)
    dout = draw(sum(lengths), channels, dtype=torch.bfloat16, seed=9)

    def plain(*each):
        return text_by_text(*each, lengths=lengths, activation=activation)

    exact = results(plain, [each.double() for each in inputs], dout.double())
    found, own = results(packed(lengths, activation, DEVICE), inputs, dout), results(plain, inputs, dout)
    for one, other, truth in zip(found, own, exact, strict=True):
        assert_no_worse_than_torch(one, other, truth)
