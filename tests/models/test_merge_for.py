"""Training for an export: the model computes as the merged and rounded one, and gradients pass straight through."""

import pytest
import torch
from export_sources import make_source
from torch import nn

from sebp_edge.engine.models.adaptation import attach, load, restore, snapshot, trainable
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.loading import load_base_model
from sebp_edge.engine.models.lora import plain_projection
from sebp_edge.engine.sparse.hoist import Hoisted
from sebp_edge.engine.sparse.rows.active_tokens import ActiveTokens
from sebp_edge.engine.sparse.rows.row_plan import RowPlan
from sebp_edge.engine.sparse.sparsify import Sparsified
from sebp_edge.errors import ModelError
from sebp_edge.export.gguf_file import dequantised, kind_of, quantised
from sebp_edge.recipe import Recipe

QUANTISATIONS = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"]
RECIPE = Recipe.load("notes").replace(r=4)
IDS = torch.arange(7, 71)[None]
# Each family, and each quantisation.
WIDE = pytest.mark.parametrize(
    ("wide", "quant"),
    [("llama", "q4_0"), ("llama-3.1", "q4_1"), ("gemma2", "q5_0"), ("phi3", "q5_1"), ("llama", "q8_0")],
    indirect=["wide"],
)


@pytest.fixture
def wide(request, tmp_path):
    """A small random model whose matrices are made of whole blocks."""
    return load_base_model(resolve(make_source(tmp_path / "model", request.param)), RECIPE, torch.device("cpu"))


@pytest.fixture
def llama(tmp_path):
    return load_base_model(resolve(make_source(tmp_path / "model", "llama")), RECIPE, torch.device("cpu"))


def make_adapter(base, quant):
    """An adapter whose product is about as large as the steps of the grid."""
    adapter = attach(base, RECIPE.replace(merge_for=quant), seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainable(adapter):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return adapter


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def adapted_layers(model):
    return {name: layer for name, layer in model.named_modules() if plain_projection_or_none(layer)}


def plain_projection_or_none(layer):
    return plain_projection(layer) if hasattr(layer, "lora_variant") else None


def merged(layer):
    return torch.addmm(
        layer.base_layer.weight,
        layer.lora_B["default"].weight,
        layer.lora_A["default"].weight,
        alpha=layer.scaling["default"],
    )


def written(weight, kind):
    return dequantised(quantised(weight.detach(), kind), kind)


@torch.no_grad()
def exported(base, adapter, quant):
    """The weights of an exported file by their names in the base model."""
    layers = {f"{name}.base_layer.weight": layer for name, layer in adapted_layers(base.model).items()}
    originals = {id(weight): original for weight, original in adapter._unrounded}
    weights = {}
    for name, weight in base.model.named_parameters():
        if "lora_" not in name:
            own = name.replace(".base_layer", "")
            weights[own] = merged(layers[name]) if name in layers else originals.get(id(weight), weight)
    return {name: written(weight, kind_of(name, weight.shape, quant, weights)) for name, weight in weights.items()}


@WIDE
def test_the_forward_pass_is_that_of_the_exported_weights(wide, quant):
    """Up to rounding: W + (Q - M) + s BA is summed in fp32 where the file has Q."""
    adapter = make_adapter(wide, quant)
    expected, found = exported(wide, adapter, quant), logits(adapter.model)
    adapter.detach()
    plain = logits(wide.model)
    wide.model.load_state_dict(expected, strict=False)
    assert torch.allclose(found, logits(wide.model), atol=2e-5, rtol=1e-5)
    assert not torch.allclose(found, plain, atol=1e-2)


@pytest.mark.parametrize("quant", QUANTISATIONS)
def test_a_weight_with_the_adapter_is_the_exported_one(llama, quant):
    adapter = make_adapter(llama, quant)
    expected = exported(llama, adapter, quant)
    for name, layer in adapted_layers(llama.model).items():
        projection = plain_projection(layer)
        weight = torch.empty_like(layer.base_layer.weight)
        projection.weight.dequantise(weight)
        difference = merged(layer) - layer.base_layer.weight + weight - expected[f"{name}.weight"]
        assert difference.abs().max() < 3e-7  # a few units in the last place of numbers below 1


@pytest.mark.parametrize("quant", QUANTISATIONS)
def test_without_the_adapter_the_base_model_is_rounded_too(llama, quant):
    adapter = make_adapter(llama, quant)
    with_adapter = logits(adapter.model)
    with adapter.disabled():
        found = logits(adapter.model)
    assert torch.equal(logits(adapter.model), with_adapter)
    adapter.detach()
    weights = dict(llama.model.named_parameters())
    rounded = {name: written(each, kind_of(name, each.shape, quant, weights)) for name, each in weights.items()}
    llama.model.load_state_dict(rounded, strict=False)
    assert torch.allclose(found, logits(llama.model), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "llama-3.1"])
def test_detaching_restores_every_weight(tmp_path, family):
    base = load_base_model(resolve(make_source(tmp_path / "model", family)), RECIPE, torch.device("cpu"))
    before = {name: weight.clone() for name, weight in base.model.state_dict().items()}
    adapter = make_adapter(base, "q4_0")
    adapter.detach()
    after = base.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


