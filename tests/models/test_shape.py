"""A decoder's sizes, read from its modules: which layers are counted, also for models that lack some parts."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from sebp_edge.engine.memory.shape_reader import read_shape
from sebp_edge.engine.models.catalog import bundled_config, resolve
from sebp_edge.engine.models.model_shape import shape_of
from sebp_edge.engine.models.shape import LinearShape

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 320}
FAMILIES = {
    "llama": {"num_attention_heads": 4, "intermediate_size": 160},
    "falcon": {"num_attention_heads": 4},  # a linear layer of its own
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},  # weights transposed
    "opt": {"num_attention_heads": 4, "ffn_dim": 128, "word_embed_proj_dim": 32},  # linear layers outside of the blocks
}


def shape_in(folder, config):
    config.save_pretrained(folder)
    return read_shape(resolve(folder))


@pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_linear_layers_are_those_that_peft_adapts(family):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | FAMILIES[family]))
    shape = shape_of(model, "model")
    peft = get_peft_model(model, LoraConfig(r=5, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = sum(parameter.numel() for parameter in peft.parameters() if parameter.requires_grad)
    assert shape.adapter_parameters(5) == trained > 0


@pytest.mark.slow
def test_a_decoder_without_attention_has_a_shape(tmp_path):
    shape = shape_in(tmp_path, AutoConfig.for_model("mamba", **SIZES))
    assert (shape.head_size, shape.is_hoisted) == (0, False)
    assert shape.linear_parameters > 0


def test_a_config_whose_positions_would_fill_the_memory_has_a_shape(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1e12}
    AutoConfig.for_model("qwen3_5_text", **SIZES, head_dim=16, rope_parameters=rope).save_pretrained(tmp_path)
    assert not read_shape(resolve(tmp_path)).is_hoisted


def test_a_models_sizes_are_read_without_its_weights():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES | FAMILIES["llama"]))
    shape = shape_of(model, "model")
    assert (shape.vocabulary, shape.hidden, shape.head_size, len(shape.blocks)) == (320, 64, 16, 2)
    assert all(block.kind is None for block in shape.blocks)


def test_a_shape_is_read_from_the_config_alone(tmp_path):
    shape = shape_in(tmp_path, LlamaConfig.from_json_file(bundled_config(resolve("llama-3.2-3b"))))
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert shape.parameters == 3_212_749_824
    assert (shape.vocabulary, shape.hidden, shape.head_size) == (128256, 3072, 128)
    assert len(shape.blocks) == 28
    assert shape.is_hoisted
    assert shape.blocks[27].linears["self_attn.k_proj"] == LinearShape(3072, 1024)
    assert shape.blocks[0].kind.num_norms == 2


def test_each_block_has_the_kind_of_its_counterpart_in_the_small_copy(tmp_path):
    layers = {"num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    config = AutoConfig.for_model("smollm3", **SIZES | layers)
    assert config.no_rope_layers == [1, 1, 1, 0, 1, 1, 1, 0]
    fused = [block.kind.has_fused_attention for block in shape_in(tmp_path, config).blocks]
    assert fused == [True, True, True, False, True, True, True, False]
