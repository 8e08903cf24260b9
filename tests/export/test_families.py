"""Every family, quantisation and format: what is written is what another program computes with."""

import functools
import json

import numpy as np
import pytest
import torch
from builders import make_tokenizer
from export_sources import FAMILIES, SIZES, THETA, long_texts, make_adapter, make_source
from gguf import GGMLQuantizationType, GGUFReader, dequantize, quantize
from safetensors.torch import load_file
from transformers import CohereConfig, Gemma4Config, Gemma4ForConditionalGeneration, MistralConfig, Qwen2Config

from sebp_edge import Personalizer, Recipe
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.gguf.writer import GgufModel
from sebp_edge.engine.models.loading import load_base_model
from sebp_edge.errors import ExportError
from sebp_edge.export.export_result import ExportProgress
from sebp_edge.export.gguf_file import dequantised, quantised, write_model
from sebp_edge.export.gguf_tokenizer import GgufTokenizer
from sebp_edge.export.model_weights import MergedWeights
from sebp_edge.export.read_back import MAX_DIFFERENCE

pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install 'sebp-edge[verify]'")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A function that makes a model of a family and an adapter for it, once, and returns their folders."""

    @functools.cache
    def make(family, **record):
        folder = tmp_path_factory.mktemp(family)
        model = make_source(folder / "model", family)
        return model, make_adapter(folder / "adapter", model, **record)

    return make


@pytest.mark.slow
# The others differ in nothing that is not exported or read back below, or compared with llama.cpp in tests/gguf.
@pytest.mark.parametrize(
    "family", ["llama-3.1", "gemma3-linear", "gemma4", "phi3-long", "smollm3", "lfm2", "qwen3.5-shared-keys"]
)
def test_llama_cpp_computes_what_we_do_with_a_merged_file(source, tmp_path, family):
    model, adapter = source(family)
    result = Personalizer(model, device="cpu").export(adapter, tmp_path / "out", quant="f16", texts=long_texts())
    assert result.read_back_by == "llama.cpp"
    assert result.largest_difference <= MAX_DIFFERENCE
    assert result.loss_adapter != pytest.approx(result.loss_base, abs=1e-6)
    assert abs(result.loss - result.loss_adapter) < 1e-3


