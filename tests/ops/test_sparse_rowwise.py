"""Norms and activations with the sparse backward pass: dense gradients, computed for the active rows only."""

import pytest
import torch
from pairwise import pairwise
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from sebp_edge.ops import ActiveRows, sparse_rowwise

N, K = 24, 10
ROWS = {
    "a few ids": torch.tensor([0, 3, 4, 17]),
    "one id": torch.tensor([23]),
    "no ids": torch.tensor([], dtype=torch.int64),
    "most ids": torch.arange(2, 24),
    "a slice": slice(3, 9),
    "a wide slice": slice(0, 20),
    "all": slice(0, 24),
}
MODULES = {
    "LayerNorm": lambda: nn.LayerNorm(K),
    "LayerNorm without weights": lambda: nn.LayerNorm(K, elementwise_affine=False),
    "RMSNorm": lambda: LlamaRMSNorm(K),
    "GELU": lambda: ACT2FN["gelu"],
    "SiLU": lambda: ACT2FN["silu"],
}


def case(module, active, dtype=torch.float64, shape=(4, 6)):
    """x, and an output gradient that is zero outside the active rows."""
    torch.manual_seed(1)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape).to(dtype)
    dout = torch.zeros(N, K, dtype=dtype)
    dout[active] = torch.randn(N, K, dtype=dtype)[active]
    return torch.randn(*shape, K, dtype=dtype), dout.view(*shape, K)


def results(function, x, dout, parameters):
    leaves = [x.clone().requires_grad_(), *parameters]
    out = function(leaves[0])
    return out, *torch.autograd.grad(out, leaves, dout)


@pairwise(shape=[(4, 6), (24,), (2, 3, 4)], active=ROWS, make=MODULES)
def test_gradients_equal_dense_ones(make, active, shape, poisoned_memory):
    module = make()
    x, dout = case(module, active, shape=shape)
    parameters = tuple(module.parameters())
    dense = results(module, x, dout, parameters)
    found = results(lambda x: sparse_rowwise(module, x, active), x, dout, parameters)
    assert torch.equal(found[0], dense[0])
    for one, other in zip(found[1:], dense[1:], strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-14)


def test_shared_rows_give_the_results_of_their_ids():
    module, ids = nn.LayerNorm(K).double(), ROWS["a few ids"]
    x, dout = case(module, ids)
    parameters = tuple(module.parameters())
    one, other = (
        results(lambda x, active=active: sparse_rowwise(module, x, active), x, dout, parameters)
        for active in (ids, ActiveRows.from_ids(ids, N))
    )
    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("active", [ROWS["a few ids"], slice(3, 7)], ids=["ids", "a slice"])
def test_only_the_active_rows_are_kept(active):
    module, storages = nn.GELU(), []
    x = torch.randn(4, 6, K, requires_grad=True)

    def pack(tensor):
        storages.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        sparse_rowwise(module, x, active)
    assert storages == [4 * K * x.itemsize]


@pytest.mark.parametrize("trained", ["x", "weight", "nothing"])
def test_only_needed_gradients_are_computed(trained):
    module = nn.LayerNorm(K).requires_grad_(False)
    module.weight.requires_grad_(trained == "weight")
    x, dout = case(module, ROWS["a few ids"], torch.float32)
    x.requires_grad_(trained == "x")
    out = sparse_rowwise(module, x, ROWS["a few ids"])
    assert out.requires_grad == (trained != "nothing")
    if out.requires_grad:
        out.backward(dout)
        assert [tensor.grad is not None for tensor in (x, module.weight, module.bias)] == [
            trained == "x",
            trained == "weight",
            False,
        ]


@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(K), lambda: ACT2FN["gelu_new"]], ids=["LayerNorm", "GELU"])
def test_autocast_gives_what_dense_gives(make):
    module, active = make(), ROWS["a few ids"]
    x, dout = case(module, active, torch.float32)
    parameters, x = tuple(module.parameters()), x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        dense_out = module(leaf := x.clone().requires_grad_())
        found_out = sparse_rowwise(module, sparse_leaf := x.clone().requires_grad_(), active)
    assert torch.equal(found_out, dense_out) and found_out.dtype == dense_out.dtype
    dense = torch.autograd.grad(dense_out, [leaf, *parameters], dout.to(dense_out.dtype))
    found = torch.autograd.grad(found_out, [sparse_leaf, *parameters], dout.to(found_out.dtype))
    for one, other in zip(found, dense, strict=True):
        assert one.dtype == other.dtype
        assert torch.allclose(one, other, rtol=1e-2, atol=1e-6)


def test_without_gradients_it_is_the_function_itself():
    module = nn.LayerNorm(K)
    x = torch.randn(24, K)
    with torch.no_grad():
        assert torch.equal(sparse_rowwise(module, x, ROWS["a few ids"]), module(x))


def test_a_gradient_outside_the_rows_is_an_error_if_verified(verified_rows):
    x = torch.randn(24, K, requires_grad=True)
    out = sparse_rowwise(ACT2FN["gelu"], x, ROWS["a few ids"])
    with pytest.raises(RuntimeError, match="20 of 20 skipped rows have a gradient"):
        out.backward(torch.ones_like(out))


def test_autograd_notices_a_changed_parameter():
    module = nn.LayerNorm(K)
    out = sparse_rowwise(module, torch.randn(24, K, requires_grad=True), slice(0, 4))
    with torch.no_grad():
        module.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("change", [lambda out: out.mul_(2), lambda out: nn.functional.relu(out, inplace=True)])
def test_outputs_can_be_changed_in_place(change):
    module, active = nn.LayerNorm(K), ROWS["a few ids"]
    x, dout = case(module, active)
    parameters = tuple(module.parameters())
    dense = results(lambda x: change(module(x)), x, dout, parameters)
    found = results(lambda x: change(sparse_rowwise(module, x, active)), x, dout, parameters)
    for one, other in zip(found, dense, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-14)
