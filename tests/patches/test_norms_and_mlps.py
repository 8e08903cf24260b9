"""Norms and MLPs on our own operations: recognised by their results, exact, restored, and their outputs not kept.

Without a GPU these tests run plain PyTorch; the tests of the kernels are in test_small_kernels.
"""

import gc
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from against_dense import assert_same_gradients, dense_losses, gradients, padded_batch
from builders import SIZES, batch_losses, make_llama
from model_families import MODELS
from pairwise import pairwise
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.activations import ACT2FN

from sebp_edge.engine.sparse.hoist import Hoisted
from sebp_edge.engine.sparse.patches import norms_and_mlps
from sebp_edge.engine.sparse.patches.fused_lora import FusedLora
from sebp_edge.engine.sparse.patches.norms_and_mlps import SmallOps
from sebp_edge.ops import GatedInputs
from sebp_edge.research import RowPlan

# Norms and MLPs of two layers. A layer has two norms, four in Gemma, and two more of heads in Qwen 3 and Gemma 3.
REPLACED = {"llama": (5, 2), "qwen3": (9, 2), "mistral": (5, 2), "gemma2": (9, 2), "gemma3": (13, 2), "phi3": (5, 0)}


pytestmark = pytest.mark.usefixtures("fused_modules")


def with_lora(model):
    config = LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, config).to(next(model.parameters()).dtype)


@contextmanager
def norms_in_fp64(model):
    """Context in which norms compute in fp64; in transformers they compute in fp32, with errors above the tolerance."""
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    for norm in norms:
        weight = norm.weight + (1.0 if "Gemma" in type(norm).__name__ else 0.0)
        eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
        norm.forward = lambda x, weight=weight, eps=eps: F.rms_norm(x, weight.shape, weight, eps)
    try:
        yield
    finally:
        for norm in norms:
            del norm.forward


@pairwise(family=[*MODELS], adapt=["full", "lora"], prompt=[0, 5])
def test_losses_and_gradients_are_the_padded_dense_ones(family, adapt, prompt):
    model, draw = MODELS[family]().double(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.1)
    model = with_lora(model) if adapt == "lora" else model
    batch = padded_batch(prompt=prompt)
    with norms_in_fp64(model):
        expected = dense_losses(model, batch)
        expected_gradients = gradients(model, expected)
    with Hoisted(model) as hoisted:
        replaced = [type(module).__name__ for module in hoisted._small_ops.replaced]
        found = batch_losses(hoisted, batch)
        found_gradients = gradients(model, found)
    assert tuple(sum(end in name for name in replaced) for end in ("RMSNorm", "MLP")) == REPLACED[family]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert_same_gradients(expected_gradients, found_gradients)


class OtherNorm(nn.Module):
    """Has `eps` and one weight, like an RMSNorm, but another formula."""

    def __init__(self, formula, size=8, eps=1e-6):
        super().__init__()
        self.weight, self.eps, self.formula = nn.Parameter(torch.rand(size)), eps, formula

    def forward(self, x):
        return self.formula(x, self.weight, self.eps)


class OtherMlp(nn.Module):
    """Has the parts of a Llama's MLP, but another formula."""

    def __init__(self, formula, act_fn=None):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 9), nn.Linear(8, 9), nn.Linear(9, 8)
        self.act_fn, self.formula = act_fn or nn.SiLU(), formula

    def forward(self, x):
        return self.down_proj(self.formula(self, x))


def plain_mlp(mlp, x):
    return mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)