class StraightThrough(nn.Module):
    """The definition: x Q(M)ᵀ, where Q(M) = M + (Q(M) - M) and the sum in brackets is a constant."""

    def __init__(self, layer, quant):
        super().__init__()
        self.layer, self.quant = layer, quant

    def forward(self, x):
        weight = merged(self.layer)
        kind = kind_of("", weight.shape, self.quant, ())
        return nn.functional.linear(x, weight + (written(weight, kind) - weight).detach(), self.layer.base_layer.bias)


def batch():
    generator = torch.Generator().manual_seed(5)
    input_ids = torch.randint(7, 300, (3, 24), generator=generator)
    labels = input_ids.clone()
    labels[0, 15:], labels[1, 20:], labels[2, :6] = -100, -100, -100
    return input_ids, RowPlan.from_labels(labels)


def gradients(adapter, losses):
    for parameter in trainable(adapter):
        parameter.grad = None
    losses.mean().backward()
    return losses.detach(), [parameter.grad for parameter in trainable(adapter)]


def padded_losses(model, input_ids, plan):
    rows = model(input_ids=input_ids, use_cache=False).logits.flatten(0, 1)[plan.loss_rows]
    return nn.functional.cross_entropy(rows, plan.targets, reduction="none")


def assert_same(found, expected):
    assert torch.allclose(found[0], expected[0], atol=1e-5)
    for one, other in zip(found[1], expected[1], strict=True):
        assert (one - other).norm() <= 2e-5 * other.norm() + 1e-7


@WIDE
def test_gradients_pass_straight_through(wide, quant):
    """Padded or hoisted, in PEFT's layers or fused: all are the definition's."""
    adapter, (input_ids, plan) = make_adapter(wide, quant), batch()
    found = gradients(adapter, padded_losses(wide.model, input_ids, plan))
    with Hoisted(adapter.model) as hoisted:
        by_rows = gradients(adapter, hoisted.row_losses(ActiveTokens.gather(input_ids, plan)))
    with Sparsified(adapter.model) as sparsified:
        by_layer = gradients(adapter, sparsified.row_losses(input_ids, plan))
    for name, layer in adapted_layers(wide.model).items():
        wide.model.set_submodule(name, StraightThrough(layer, quant))
    expected = gradients(adapter, padded_losses(wide.model, input_ids, plan))
    for each in (found, by_rows, by_layer):
        assert_same(each, expected)


@pytest.mark.slow
@pytest.mark.parametrize("wide", ["smollm3"], indirect=True)
@pytest.mark.parametrize("options", [{"checkpoints": 2}, {"chunked_blocks": True}])
def test_recomputed_blocks_have_the_same_gradients(wide, options):
    adapter, (input_ids, plan) = make_adapter(wide, "q4_0"), batch()
    tokens = ActiveTokens.gather(input_ids, plan)
    with Hoisted(adapter.model) as hoisted:
        expected = gradients(adapter, hoisted.row_losses(tokens))
    with Hoisted(adapter.model, **options) as hoisted:
        assert_same(gradients(adapter, hoisted.row_losses(tokens)), expected)


def test_changed_weights_are_rounded_again(llama):
    """As between steps: nothing of an earlier rounding is kept."""
    adapter, (input_ids, plan) = make_adapter(llama, "q4_0"), batch()
    tokens, state = ActiveTokens.gather(input_ids, plan), snapshot(adapter)
    with Hoisted(adapter.model) as hoisted:
        first = hoisted.row_losses(tokens).detach()
        with torch.no_grad():
            for parameter in trainable(adapter):
                parameter.mul_(2)
        other = hoisted.row_losses(tokens).detach()
        restore(adapter, state)
        assert torch.equal(hoisted.row_losses(tokens), first)
    assert not torch.allclose(other, first, atol=1e-3)


def test_the_saved_adapter_is_plain_lora(llama, tmp_path):
    adapter = make_adapter(llama, "q4_0")
    tmp_path.joinpath("adapter").mkdir()
    adapter.save(tmp_path / "adapter")
    with_adapter, state = logits(adapter.model), snapshot(adapter)
    adapter.detach()
    again = load(llama, tmp_path / "adapter", "q4_0")
    assert torch.equal(logits(again.model), with_adapter)
    again.detach()
    plain = load(llama, tmp_path / "adapter")
    assert all(torch.equal(one, other) for one, other in zip(snapshot(plain), state, strict=True))
    assert not torch.allclose(logits(plain.model), with_adapter, atol=1e-3)


def test_rows_that_are_no_whole_blocks_are_refused(base):
    """The model of this fixture has 48 inputs somewhere; it is unchanged afterwards."""
    before = logits(base.model)
    with pytest.raises(ModelError, match="has rows of 48 weights, which blocks of 32 do not divide"):
        attach(base, RECIPE.replace(merge_for="q8_0"), seed=0)
    assert torch.equal(logits(base.model), before)
    assert not any("lora" in name for name, _ in base.model.named_parameters())
