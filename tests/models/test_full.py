"""Full fine-tuning: saves a model folder that transformers loads, and restores the base model's weights."""

import json

import pytest
import torch
from builders import attach, disturb, load_adapter, load_base, make_llama, save_model, unchanged
from transformers import AutoModelForCausalLM, AutoTokenizer

from sebp_edge import Recipe
from sebp_edge.engine.models.adaptation import trainable
from sebp_edge.errors import BaseModelMismatch

RECIPE = Recipe.load("full")
IDS = torch.arange(7, 71)[None]


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def base(request, tmp_path):
    return load_base(save_model(make_llama(tie_word_embeddings=request.param), tmp_path / "base"), RECIPE)


@torch.no_grad()
def logits(model):
    return model(IDS).logits.float()


def trained(base):
    """Attaches weights and moves each one, to values that bf16 cannot represent."""
    return disturb(attach(base, RECIPE), 0.05)


def save(weights, folder):
    folder.mkdir()
    weights.save(folder)
    return folder


def test_every_weight_is_trained(base):
    assert len(trainable(attach(base, RECIPE, seed=0))) == len(list(base.model.parameters()))


def test_transformers_loads_the_saved_model_with_the_same_logits(base, tmp_path, capfd):
    weights = trained(base)
    folder = save(weights, tmp_path / "saved")
    assert capfd.readouterr() == ("", "")
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu").eval()
    assert torch.equal(logits(plain), logits(weights.model))
    assert AutoTokenizer.from_pretrained(folder)("the ferry") == base.tokenizer("the ferry")


def test_loading_restores_the_saved_weights_and_detach_those_of_the_base_model(base, tmp_path):
    before = logits(base.model)
    weights = trained(base)
    expected = logits(weights.model)
    folder = save(weights, tmp_path / "saved")
    weights.detach()
    assert torch.equal(logits(base.model), before)
    assert not any(parameter.requires_grad for parameter in base.model.parameters())
    again = load_adapter(base, folder)
    assert torch.equal(logits(again.model), expected)
    again.detach()
    assert torch.equal(logits(base.model), before)


def test_saved_files_contain_no_path(base, tmp_path):
    folder = save(trained(base), tmp_path / "saved")
    for path in folder.iterdir():
        assert str(tmp_path).encode() not in path.read_bytes()


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 1}, {"num_hidden_layers": 3}, {"intermediate_size": 64}])
def test_another_base_model_is_refused_and_unchanged(base, tmp_path, changes):
    folder = save(trained(base), tmp_path / "saved")
    other = load_base(save_model(make_llama(**changes), tmp_path / "other"), RECIPE)
    mismatch = pytest.raises(BaseModelMismatch, match="'saved' belong to a base model other than 'other'")
    with unchanged(other.model), mismatch:
        load_adapter(other, folder)