def rms(x, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class OneModule(nn.Module):
    """A decoder with only an embedding and the tested module."""

    def __init__(self, module):
        super().__init__()
        self.embedding, self.module = nn.Embedding(5, 8), module

    def get_input_embeddings(self):
        return self.embedding


ALIKE = {
    "norm": OtherNorm(lambda x, w, eps: rms(x, eps) * w),
    "norm of one plus the weight": OtherNorm(lambda x, w, eps: rms(x, eps) * (1 + w)),
    "torch's norm": nn.RMSNorm(8, eps=1e-6),
    "mlp": OtherMlp(plain_mlp),
    "mlp with tanh": OtherMlp(plain_mlp, nn.GELU(approximate="tanh")),
    "mlp with transformers' tanh": OtherMlp(plain_mlp, ACT2FN["gelu_new"]),
}
DIFFERENT = {
    "norm with eps outside": OtherNorm(lambda x, w, eps: x / (x.square().mean(-1, keepdim=True).sqrt() + eps) * w),
    "norm with a factor": OtherNorm(lambda x, w, eps: rms(x, eps) * w * 1.01),
    "norm of half the columns": OtherNorm(lambda x, w, eps: rms(x[..., :4], eps) * w[:4]),
    "norm with another eps": OtherNorm(lambda x, w, eps: rms(x, 1e-5) * w),
    "norm without eps": nn.RMSNorm(8),
    "layer norm": nn.LayerNorm(8, bias=False),
    "layer norm with a bias": nn.LayerNorm(8),
    "linear": nn.Linear(1, 8, bias=False),
    "mlp with relu": OtherMlp(plain_mlp, nn.ReLU()),
    "mlp with the exact GELU": OtherMlp(plain_mlp, nn.GELU()),
    "mlp with a trained activation": OtherMlp(plain_mlp, nn.PReLU()),
    "mlp with a factor": OtherMlp(lambda mlp, x: 1.5 * plain_mlp(mlp, x)),
    "mlp that activates the other half": OtherMlp(lambda mlp, x: mlp.gate_proj(x) * mlp.act_fn(mlp.up_proj(x))),
    "mlp without a gate": OtherMlp(lambda mlp, x: mlp.act_fn(mlp.up_proj(x))),
}


def attached(decoder):
    handle = SmallOps(decoder)
    handle.attach()
    return handle


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_modules_that_compute_the_same_are_replaced(name, dtype):
    decoder = OneModule(ALIKE[name]).to(dtype)
    x = torch.randn(7, 8).to(dtype)
    expected = decoder.module(x)
    handle = attached(decoder)
    assert handle.replaced == [decoder.module]
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(decoder.module(x), expected, rtol=tolerance, atol=tolerance)
    handle.remove()
    assert "forward" not in vars(decoder.module)
    assert torch.equal(decoder.module(x), expected)


@pytest.mark.parametrize("name", DIFFERENT)
def test_modules_that_compute_something_else_are_not_replaced(name):
    assert attached(OneModule(DIFFERENT[name]).float()).replaced == []


def test_modules_with_additional_parts_are_not_replaced():
    mlp, norm = OtherMlp(plain_mlp), OtherNorm(lambda x, w, eps: rms(x, eps) * w)
    mlp.dropout = nn.Dropout(0.5)
    norm.register_buffer("scale", torch.ones(8))
    assert attached(OneModule(nn.ModuleList([mlp, norm]))).replaced == []


def test_a_forward_replaced_by_others_stays():
    decoder = OneModule(OtherMlp(plain_mlp))
    decoder.module.forward = others = lambda x: x
    handle = attached(decoder)
    assert handle.replaced == []
    handle.remove()
    assert decoder.module.forward is others


def test_a_norm_promotes_another_dtype_as_before():
    decoder = OneModule(OtherNorm(lambda x, w, eps: w * rms(x.float(), eps).to(x.dtype)))
    x = torch.randn(7, 8).bfloat16()
    expected = decoder.module(x)
    attached(decoder)
    assert expected.dtype == torch.float32
    assert torch.equal(decoder.module(x), expected)


def only_gates(source_of):
    """Makes a `source_of` that returns the sources of gates only, so that outputs of norms are kept."""
    return lambda x: source if isinstance(source := source_of(x), GatedInputs) else None


def kept_and_gradients(model, batch, recomputes_norms):
    """Returns the elements that the graph of a batch keeps, each storage counted once, and the gradients."""
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes() // tensor.itemsize
        return tensor

    with Hoisted(model) as hoisted:
        if not recomputes_norms:
            for group in hoisted._fused_lora._groups:
                group._source_of = only_gates(group._source_of)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            losses = batch_losses(hoisted, batch)
        return sum(kept.values()), gradients(model, losses)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_outputs_of_norms_are_recomputed_bitwise(family):
    model, batch = with_lora(MODELS[family]()), padded_batch(prompt=0)
    rows = len(RowPlan.from_labels(batch["labels"]).active_rows)
    kept, expected = kept_and_gradients(model, batch, False)
    kept_less, found = kept_and_gradients(model, batch, True)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    # Two layers have four norms; the input of the first is not kept, since nothing before it is trained.
    assert kept - kept_less == rows * 3 * SIZES["hidden_size"]


def test_norms_are_recomputed_bitwise_if_the_last_layer_computes_loss_rows_only():
    model, batch = with_lora(make_llama()), padded_batch(prompt=5)
    kept, expected = kept_and_gradients(model, batch, False)
    kept_less, found = kept_and_gradients(model, batch, True)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    assert kept_less < kept


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.float32), pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu)]
)
def test_a_norm_recomputed_before_an_mlp_has_bitwise_equal_gradients(device, dtype):
    model = with_lora(make_llama(hidden_size=96, intermediate_size=200)).to(device, dtype)
    block = model.get_base_model().model.layers[0]
    x = torch.randn(1, 333, 96, generator=torch.Generator().manual_seed(0)).to(device, dtype).requires_grad_()
    small_ops = attached(model.get_base_model())
    results = []
    for source_of in (only_gates(small_ops.source_of), small_ops.source_of):
        fused = FusedLora(model)
        fused.attach(source_of=source_of)
        out = block.mlp(block.post_attention_layernorm(x))
        results.append([out, *torch.autograd.grad(out.float().square().sum(), [x, *lora_of(block.mlp)])])
        fused.remove()
    small_ops.remove()
    assert all(gradient.any() for gradient in results[0])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def lora_of(module):
    return [parameter for name, parameter in module.named_parameters() if "lora_" in name]


