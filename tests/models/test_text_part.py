"""Checkpoints of models that also see or hear give their text part, which computes what the whole model does with
texts."""

import json

import pytest
import torch
from builders import SIZES, load_base, save_model, seeded, shape_of
from model_families import LINEAR, SLIDING
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma4Config,
    Lfm2VlConfig,
    Mistral3Config,
    Qwen3_5Config,
)

from sebp_edge.errors import ModelError

SIGHT = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
}
GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": 2 * SLIDING["layer_types"],
    "sliding_window": 5,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 320,
    "final_logit_softcapping": 1.5,
}
QWEN_SIGHT = {
    "depth": 1,
    "num_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
WHOLE = {
    "qwen3.5": lambda: Qwen3_5Config(text_config=SIZES | LINEAR | {"head_dim": 8}, vision_config=QWEN_SIGHT),
    "gemma4": lambda: Gemma4Config(
        text_config=SIZES | GEMMA4, vision_config=SIGHT | {"position_embedding_size": 16}, audio_config=None
    ),
    "gemma3": lambda: Gemma3Config(
        text_config=SIZES | SLIDING | {"head_dim": 8},
        vision_config=SIGHT | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    ),
    "mistral3": lambda: Mistral3Config(
        text_config=SIZES | {"model_type": "mistral"}, vision_config=SIGHT | {"model_type": "pixtral"}
    ),
    "lfm2-vl": lambda: Lfm2VlConfig(
        text_config=SIZES | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
        vision_config=SIGHT | {"model_type": "siglip2_vision_model"},
    ),
}
IDS = torch.randint(7, 320, (2, 19), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=WHOLE)
def whole(request, tmp_path):
    """A random model that also sees, and its folder."""
    with seeded(3):
        model = AutoModelForImageTextToText.from_config(WHOLE[request.param]()).eval()
    save_model(model, tmp_path)
    return model, tmp_path


@pytest.mark.slow
@torch.no_grad()
def test_the_text_part_computes_what_the_whole_model_does_with_texts(whole):
    model, folder = whole
    base = load_base(folder)
    assert not hasattr(base.model.config, "vision_config")
    assert torch.equal(base.model(IDS).logits, model(input_ids=IDS).logits)
    assert base.num_parameters < model.num_parameters()
    assert shape_of(folder).parameters == base.num_parameters


@torch.no_grad()
def test_both_names_of_the_weights_are_read(whole):
    """transformers 4.52 has changed them, and keeps the older ones in the files of some families."""
    model, folder = whole
    weights = load_file(folder / "model.safetensors")
    if "language_model.model.norm.weight" in weights:
        pairs = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}
    else:
        pairs = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
    other = {}
    for name, weight in weights.items():
        begin = next((begin for begin in pairs if name.startswith(begin)), "")
        other[pairs.get(begin, "") + name.removeprefix(begin)] = weight
    assert other.keys() != weights.keys()
    save_file(other, folder / "model.safetensors", {"format": "pt"})
    assert torch.equal(load_base(folder).model(IDS).logits, model(input_ids=IDS).logits)


def test_a_text_part_that_lacks_a_weight_is_refused(whole):
    _, folder = whole
    weights = load_file(folder / "model.safetensors")
    lost = next(name for name in weights if "layers.0" in name and "language_model" in name)
    save_file({name: each for name, each in weights.items() if name != lost}, folder / "model.safetensors")
    with pytest.raises(ModelError, match="lacks 1 of its weight tensors"):
        load_base(folder)


@pytest.mark.slow
def test_the_parts_for_sight_are_not_in_the_plan(whole):
    _, folder = whole
    path = folder / "config.json"
    values = json.loads(path.read_text())
    before = shape_of(folder)
    values["vision_config"]["intermediate_size"] *= 2
    path.write_text(json.dumps(values))
    assert shape_of(folder) == before
