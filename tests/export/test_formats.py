"""The formats that are no GGUF model, fully fine-tuned models, and what happens without other programs."""

import json
import shutil
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from export_sources import ROPE, THETA, long_texts, make_adapter, make_source, say_theta
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sebp_edge import AdapterRecord, Personalizer
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.errors import ExportError, OptionError
from sebp_edge.events import TensorWritten
from sebp_edge.export import exporter as main_path
from sebp_edge.export import formats, llama_cpp, mlx_lm
from sebp_edge.export.source import Source

RECIPE = {"name": "notes", "method": "lora"}
IDS = torch.tensor([[0, 40, 50, 60, 70]])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a model and an adapter of it, which tests copy."""
    folder = tmp_path_factory.mktemp("made")
    make_adapter(folder / "adapter", make_source(folder / "model", "llama"))
    return folder


@pytest.fixture
def llama(made, tmp_path):
    return tuple(shutil.copytree(made / name, tmp_path / name) for name in ("model", "adapter"))


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
@pytest.mark.parametrize(
    ("lost", "has_memory"), [("rope_theta", True), ("rope_parameters", False), ("rms_norm_eps", False)]
)
def test_a_merged_config_from_which_a_program_reads_something_else_is_refused(
    llama, tmp_path, monkeypatch, request, has_memory, lost
):
    write = formats.write_settings

    def lose(folder, source):
        write(folder, source)
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({name: value for name, value in values.items() if name != lost}))

    monkeypatch.setattr(formats, "write_settings", lose)
    if not has_memory:
        request.getfixturevalue("no_memory")
    with pytest.raises(ExportError, match=r"config\.json says something else than the base model's"):
        Personalizer(llama[0], device="cpu").export(llama[1], tmp_path / "out", format="merged")
    assert not (tmp_path / "out").exists()


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


@pytest.fixture
def llama_for_mlx(llama):
    """The model with the names in its config.json that mlx-lm reads, and its adapter."""
    say_theta(llama[0])
    return llama


@pytest.mark.parametrize("theta", [None, 10_000.0])
def test_a_base_from_which_mlx_lm_reads_another_theta_is_refused(llama, tmp_path, theta):
    config = llama[0] / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | ({"rope_theta": theta} if theta else {})))
    with pytest.raises(ExportError, match=r"mlx-lm reads rope_theta and rope_scaling .* --format merged"):
        Personalizer(llama[0], device="cpu").export(llama[1], tmp_path / "out", format="mlx")


@pytest.mark.skipif(not mlx_lm.is_installed(), reason="mlx-lm is not installed")
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


def test_other_tensors_than_meant_are_found(llama_for_mlx, tmp_path, no_memory, monkeypatch):
    write = formats.Mlx.write

    def spoil(self, folder, progress):
        write(self, folder, progress)
        path = folder / "adapters.safetensors"
        save_file({name: tensor * 2 for name, tensor in load_file(path).items()}, path)

    monkeypatch.setattr(formats.Mlx, "write", spoil)
    with pytest.raises(ExportError, match="other weights than were written"):
        Personalizer(llama_for_mlx[0], device="cpu").export(llama_for_mlx[1], tmp_path / "out", format="mlx")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="llama.cpp is not installed")
def test_a_file_with_which_llama_cpp_computes_something_else_is_not_exported(llama, tmp_path, monkeypatch):
    from sebp_edge.engine.models.gguf import families

    monkeypatch.setitem(families.FAMILIES, "llama", replace(families.FAMILIES["llama"], rotates_pairs=False))
    with pytest.raises(ExportError, match=r"llama\.cpp computes something else"):
        Personalizer(llama[0], device="cpu").export(llama[1], tmp_path / "out", quant="f16")
    assert {path.name for path in tmp_path.iterdir()} <= {"model", "adapter", "notes"}


@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="llama.cpp is not installed")
def test_a_file_that_llama_cpp_cannot_load_is_not_exported(tmp_path):
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF" + b"\xff" * 100)
    with pytest.raises(ExportError, match=r"llama\.cpp cannot read"):
        llama_cpp.predict(tmp_path / "damaged.gguf", [[0]], [], lambda: None)


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
@pytest.mark.parametrize("key, words", [("load_in_4bit", "4-bit"), ("load_in_fp8", "FP8")])
def test_an_adapter_of_a_quantised_base_is_merged_into_the_full_weights(key, words, llama, tmp_path, no_memory):
    model, _ = llama
    recipe = {"name": "notes", "method": "lora", key: True}
    adapter = make_adapter(tmp_path / "adapter4", model, recipe=recipe)
    result = Personalizer(model, device="cpu").export(adapter, tmp_path / "out", format="merged")
    assert result.merged_into == f"the float32 weights of model, not the {words} ones that it was trained on"


@pytest.mark.slow
def test_the_smallest_quantisation_that_keeps_the_gain_is_chosen(llama, tmp_path, monkeypatch):
    from sebp_edge.export.export_result import GainKept

    shares = {"q4_0": 0.5, "q4_1": 0.8, "q5_0": 0.91}
    tried = []

    def measured(source, comparison, formats):
        for each in formats:
            tried.append(GainKept(each.quant, 2.0, 1.0, shares[each.quant]))
            if shares[each.quant] >= main_path.ENOUGH:
                return tried

    monkeypatch.setattr(main_path, "measure", measured)
    result = Personalizer(llama[0], device="cpu").export(
        llama[1], tmp_path / "out", quant="smallest", texts=long_texts()
    )
    assert (result.quant, result.files) == ("q5_0", ("adapter-q5_0.gguf",))
    assert [one.quant for one in result.gain_kept] == ["q4_0", "q4_1", "q5_0"]


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


@pytest.mark.parametrize(
    ("base", "adapter", "file", "is_worse"),
    [
        (2.522, 2.487, 2.721, True),
        (2.522, 2.487, 2.500, False),
        (2.522, 2.487, 2.522001, True),
        (2.522, 2.600, 2.6001, False),  # the adapter itself costs that much
        (2.522, 2.600, 2.721, True),
    ],
)
def test_a_file_is_compared_with_the_model_that_is_not_rounded(llama, base, adapter, file, is_worse):
    model, folder = llama
    source = Source.open("adapter", folder, AdapterRecord.read(folder), resolve(model))
    losses = SimpleNamespace(loss_base=base, loss_adapter=adapter)
    found = list(main_path._losses(formats.Gguf(source, "q4_0"), [], losses, file, None))
    assert len(found) == is_worse
    assert not is_worse or f"{file:.3f} instead of {base:.3f}" in found[0]
    assert list(main_path._losses(formats.Merged(source), [], losses, file, None)) == []


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