# The factors of the small llama-3.1 are not those of Llama 3.1, which are the only ones that reading knows.
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama-3.1"])
def test_what_is_written_is_read_back_bit_for_bit(tmp_path, family):
    """Both directions share a record; llama.cpp above, and the writer of tests/gguf, show that it is right."""
    folder = make_source(tmp_path / "model", family)
    expected = load_base_model(resolve(folder), Recipe.load("notes"), torch.device("cpu")).model
    model = GgufModel(expected.config)
    tokenizer = GgufTokenizer(make_tokenizer(), expected.config.vocab_size, model.arch)
    weights, path = MergedWeights(expected, folder, None), tmp_path / "model.gguf"
    write_model(path, "model", model, tokenizer, weights, "f32", ExportProgress())
    found = load_base_model(resolve(path), Recipe.load("notes"), torch.device("cpu")).model
    read = found.state_dict()
    for name, weight in expected.state_dict().items():
        # A norm's weight in files is 1 + w in some families, which rounds it.
        torch.testing.assert_close(read[name], weight, rtol=0, atol=2e-7 if weight.dim() == 1 else 0)
    ids = torch.arange(3, 103)[None]
    with torch.no_grad():
        torch.testing.assert_close(found(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_merged_model_of_a_file_says_its_settings_under_the_older_names_too(source, tmp_path, no_memory):
    model, adapter = source("phi3-long")
    Personalizer(model, device="cpu").export(adapter, tmp_path / "out", quant="f16")
    file = tmp_path / "out" / "adapter-f16.gguf"
    adapter = make_adapter(tmp_path / "of the file", file)
    Personalizer(file, device="cpu").export(adapter, tmp_path / "merged", format="merged")
    values = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert values["rope_theta"] == values["rope_parameters"]["rope_theta"] == THETA
    assert len(values["rope_scaling"]) == 3  # transformers 4 takes no fourth
    assert json.loads((tmp_path / "merged" / "generation_config.json").read_text())["eos_token_id"] == 1
    tokenizer = json.loads((tmp_path / "merged" / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "phi3", "lfm2"])
def test_llama_cpp_computes_what_we_do_with_an_adapters_file(source, tmp_path, family):
    model, adapter = source(family)
    result = Personalizer(model, device="cpu").export(adapter, tmp_path / "out", format="gguf-lora")
    assert (result.read_back_by, result.files) == ("llama.cpp", ("adapter-lora.gguf",))
    assert result.largest_difference <= MAX_DIFFERENCE


@pytest.mark.parametrize("family", ["qwen3.5-shared-keys", "gemma4"])
def test_an_adapter_whose_layers_gguf_orders_or_llama_cpp_adapts_otherwise_is_refused_by_itself(
    source, tmp_path, family
):
    model, adapter = source(family)
    with pytest.raises(ExportError, match="cannot be written as GGUF by itself; use --format gguf, which merges it"):
        Personalizer(model, device="cpu").export(adapter, tmp_path / "out", format="gguf-lora")


@pytest.mark.slow
def test_the_text_part_of_a_model_that_also_sees_is_merged_and_written_as_gguf(tmp_path):
    """With its layers' scales, which are no parameters."""
    text = SIZES | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 32}
    text |= {"vocab_size_per_layer_input": 320, "hidden_size_per_layer_input": 32, "global_head_dim": 32}
    sight = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    sight |= {"head_dim": 32, "intermediate_size": 32, "position_embedding_size": 16}
    whole = Gemma4ForConditionalGeneration(Gemma4Config(text_config=text, vision_config=sight, audio_config=None))
    for layer in whole.model.language_model.layers:
        layer.layer_scalar.fill_(0.7)
    whole.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    adapter = make_adapter(tmp_path / "adapter", tmp_path / "model")
    result = Personalizer(tmp_path / "model", device="cpu").export(adapter, tmp_path / "out", format="merged")
    assert result.largest_difference <= MAX_DIFFERENCE
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "gemma4_text"
    assert load_file(tmp_path / "out" / "model.safetensors")["model.layers.1.layer_scalar"].item() == pytest.approx(0.7)
    result = Personalizer(tmp_path / "model", device="cpu").export(adapter, tmp_path / "gguf", quant="f16")
    assert (result.read_back_by, result.loss) == ("llama.cpp", pytest.approx(result.loss_adapter, abs=1e-3))


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["f16", "q5_1"])
def test_a_tensor_is_the_merged_one_rounded_as_llama_cpp_rounds(source, tmp_path, no_memory, quant):
    model, adapter = source("qwen3")
    Personalizer(model, device="cpu").export(adapter, tmp_path / "out", quant=quant)
    tensors = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "out" / f"adapter-{quant}.gguf").tensors}
    weights = load_file(model / "model.safetensors")
    lora = load_file(adapter / "adapter_model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    lora_A, lora_B = (lora[f"base_model.model.{name}.lora_{letter}.weight"] for letter in "AB")
    merged = weights[f"{name}.weight"] + 2.0 * lora_B @ lora_A
    tensor = tensors["blk.0.ffn_down.weight"]
    assert tensor.tensor_type.name == quant.upper()
    found = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
    step = {"q4_0": 1 / 8, "q4_1": 1 / 15, "q5_0": 1 / 16, "q5_1": 1 / 31, "q8_0": 1 / 127}.get(quant, 2**-8)
    assert (found - merged).abs().max() <= step * 2 * merged.abs().max()
    assert tensors["token_embd.weight"].tensor_type.name == ("Q8_0" if quant[:2] in ("q4", "q5") else quant.upper())
    assert tensors["output_norm.weight"].tensor_type.name == "F32"


def test_bf16_is_rounded_bit_for_bit_as_the_package_gguf_rounds():
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * 1e-3
    kind = GGMLQuantizationType.BF16
    assert np.array_equal(quantised(values, kind), quantize(values.numpy(), kind))
    assert torch.equal(dequantised(quantised(values, kind), kind), values.bfloat16().float())


def test_a_weight_too_large_for_f16_is_refused():
    with pytest.raises(ExportError, match="too large for f16; use --quant bf16"):
        quantised(torch.tensor([[1e6]]), GGMLQuantizationType.F16)


@pytest.mark.slow
def test_rows_that_are_no_multiple_of_a_block_are_f16(source, tmp_path, monkeypatch, no_memory):
    monkeypatch.setitem(FAMILIES, "odd", lambda: Qwen2Config(**SIZES | {"intermediate_size": 72}))
    model, adapter = source("odd")
    Personalizer(model, device="cpu").export(adapter, tmp_path / "out", quant="q4_0")
    kinds = {one.name: one.tensor_type.name for one in GGUFReader(tmp_path / "out" / "adapter-q4_0.gguf").tensors}
    assert (kinds["blk.0.ffn_down.weight"], kinds["blk.0.ffn_up.weight"]) == ("F16", "Q4_0")


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"attention_bias": True}, "with biases"),
        ("qwen2", {"use_sliding_window": True}, "with sliding windows"),
        ("gemma2", {"query_pre_attn_scalar": 100}, "scaled by 100"),
        ("gemma3", {"layer_types": ["full_attention"] * 6}, "other layers of full attention"),
        ("qwen3.5", {"rms_norm_eps": 1e-5}, "with the epsilon 1e-05 of its norms"),
        ("qwen3.5", {"head_dim": 1}, "with sections of 4 features in heads of 1"),
        ("gemma4", {"enable_moe_block": True}, "with experts"),
        ("gemma4", {"num_kv_shared_layers": 3}, "other kinds of last layers"),
        ("gemma4", {"vocab_size_per_layer_input": 300}, "other tokens for the inputs of layers"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "attention to later tokens"),
        ("llama", {"hidden_act": "relu"}, "activation relu"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            r"rotary embeddings \(dynamic\)",
        ),
    ],
)
def test_a_setting_that_llama_cpp_lacks_is_refused(family, changes, words):
    config = FAMILIES[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ExportError, match=words):
        GgufModel(config)


@pytest.mark.slow
def test_a_window_that_llama_cpp_lacks_shortens_the_context(source, tmp_path, monkeypatch, no_memory):
    monkeypatch.setitem(FAMILIES, "windowed", lambda: MistralConfig(**SIZES, head_dim=32, sliding_window=240))
    model, adapter = source("windowed")
    result = Personalizer(model, device="cpu").export(adapter, tmp_path / "out", quant="f16")
    assert "reads 240 tokens" in result.warnings[1]
    field = GGUFReader(tmp_path / "out" / "adapter-f16.gguf").get_field("llama.context_length")
    assert field.contents() == 240


@pytest.mark.slow
def test_another_family_is_refused(source, tmp_path, monkeypatch):
    monkeypatch.setitem(FAMILIES, "cohere", lambda: CohereConfig(**SIZES))
    model, adapter = source("cohere")
    personalizer = Personalizer(model, device="cpu")
    with pytest.raises(ExportError, match="cohere models cannot be written as GGUF"):
        personalizer.export(adapter, tmp_path / "out")
    assert personalizer.export(adapter, tmp_path / "out", format="merged").read_back_by == "transformers"
