"""Inference with 2:4 weights: the same logits as with dense weights, which come back unchanged; or a refusal."""

import pytest
import torch
from builders import make_llama
from torch import nn

from sebp_edge.errors import SparsityError
from sebp_edge.research import nm_sparse, semi_structured


def pruned_llama(dtype=torch.bfloat16):
    """A decoder whose linear layers but the head are 2:4; its head and its embedding are one tensor."""
    model = make_llama(hidden_size=64, intermediate_size=96, tie_word_embeddings=True).to(dtype)
    nm_sparse(model, "2:4", "sr-ste", num_steps=1).remove()
    return model.eval()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 7, 64, 513])
def test_logits_are_those_of_the_dense_weights(dtype, length):
    model = pruned_llama(dtype).cuda()
    ids = torch.randint(3, 320, (2, length), generator=torch.Generator().manual_seed(0)).cuda()
    with torch.no_grad():
        dense = model(ids).logits
        exact = pruned_llama(dtype).double().cuda()(ids).logits
        with semi_structured(model) as handle:
            found = model(ids).logits
    assert len(handle.layers) == 7 * model.config.num_hidden_layers
    error, rounding = (found - exact).norm() / exact.norm(), (dense - exact).norm() / exact.norm()
    assert error <= 2 * rounding + 1e-4


def requested_bytes():
    """What is allocated; blocks that the allocator does not split are larger."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


@pytest.mark.gpu
def test_weights_take_nine_sixteenths_and_come_back_as_the_same_parameters():
    model = nn.Sequential(nn.Linear(2048, 4096), nn.Tanh()).bfloat16().cuda()
    weight = model[0].weight
    nm_sparse(model, "2:4", "sr-ste", num_steps=1).remove()
    x = torch.randn(3, 5, 2048, dtype=torch.bfloat16, device="cuda")
    expected = model(x)
    before, dense_bytes = weight.detach().clone(), requested_bytes()
    with semi_structured(model):
        taken = requested_bytes() - dense_bytes + before.nbytes
        torch.testing.assert_close(model(x), expected, rtol=0.02, atol=0.02)
    assert model[0].weight is weight
    assert torch.equal(weight, before)
    assert weight.requires_grad
    assert taken == pytest.approx(before.nbytes * 9 / 16, rel=0.02)


@pytest.mark.gpu
def test_an_error_inside_leaves_dense_weights():
    model = pruned_llama().cuda()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(KeyboardInterrupt), semi_structured(model):
        raise KeyboardInterrupt
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: make_llama().bfloat16(), "no 2:4 linear layers"),
        (lambda: pruned_llama(torch.float32), "weights are in float32, not in bf16 or fp16"),
        (pruned_llama, "the model is on 'cpu', not on a CUDA GPU"),
    ],
)
def test_what_has_no_sparse_kernels_is_refused_and_unchanged(model, message):
    model = model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(SparsityError, match=message):
        semi_structured(model)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


@pytest.mark.gpu
def test_a_gpu_without_sparse_kernels_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(SparsityError, match="is no GPU of NVIDIA's Ampere generation"):
        semi_structured(pruned_llama().cuda())
