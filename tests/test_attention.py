"""Attention of sequences in a row, against plain attention in fp64."""

import pytest
import torch
from builders import make_llama
from test_hoist import MODELS, dense_losses, gradients, padded_batch

from sebp_edge.ops import Scores, reference, sequence_attention_
from sebp_edge.ops.gpu import rotate
from sebp_edge.sparse.active_tokens import ActiveTokens
from sebp_edge.sparse.hoist import Hoisted
from sebp_edge.sparse.own_attention import OwnAttention
from sebp_edge.sparse.rows import RowPlan

LENGTHS = [7, 0, 1, 13]


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(num_heads, num_kv_heads, head_size, dtype, device="cpu", lengths=LENGTHS):
    """q, k, v as parts of one matrix, and cosines and sines of the rows' angles."""
    num_rows = sum(lengths)
    wide = torch.randn(num_rows, num_heads + 2 * num_kv_heads, head_size, device=device, dtype=dtype)
    angles = torch.rand(num_rows, head_size // 2, device=device).mul(6.28).repeat(1, 2)
    cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    return wide, (angles.cos().to(dtype), angles.sin().to(dtype)), cu_seqlens


def plain(q, k, v, rotary, lengths, scores):
    """Attention written out, in the inputs' dtype."""
    cos, sin = (angles[:, None].to(q.dtype) for angles in rotary)
    half = q.shape[-1] // 2
    q, k = (x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin for x in (q, k))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    outputs = []
    for q_L, k_L, v_L in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        values = torch.einsum("ahe,bhe->hab", q_L, k_L) * (scores.scale or q.shape[-1] ** -0.5)
        if scores.softcap is not None:
            values = scores.softcap * torch.tanh(values / scores.softcap)
        place = torch.arange(len(q_L), device=q.device)
        distance = place[:, None] - place[None]
        hidden = (distance < 0) | (distance >= (scores.window or len(q_L) + 1))
        weights = values.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hab,bhe->ahe", weights, v_L))
    return torch.cat(outputs)


@pytest.mark.parametrize("scores", [Scores(), Scores(0.3), Scores(window=4), Scores(softcap=2.0), Scores(0.5, 3, 1.5)])
@pytest.mark.parametrize("heads", [(4, 4, 8), (6, 2, 10)])
def test_attention_by_sequence_is_plain_attention(scores, heads):
    wide, rotary, cu_seqlens = draw(*heads, torch.float64)
    parts = [part.detach().requires_grad_() for part in wide.split([heads[0], heads[1], heads[1]], dim=1)]
    expected = plain(*parts, rotary, LENGTHS, scores)
    dout = torch.randn_like(expected)
    wanted = [expected, *torch.autograd.grad(expected, parts, dout)]
    found = sequence_attention_(*parts, cu_seqlens, max(LENGTHS), scores, rotary)
    for one, other in zip([found, *torch.autograd.grad(found, parts, dout)], wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("heads", [(4, 4, 8), (6, 2, 10), (1, 1, 2), (3, 1, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rotation_kernels_are_the_reference(heads, dtype):
    wide, rotary, _ = draw(*heads, dtype, DEVICE)
    split = (heads[0], heads[1], heads[1])
    q, k, v = wide.clone().split(split, dim=1)
    rotate.rotate_(q, k, *rotary)
    expected = [reference.rotate(part, *rotary) for part in wide.split(split, dim=1)[:2]]
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-3, "atol": 2e-3}
    torch.testing.assert_close(q, expected[0], **tolerance)
    torch.testing.assert_close(k, expected[1], **tolerance)
    assert torch.equal(v, wide.split(split, dim=1)[2])
    found = rotate.rotate_gradients(*wide.split(split, dim=1), *rotary)
    wanted = reference.rotate_gradients(*wide.split(split, dim=1), *rotary)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **tolerance)
    # Side by side, for the projections' backward pass.
    assert found[1].data_ptr() == found[0].data_ptr() + heads[0] * heads[2] * dtype.itemsize


def test_the_rotation_s_gradient_is_its_derivative():
    wide, rotary, _ = draw(2, 2, 6, torch.float64)
    q, k, v = wide.split(2, dim=1)
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    turned = reference.rotate(q, *rotary), reference.rotate(k, *rotary)
    expected = torch.autograd.grad(turned, (q, k), (dq, dk))
    found = reference.rotate_gradients(dq, dk, v, *rotary)
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1])


@pytest.mark.parametrize("family", MODELS)
def test_own_attention_changes_no_loss_and_no_gradient(family):
    model = MODELS[family]().double()
    batch = padded_batch()
    plan = RowPlan.from_labels(batch["labels"])
    expected = dense_losses(model, batch)
    wanted = gradients(model, expected)
    with Hoisted(model) as hoisted:
        own = OwnAttention(model)
        replaced = [block for block in model.modules() if "forward" in vars(block) and hasattr(block, "head_dim")]
        assert len(replaced) == (0 if family == "phi3" else model.config.num_hidden_layers)
        found = hoisted.row_losses(ActiveTokens.gather(batch["input_ids"], plan))
        gradient = gradients(model, found)
        own.remove()
        assert not any("forward" in vars(block) for block in replaced)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    largest = max(value.norm() for value in wanted.values())
    for name, value in wanted.items():
        assert (gradient[name] - value).norm() <= 1e-5 * value.norm() + 1e-7 * largest, name


def test_an_attention_block_that_does_something_else_keeps_its_own_code():
    model = make_llama()
    block = model.model.layers[0].self_attn

    class Doubled(type(block)):
        def forward(self, *args, **kwargs):
            out, weights = super().forward(*args, **kwargs)
            return 2 * out, weights

    block.__class__ = Doubled
    with Hoisted(model):
        own = OwnAttention(model)
        assert "forward" not in vars(block)
        assert "forward" in vars(model.model.layers[1].self_attn)
        own.remove()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and there is none here")
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("heads", [(24, 8, 128), (4, 4, 64), (9, 3, 64)])
def test_flash_attention_with_rotation_errs_no_more_than_torch_in_bf16(window, heads):
    lengths = [57, 33, 196, 80, 0, 1, 100]
    wide, rotary, cu_seqlens = draw(*heads, torch.bfloat16, "cuda", lengths)
    split, scores = (heads[0], heads[1], heads[1]), Scores(window=window)
    dout = torch.randn(sum(lengths), heads[0], heads[2], device="cuda", dtype=torch.bfloat16)

    def run(attend, dtype):
        parts = [part.to(dtype, copy=True).requires_grad_() for part in wide.split(split, dim=1)]
        out = attend([part.clone() for part in parts])
        return [out.detach(), *torch.autograd.grad(out, parts, dout.to(dtype))]

    truth = run(lambda parts: plain(*parts, rotary, lengths, scores), torch.float64)
    torchs = run(lambda parts: plain(*parts, rotary, lengths, scores), torch.bfloat16)
    ours = run(lambda parts: sequence_attention_(*parts, cu_seqlens, 256, scores, rotary), torch.bfloat16)
    for true, one, other in zip(truth, torchs, ours, strict=True):
        error, allowed = ((x.double() - true).norm() / true.norm() for x in (other, one))
        assert error <= 2 * allowed + 1e-4
