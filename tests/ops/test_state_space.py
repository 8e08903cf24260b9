"""State spaces equal transformers' own, text by text, and so do their gradients, by kernels and without them."""

import pytest
import torch
from random_cases import DEVICE, chunks_of, results
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

from sebp_edge import ops

LENGTHS = [70, 0, 1, 32, 33]


def draw_inputs(num_rows, heads=(2, 4), sizes=(8, 16), dtype=torch.float32, device="cpu"):
    """x, steps, decays, B, C and D; states last for some rows."""
    (num_groups, num_heads), (key_size, value_size) = heads, sizes
    shapes = (num_rows, num_heads, value_size), (num_rows, num_heads), (num_heads,)
    shapes += ((num_rows, num_groups, key_size),) * 2 + ((num_heads,),)
    x, dt, a, B, C, D = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    inputs = x, dt.exp(), -0.1 * a.exp(), 3 * B + B[:1], 3 * C, D
    return [each.to(device, dtype).requires_grad_() for each in inputs]


def of_transformers(x, dt, a, B, C, D, lengths):
    outs = [
        mamba2_chunk_scan(x_text[None], dt_text[None], a, B_text[None], C_text[None], chunk_size=16, D=D)[0]
        for x_text, dt_text, B_text, C_text in zip(*(each.split(lengths) for each in (x, dt, B, C)), strict=True)
        if len(x_text)
    ]
    return torch.cat(outs)


def test_outputs_and_gradients_are_those_of_transformers():
    inputs, dout = draw_inputs(sum(LENGTHS)), torch.randn(sum(LENGTHS), 4, 16)
    expected = results(lambda *each: of_transformers(*each, LENGTHS), inputs, dout)
    found = results(lambda *each: ops.state_space(*each, chunks_of(LENGTHS)), inputs, dout)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


def test_gradients_are_the_derivatives():
    inputs = [each.detach().double().requires_grad_() for each in draw_inputs(6, sizes=(3, 2))]
    assert torch.autograd.gradcheck(lambda *each: ops.state_space(*each, chunks_of([4, 2])), inputs)


@pytest.mark.usefixtures("our_kernels", "poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.float32] + [torch.bfloat16] * (DEVICE == "cuda"), ids=str)
@pytest.mark.parametrize(
    ("heads", "sizes", "lengths"),
    [((2, 4), (8, 16), LENGTHS), ((1, 2), (40, 24), [35]), ((1, 2), (128, 64), [50, 0, 4])],
    ids=str,
)
def test_kernels_are_as_good_as_transformers_in_the_same_dtype(heads, sizes, lengths, dtype):
    inputs = draw_inputs(sum(lengths), heads, sizes, dtype, DEVICE)
    dout, chunks = torch.randn(sum(lengths), heads[1], sizes[1], device=DEVICE).to(dtype), chunks_of(lengths, DEVICE)
    found, again = (results(lambda *each: ops.state_space(*each, chunks), inputs, dout) for _ in range(2))
    theirs = results(lambda *each: of_transformers(*each, lengths), inputs, dout)
    exact_inputs = [each.detach().double().requires_grad_() for each in inputs]
    truth = results(lambda *each: ops.state_space(*each, chunks), exact_inputs, dout.double())
    for one, other, plain, exact in zip(found, again, theirs, truth, strict=True):
        assert torch.equal(one, other)
        # Theirs are in fp32, which a layer rounds.
        assert (one - exact).norm() <= 2 * (plain.to(one.dtype) - exact).norm() + 1e-4 * exact.norm()


@pytest.mark.usefixtures("our_kernels")
def test_no_bit_of_a_text_depends_on_another():
    inputs, chunks = draw_inputs(100, device=DEVICE), chunks_of([40, 0, 60], DEVICE)
    with torch.no_grad():
        before = ops.state_space(*inputs, chunks)
        for each in (inputs[0], inputs[3], inputs[4]):
            each[:40] += 1
        after = ops.state_space(*inputs, chunks)
    assert torch.equal(before[40:], after[40:])
    assert not torch.equal(before[:40], after[:40])
