"""The gated delta rule equals transformers' own, text by text, and so do its gradients, by kernels and without them."""

import pytest
import torch
from random_cases import DEVICE, chunks_of, results
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from sebp_edge import ops

# An empty text, some of a row, of a chunk or of one more, and one of several chunks.
LENGTHS = [70, 0, 1, 32, 33]


def draw_inputs(num_rows, heads=(2, 4), sizes=(8, 16), dtype=torch.float32, device="cpu"):
    """Queries, keys, values, decays and strengths; keys are alike, as those of a text are, and states last."""
    (num_keys, num_values), (key_size, value_size) = heads, sizes
    shapes = ((num_keys, key_size),) * 2 + ((num_values, value_size), (num_values,), (num_values,))
    q, k, v, g, beta = (torch.randn(num_rows, *shape, dtype=torch.float64) for shape in shapes)
    inputs = q, k + 2 * k[:1], v, -0.2 * g.exp(), 2 * beta.sigmoid()
    return [each.to(device, dtype).requires_grad_() for each in inputs]


def of_transformers(q, k, v, g, beta, lengths):
    """transformers' rule on one text at a time."""
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k))
    outs = []
    for q_text, k_text, v_text, g_text, beta_text in zip(*(x.split(lengths) for x in (q, k, v, g, beta)), strict=True):
        if len(v_text):
            decays = {"g": g_text[None], "beta": beta_text[None], "use_qk_l2norm_in_kernel": True}
            outs.append(torch_chunk_gated_delta_rule(q_text[None], k_text[None], v_text[None], **decays)[0][0])
    return torch.cat(outs)


def double(tensors):
    return [each.detach().double().requires_grad_() for each in tensors]


def test_outputs_and_gradients_are_those_of_transformers():
    inputs, dout = draw_inputs(sum(LENGTHS)), torch.randn(sum(LENGTHS), 4, 16)
    expected = results(lambda *each: of_transformers(*each, LENGTHS), inputs, dout)
    found = results(lambda *each: ops.gated_delta_rule(*each, chunks_of(LENGTHS)), inputs, dout)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


def test_gradients_are_the_derivatives():
    inputs = double(draw_inputs(6, sizes=(3, 2)))
    assert torch.autograd.gradcheck(lambda *each: ops.gated_delta_rule(*each, chunks_of([4, 2])), inputs)


@pytest.mark.usefixtures("our_kernels", "poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda"), ids=str)
@pytest.mark.parametrize(
    ("heads", "sizes", "lengths"),
    [((2, 4), (8, 16), LENGTHS), ((1, 1), (40, 72), [35]), ((3, 3), (16, 5), [1]), ((1, 2), (128, 128), [50, 0, 4])],
    ids=str,
)
def test_kernels_are_as_good_as_pytorch_in_the_same_dtype(heads, sizes, lengths, dtype):
    inputs = draw_inputs(sum(lengths), heads, sizes, dtype, DEVICE)
    dout, chunks = torch.randn(sum(lengths), heads[1], sizes[1], device=DEVICE).to(dtype), chunks_of(lengths, DEVICE)
    found, again = (results(lambda *each: ops.gated_delta_rule(*each, chunks), inputs, dout) for _ in range(2))
    truth = results(lambda *each: ops.gated_delta_rule(*each, chunks), double(inputs), dout.double())
    for one, other, exact in zip(found, again, truth, strict=True):
        assert one.dtype == dtype
        assert torch.equal(one, other)
        rounding = (exact.to(dtype).double() - exact).norm()
        assert (one - exact).norm() <= 2 * rounding + 1e-4 * exact.norm()


@pytest.mark.usefixtures("our_kernels")
@pytest.mark.parametrize(("of_values", "of_gradients"), [(1e6, 1e-9), (1e-9, 1e6)])
def test_kernels_take_numbers_of_any_size(of_values, of_gradients):
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    lengths = [70, 40]
    q, k, v, g, beta = draw_inputs(sum(lengths), dtype=dtype, device=DEVICE)
    # Some rows are far larger than others of their text.
    v = (v.detach() * of_values).index_fill(0, torch.tensor([3, 99], device=DEVICE), 100 * of_values).requires_grad_()
    inputs, chunks = (q, k, v, g, beta), chunks_of(lengths, DEVICE)
    dout = (of_gradients * torch.randn(v.shape, device=DEVICE)).to(dtype)
    found = results(lambda *each: ops.gated_delta_rule(*each, chunks), inputs, dout)
    truth = results(lambda *each: ops.gated_delta_rule(*each, chunks), double(inputs), dout.double())
    for one, exact in zip(found, truth, strict=True):
        rounding = (exact.to(dtype).double() - exact).norm()
        assert (one - exact).norm() <= 2 * rounding + 1e-4 * exact.norm()


@pytest.mark.usefixtures("our_kernels")
def test_kernels_read_parts_of_one_matrix_in_place():
    rows, chunks = torch.randn(40, 3 * 2 * 16, device=DEVICE), chunks_of([33, 7], DEVICE)
    q, k, v = (part.unflatten(1, (2, 16)) for part in rows.chunk(3, dim=1))
    decays = [each.to(DEVICE).detach() for each in draw_inputs(40, (2, 2))[3:]]
    found = ops.gated_delta_rule(q, k, v, *decays, chunks)
    assert torch.equal(found, ops.gated_delta_rule(q.contiguous(), k.contiguous(), v.contiguous(), *decays, chunks))


@pytest.mark.usefixtures("our_kernels")
def test_a_batch_without_rows_has_no_outputs_and_no_gradients():
    inputs = draw_inputs(0, device=DEVICE)
    chunks, dout = chunks_of([0, 0], DEVICE), torch.ones(0, 4, 16, device=DEVICE)
    for found in results(lambda *each: ops.gated_delta_rule(*each, chunks), inputs, dout):
        assert found.numel() == 0


@pytest.mark.usefixtures("our_kernels")
def test_no_bit_of_a_text_depends_on_another():
    inputs, chunks = draw_inputs(100, device=DEVICE), chunks_of([40, 0, 60], DEVICE)
    with torch.no_grad():
        before = ops.gated_delta_rule(*inputs, chunks)
        for each in inputs[:3]:
            each[:40] += 1
        after = ops.gated_delta_rule(*inputs, chunks)
    assert torch.equal(before[40:], after[40:])
    assert not torch.equal(before[:40], after[:40])


def test_chunks_are_found_without_waiting_for_a_gpu(no_host_sync):
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    with no_host_sync():
        chunks = ops.Chunks.of(cu_seqlens, sum(LENGTHS))
    used = chunks.texts_N[chunks.texts_N < len(LENGTHS)].tolist()
    assert used == [0, 0, 0, 2, 3, 4, 4]
    assert [chunks.first_S[text].item() for text in (0, 2, 3, 4)] == [0, 3, 4, 5]


@pytest.mark.usefixtures("our_kernels")
def test_it_runs_in_an_activation_checkpoint():
    inputs, chunks = draw_inputs(20, device=DEVICE), chunks_of([13, 7], DEVICE)
    dout = torch.randn(20, 4, 16, device=DEVICE)
    expected = results(lambda *each: ops.gated_delta_rule(*each, chunks), inputs, dout)
    found = results(lambda *each: checkpoint(ops.gated_delta_rule, *each, chunks, use_reentrant=False), inputs, dout)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
