"""Loading of base models: what is refused and when, number formats, devices, fingerprints."""

import json
import shutil
import sys

import pytest
import torch
from builders import load_base, make_llama, make_sentences, save_model, shape_of
from command import python
from failing_memory import Failing
from model_families import DECODERS, MODELS, WITH_STATES, make_model
from safetensors.torch import load_file, save_file

from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.errors import MachineError, ModelError

LORA = Recipe.load("notes")


@pytest.fixture
def copied(two_layer_folder, tmp_path):
    """A model folder that may be damaged."""
    return shutil.copytree(two_layer_folder, tmp_path / "model")


def load(folder, recipe=LORA):
    return load_base(folder, recipe)


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder, change):
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})


# ------------------------------------------------------------------------------------------------- the loaded model


def test_a_loaded_model_is_ready_to_adapt(two_layer_folder, capfd):
    base = load(two_layer_folder)
    assert not base.model.training
    assert base.dtype is torch.float32
    assert base.num_parameters == sum(p.numel() for p in make_llama().parameters())
    assert base.tokenizer.is_fast
    assert base.pad_token_id == 2
    assert torch.equal(base.model.lm_head.weight, make_llama().lm_head.weight)
    assert capfd.readouterr() == ("", "")


def test_padding_needs_no_pad_token(copied):
    base = load(copied)
    base.tokenizer.pad_token = None
    assert base.pad_token_id == base.tokenizer.eos_token_id
    base.tokenizer.eos_token = None
    assert base.pad_token_id == 0


def test_the_pad_token_has_an_embedding(two_layer_folder):
    base = load(two_layer_folder)
    base.tokenizer.add_tokens([f"[{number}]" for number in range(20)])
    base.tokenizer.add_special_tokens({"pad_token": "[A NEW ONE]"})
    assert base.tokenizer.pad_token_id >= base.model.get_input_embeddings().num_embeddings
    assert base.pad_token_id == base.tokenizer.eos_token_id


def test_tokens_without_an_embedding_are_refused(copied, tokenizer, tmp_path):
    make_llama(vocab_size=200).save_pretrained(copied)
    personalizer = Personalizer(copied, device="cpu", store=AdapterStore(tmp_path / "store"))
    largest = max(tokenizer(" ".join(make_sentences(20)))["input_ids"])
    assert largest >= 200
    with pytest.raises(ModelError, match=r"returned token [0-9]+, but the model has embeddings for 200 tokens only"):
        personalizer.adapt(make_sentences(20))
    with pytest.raises(ModelError, match="use the model's own tokenizer"):
        personalizer.generate(make_sentences(20)[0])


# ------------------------------------------------------------------------------------------------------- fingerprints


def test_the_fingerprint_is_of_the_weights_not_of_their_format(two_layer_folder, copied, machine):
    in_fp32 = load(two_layer_folder)
    change_weights(copied, lambda weights: {name: value.bfloat16() for name, value in weights.items()})
    machine.computes_in(torch.bfloat16)
    in_bf16 = load(copied)
    assert (in_fp32.dtype, in_bf16.dtype) == (torch.float32, torch.bfloat16)
    assert in_fp32.fingerprint == in_bf16.fingerprint