def test_nothing_is_kept_after_the_backward_pass():
    model, batch = with_lora(make_llama()), padded_batch()
    storages = []

    def record(module, args, out):
        storages.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in (*args, out))

    for name, module in model.named_modules():
        if name.endswith(("layernorm", "up_proj", "down_proj")):
            module.register_forward_hook(record)
    with Hoisted(model) as hoisted:
        losses = batch_losses(hoisted, batch)
        assert not all(storage.expired() for storage in storages)
        # Without the garbage collector, which would free reference cycles.
        gc.disable()
        try:
            losses.sum().backward()
            assert losses.grad_fn is not None
            assert all(storage.expired() for storage in storages)
            assert len(hoisted._small_ops._sources) == 0
        finally:
            gc.enable()


def test_no_sources_are_recorded_without_gradients():
    model, batch = with_lora(make_llama()), padded_batch()
    with torch.no_grad(), Hoisted(model) as hoisted:
        norm = hoisted._small_ops.replaced[0]
        out = norm(torch.randn(1, 3, 32))
        assert hoisted._small_ops.source_of(out) is None
        batch_losses(hoisted, batch)
        assert len(hoisted._small_ops._sources) == 0


def test_one_module_of_each_kind_is_tried(monkeypatch):
    monkeypatch.setattr(norms_and_mlps, "find_mismatch", trial := Mock(wraps=norms_and_mlps.find_mismatch))
    formula = ALIKE["norm"].formula
    norms = [OtherNorm(formula), OtherNorm(formula), OtherNorm(formula, eps=1e-5), OtherNorm(lambda x, w, eps: 2 * x)]
    norms[1].number = 3  # a setting which might matter
    norms += [OtherNorm(formula), OtherNorm(formula, size=4)]
    handle = attached(OneModule(nn.Sequential(*norms)))
    assert handle.replaced == [each for each in norms if each is not norms[3]]
    assert [*dict.fromkeys(call.args[0] for call in trial.mock_calls)] == [
        each for each in norms if each is not norms[4]
    ]
