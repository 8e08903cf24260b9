"""The formats that are no GGUF model, fully fine-tuned models, and what happens without other programs."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from export_sources import ROPE, THETA, long_texts, make_adapter, make_source
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sebp_edge import Personalizer
from sebp_edge.errors import ExportError, OptionError
from sebp_edge.events import TensorWritten

IDS = torch.tensor([[0, 40, 50, 60, 70]])


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.slow
def test_a_merged_folder_is_the_model_with_the_adapter(llama, tmp_path):
    model, adapter = llama
    events = []
    result = Personalizer(model, device="cpu", on_event=events.append).export(
        adapter, tmp_path / "out", format="merged"
    )
    assert (result.read_back_by, result.merged_into) == ("transformers", "the float32 weights of model")
    base = AutoModelForCausalLM.from_pretrained(model)
    adapted = logits(PeftModel.from_pretrained(base, adapter))
    assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), adapted, atol=1e-4)
    written = [event for event in events if isinstance(event, TensorWritten)]
    assert [event.tensor for event in written] == list(range(1, written[-1].tensors + 1))
    assert not (tmp_path / "out").stat().st_mode & 0o077


@pytest.mark.slow
def test_a_merged_folder_begins_with_the_files_of_its_base(llama, tmp_path, no_memory):
    model, adapter = llama
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(values | {"only_other_programs_read_it": [1, 2]}))
    (model / "generation_config.json").write_text('{"eos_token_id": [1, 6]}')
    Personalizer(model, device="cpu").export(adapter, tmp_path / "out", format="merged")
    merged = json.loads((tmp_path / "out" / "config.json").read_text())
    assert str(tmp_path) not in (tmp_path / "out" / "config.json").read_text()
    assert merged["only_other_programs_read_it"] == [1, 2]
    assert (merged["rope_theta"], merged["rope_parameters"]) == (THETA, ROPE)
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"eos_token_id": [1, 6]}'
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    tokenizer = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (model, tmp_path / "out"))
    assert before("the <|user|> ferry")["input_ids"] == after("the <|user|> ferry")["input_ids"]


@pytest.mark.slow
def test_a_merged_model_that_mlx_lm_computes_otherwise_says_so(tmp_path):
    model = make_source(tmp_path / "model", "mistral-window")
    adapter = make_adapter(tmp_path / "adapter", model)
    result = Personalizer(model, device="cpu").export(adapter, tmp_path / "out", format="merged")
    (warning,) = result.warnings
    assert warning.startswith("mlx-lm has no sliding windows for mistral models")
    assert "more than 16 tokens" in warning


@pytest.mark.slow
def test_a_peft_folder_has_the_adapter_and_nothing_of_ours(llama, tmp_path):
    model, adapter = llama
    result = Personalizer(model, device="cpu").export(adapter, tmp_path / "out", format="peft")
    assert (result.read_back_by, result.largest_difference) == ("PEFT", 0.0)
    assert result.files == ("adapter_config.json", "adapter_model.safetensors")
    base = AutoModelForCausalLM.from_pretrained(model)
    PeftModel.from_pretrained(base, tmp_path / "out")


@pytest.mark.parametrize("theta", [None, 10_000.0])
def test_a_base_from_which_mlx_lm_reads_another_theta_is_refused(llama, tmp_path, theta):
    config = llama[0] / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | ({"rope_theta": theta} if theta else {})))
    with pytest.raises(ExportError, match=r"mlx-lm reads rope_theta and rope_scaling .* --format merged"):
        Personalizer(llama[0], device="cpu").export(llama[1], tmp_path / "out", format="mlx")


@pytest.mark.skipif(find_spec("mlx_lm") is None, reason="mlx-lm is not installed")
def test_mlx_lm_computes_what_we_do(llama_for_mlx, tmp_path):
    model, adapter = llama_for_mlx
    result = Personalizer(model, device="cpu").export(adapter, tmp_path / "out", format="mlx", texts=long_texts())
    assert result.read_back_by == "mlx-lm"
    assert result.largest_difference < 1e-3
    assert abs(result.loss_adapter - result.loss_base) > 1e-3


@pytest.mark.slow
def test_mlx_factors_are_transposed(llama_for_mlx, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlx_lm", None)  # not installed
    model, adapter = llama_for_mlx
    result = Personalizer(model, device="cpu").export(adapter, tmp_path / "out", format="mlx")
    assert (result.read_back_by, result.largest_difference) == ("sebp-edge", None)
    name = "model.layers.0.self_attn.q_proj"
    saved, ours = load_file(tmp_path / "out" / "adapters.safetensors"), load_file(adapter / "adapter_model.safetensors")
    assert torch.equal(saved[f"{name}.lora_b"], ours[f"base_model.model.{name}.lora_B.weight"].T)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["lora_parameters"]["keys"][0] == "mlp.down_proj"


@pytest.mark.slow
@pytest.mark.parametrize("format", ["gguf", "gguf-lora"])
def test_without_llama_cpp_we_read_back_ourselves(llama, tmp_path, monkeypatch, format):
    monkeypatch.setitem(sys.modules, "xllamacpp", None)  # not installed
    result = Personalizer(llama[0], device="cpu").export(llama[1], tmp_path / "out", format=format)
    assert result.read_back_by == "sebp-edge"


@pytest.mark.parametrize("format", ["gguf", "ollama", "gguf-lora", "merged", "mlx", "peft"])
def test_without_memory_the_tensors_are_compared(llama_for_mlx, tmp_path, no_memory, format):
    result = Personalizer(llama_for_mlx[0], device="cpu").export(llama_for_mlx[1], tmp_path / "out", format=format)
    assert (result.read_back_by, result.loss) == ("sebp-edge", None)
    assert "was not run to compare it" in result.warnings[0]


def make_full(folder: Path, model: Path, adapter: Path):
    """Writes a fully fine-tuned model beside the record of an adapter."""
    folder.mkdir()
    weights = {name: weight * 1.05 for name, weight in load_file(model / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    values = json.loads((adapter / "sebp_edge.json").read_text())
    values["recipe"] = {"name": "full", "method": "full"}
    (folder / "sebp_edge.json").write_text(json.dumps(values))
    return weights


@pytest.mark.slow
def test_a_fully_fine_tuned_model_is_exported(llama, tmp_path):
    model, adapter = llama
    weights = make_full(tmp_path / "full", model, adapter)
    personalizer = Personalizer(model, device="cpu")
    result = personalizer.export(tmp_path / "full", tmp_path / "merged", format="merged")
    assert result.merged_into is None
    found = load_file(tmp_path / "merged" / "model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert personalizer.export(tmp_path / "full", tmp_path / "gguf", quant="f16").loss > 0


@pytest.mark.parametrize("format", ["peft", "gguf-lora", "mlx"])
def test_a_fully_fine_tuned_model_is_no_adapter(llama, tmp_path, format):
    make_full(tmp_path / "full", *llama)
    with pytest.raises(ExportError, match="has all weights of a model"):
        Personalizer(llama[0], device="cpu").export(tmp_path / "full", tmp_path / "out", format=format)


@pytest.mark.slow
def test_an_adapter_of_a_4_bit_base_is_merged_into_the_full_weights(llama, tmp_path, no_memory):
    model, _ = llama
    recipe = {"name": "notes", "method": "lora", "load_in_4bit": True}
    adapter = make_adapter(tmp_path / "adapter4", model, recipe=recipe)
    result = Personalizer(model, device="cpu").export(adapter, tmp_path / "out", format="merged")
    assert result.merged_into == "the float32 weights of model, not the 4-bit ones that it was trained on"


@pytest.mark.slow
def test_the_gain_is_measured_on_rounded_weights_and_the_bases_file_is_not_changed(llama, tmp_path):
    before = (llama[0] / "model.safetensors").read_bytes()
    result = Personalizer(llama[0], device="cpu").export(llama[1], tmp_path / "out", quant="q8_0", texts=long_texts())
    kept = result.gain_kept[0]
    assert kept.loss == pytest.approx(result.loss, abs=1e-6)
    assert kept.loss_base != result.loss_base
    gain = result.loss_base - result.loss_adapter
    assert kept.share == (pytest.approx((result.loss_base - kept.loss) / gain) if gain > 0 else None)
    assert kept.quant == "q8_0" and (llama[0] / "model.safetensors").read_bytes() == before


def weaken(adapter, factor):
    """Makes an adapter change less."""
    path = adapter / "adapter_model.safetensors"
    weights = {name: value * factor if "lora_B" in name else value for name, value in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.slow
def test_a_file_that_is_worse_than_the_model_without_the_adapter_says_so(tmp_path):
    model = make_source(tmp_path / "model", "llama", num_hidden_layers=4)  # to whose loss rounding adds
    adapter = make_adapter(tmp_path / "adapter", model)
    weaken(adapter, 1e-3)
    rounded = Personalizer(model, device="cpu").export(adapter, tmp_path / "out", quant="q4_0", texts=long_texts())
    assert rounded.loss > rounded.loss_base
    said = f"worse than the model without the adapter: {rounded.loss:.3f} instead of {rounded.loss_base:.3f}"
    (warning,) = rounded.warnings
    assert said in warning
    assert "on these texts" in warning


def test_k_quants_need_llama_quantize(llama, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OptionError, match="q4_k_m needs llama-quantize"):
        Personalizer(llama[0], device="cpu").export(llama[1], tmp_path / "out", quant="q4_k_m")


@pytest.mark.slow
def test_k_quants_are_made_by_llama_quantize(llama, tmp_path, monkeypatch, no_memory):
    program = tmp_path / "llama-quantize"
    program.write_text('#!/bin/sh\n[ "$3" = Q4_K_M ] && /bin/cp "$1" "$2"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    result = Personalizer(llama[0], device="cpu").export(llama[1], tmp_path / "out", quant="q4_k_m")
    assert result.files == ("adapter-q4_k_m.gguf",)
    program.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(ExportError, match="llama-quantize failed with the code 3"):
        Personalizer(llama[0], device="cpu").export(llama[1], tmp_path / "out2", quant="q4_k_m")
    assert not (tmp_path / "out2").exists()