def test_the_fingerprint_is_of_the_weights_not_of_their_shards(two_layer_folder, tmp_path):
    save_model(make_llama(), tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert load(tmp_path).fingerprint == load(two_layer_folder).fingerprint


def test_one_changed_layer_changes_the_fingerprint(two_layer_folder, copied):
    name = "model.layers.1.mlp.down_proj.weight"
    change_weights(copied, lambda weights: weights | {name: weights[name] * 1.1})
    assert load(copied).fingerprint != load(two_layer_folder).fingerprint


# ------------------------------------------------------------------------------------------------ refusals


def test_damaged_weights_are_refused_with_one_sentence(copied):
    path = copied / "model.safetensors"
    for data in (path.read_bytes()[: path.stat().st_size // 2], b"not safetensors at all " * 100):
        path.write_bytes(data)
        with pytest.raises(ModelError, match=r"complete safetensors weights \(SafetensorError\)"):
            load(copied)


def test_missing_weights_are_refused(copied):
    change_weights(copied, lambda weights: {name: w for name, w in weights.items() if "layers.1.mlp.up" not in name})
    with pytest.raises(ModelError, match=r"lacks 1 of its weight tensors, such as '.*\.1\.mlp\.up_proj\.weight'"):
        load(copied)


def test_weights_of_other_shapes_are_refused(copied):
    change_config(copied, intermediate_size=64)
    with pytest.raises(ModelError, match=r"of shape \[32, 48\], but its config has \[32, 64\]; download"):
        load(copied)


FOREIGN = {
    "another family's norms": ("model_type", "llama", "qwen3", "self_attn.k_norm.weight"),
    "another family's biases": ("model_type", "llama", "qwen2", "self_attn.k_proj.bias"),
    "more layers": ("num_hidden_layers", 1, "llama", "input_layernorm.weight"),
    "layers of a type that the family has not": ("layer_types", ["moe"] * 2, "qwen3.5", "linear_attn.conv1d.weight"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_weights_that_the_config_does_not_have_are_refused(case, copied):
    """transformers leaves them out, and computes another model than the files' own."""
    key, value, family, weight = FOREIGN[case]
    made = make_model(DECODERS[family]()) if family == "qwen2" else (MODELS | WITH_STATES)[family]()
    made.save_pretrained(copied)
    change_config(copied, **{key: value})
    with pytest.raises(ModelError, match=rf"has 'model\.layers\.[01]\.{weight}', which its config does not"):
        load(copied)


def test_weights_of_other_parts_and_old_masks_are_left_out(copied):
    others = {
        "mtp.layers.0.mlp.up_proj.weight": torch.ones(4, 4),
        "model.layers.0.self_attn.bias": torch.ones(1, 1, 8, 8),
    }
    change_weights(copied, lambda weights: weights | others)
    assert torch.equal(load(copied).model.lm_head.weight, make_llama().lm_head.weight)


@pytest.mark.parametrize("content", [None, "{", '{"no": "tokenizer"}'])
def test_a_missing_or_damaged_tokenizer_is_refused_with_one_sentence(copied, content):
    path = copied / "tokenizer.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ModelError, match=r"needs config\.json, a tokenizer and"):
        load(copied)


def test_pickled_weights_are_never_opened(copied):
    torch.save(load_file(copied / "model.safetensors"), copied / "pytorch_model.bin")
    (copied / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="safetensors"):
        load(copied)


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "electra", "bart", "t5", "whisper", "vit"])
def test_models_that_generate_no_text_are_refused(copied, kind):
    (copied / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(ModelError, match=f"is a {kind} model; expected a decoder that generates text"):
        load(copied)


@pytest.mark.parametrize(
    "config",
    [
        "{",
        "[]",
        "{}",
        '{"model_type": "no-such-architecture"}',
        '{"model_type": "llama", "hidden_size": "wide"}',
        '{"model_type": "llama", "hidden_size": 32, "num_attention_heads": 7}',
        '{"model_type": "llama", "dtype": "float99"}',
        '{"model_type": "llama", "intermediate_size": -1}',
    ],
)
def test_an_unknown_or_damaged_config_is_refused_with_one_sentence(copied, config):
    (copied / "config.json").write_text(config)
    with pytest.raises(ModelError, match="config"):
        load(copied)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "wide"}, r"config of 'model' is damaged: Field 'hidden_size' expected int, got str"),
        ({"hidden_size": None}, "'hidden_size' expected int, got NoneType"),
        ({"rope_parameters": 5}, r"'rope_parameters' with value 5 .* \.\.\.; download it again"),
        ({"layer_types": ["full_attention"]}, r"`num_hidden_layers` \(2\) must be equal to .* `layer_types` \(1\)"),
        ({"layer_types": ["no such type"] * 2}, "The `layer_types` entries must be in"),
        ({"num_hidden_layers": 0}, "has num_hidden_layers 0; expected at least 1"),
        ({"num_hidden_layers": -1}, "has num_hidden_layers -1; expected at least 1"),
        ({"max_position_embeddings": 3}, "has max_position_embeddings 3; expected at least 8"),
        ({"vocab_size": 0, "pad_token_id": None}, r"embed_tokens\.weight' the shape \[0, 32\]; expected positive"),
        ({"intermediate_size": 0}, r"gate_proj\.weight' the shape \[0, 32\]; expected positive sizes"),
        ({"hidden_size": -32}, r"cannot be made from its config \(RuntimeError\)"),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element:UserWarning")
def test_a_config_with_a_wrong_value_is_refused_before_a_plan_is_made(copied, changes, message):
    change_config(copied, **changes)
    with pytest.raises(ModelError, match=message) as refused:
        shape_of(copied)
    assert len(str(refused.value)) < 300


def test_a_missing_package_for_quantised_weights_is_named(copied):
    change_config(copied, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True})
    with pytest.raises(ModelError, match="needs a package that is not installed: Loading an AWQ"):
        load(copied)


def test_a_models_own_code_is_never_run_and_nobody_is_prompted(copied):
    """pytest makes reading from the terminal an error."""
    (copied / "own.py").write_text("raise SystemExit('this was run')")
    classes = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": ["own.T", "own.T"]}
    change_config(copied, auto_map=classes)
    assert load(copied).model.config.model_type == "llama"
    change_config(copied, model_type="own")
    with pytest.raises(ModelError, match="has an architecture unknown to this version of transformers"):
        load(copied)


# ------------------------------------------------------------------------------------------------- memory and devices


MEASURED = """
import sys, threading
from pathlib import Path
import torch
from sebp_edge.machine import devices
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.loading import load_base_model
from sebp_edge.recipe import Recipe

devices.pick_dtype = lambda device, width: torch.bfloat16

def load(folder):
    return load_base_model(resolve(Path(folder)), Recipe.load("notes"), torch.device("cpu"))

def own_bytes():
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))

def watch():
    while not done.wait(0.001):
        seen.append(own_bytes())

load(sys.argv[1])  # imports and allocates what the first use needs
done, seen = threading.Event(), [own_bytes()]
watcher = threading.Thread(target=watch)
watcher.start()
base = load(sys.argv[2])
done.set()
watcher.join()
print(max(seen) - seen[0], sum(parameter.nbytes for parameter in base.model.parameters()))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's account of a process's memory")
def test_weights_in_the_format_of_their_file_are_not_copied_in_host_memory(two_layer_folder, tmp_path):
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 3, "num_attention_heads": 16}
    save_model(make_llama(**sizes).bfloat16(), tmp_path, max_shard_size="30MB")
    taken, weights = map(int, python(MEASURED, two_layer_folder, tmp_path).split())
    assert weights > 80e6
    assert taken < 0.2 * weights


def test_4_bits_without_bitsandbytes_are_refused_with_the_package_to_install(two_layer_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MachineError, match=r"not installed; run pip install 'sebp-edge\[4bit\]'\.$"):
        load(two_layer_folder, LORA.replace(load_in_4bit=True))


def test_running_out_of_memory_while_loading_is_not_reported_as_damage(two_layer_folder):
    with pytest.raises(MachineError, match="Out of memory while loading 'micro-llama'"), Failing(1):
        load(two_layer_folder)
