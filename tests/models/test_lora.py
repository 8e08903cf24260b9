"""LoRA on a base model: repeatable, removable without a trace, and saved in files that plain PEFT reads."""

import dataclasses
import json
import shutil

import pytest
import torch
from builders import SIZES, disturb, make_llama, save_model, unchanged
from model_families import MODELS, make_model
from peft import PeftModel
from transformers import AutoModelForCausalLM, FalconH1Config, MambaConfig, NemotronHConfig

from sebp_edge import Recipe
from sebp_edge.engine.models.adaptation import attach, load, read_state, save_snapshots, snapshot, trainable
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.loading import load_base_model
from sebp_edge.errors import AdapterError, BaseModelMismatch, ModelError

RECIPE = Recipe.load("notes").replace(r=4)
IDS = torch.arange(7, 71)[None]


@pytest.fixture
def saved(base, tmp_path):
    """The folder of an adapter that changes the model's logits, and these logits."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    adapter = attach(base, RECIPE, seed=3)
    disturb(adapter)
    adapter.save(folder)
    expected = logits(adapter.model)
    adapter.detach()
    return folder, expected


@torch.no_grad()
def logits(model):
    return model(IDS).logits


@pytest.mark.slow
def test_a_loaded_adapter_is_in_fp32_whatever_the_base_models_dtype(base, saved):
    folder, _ = saved
    state = load(base, folder)
    expected = snapshot(state)
    state.detach()
    base.model.bfloat16()
    loaded = load(base, folder)
    assert all(torch.equal(one, other) for one, other in zip(snapshot(loaded), expected, strict=True))


def test_an_adapter_is_loaded_disabled_and_detached_without_copying_the_weights(base, saved):
    folder, with_adapter = saved
    addresses, without = {p.data_ptr() for p in base.model.parameters()}, logits(base.model)
    adapter = load(base, folder)
    assert torch.equal(logits(adapter.model), with_adapter)
    with adapter.model.disable_adapter():
        assert torch.equal(logits(adapter.model), without)
    frozen = {p.data_ptr() for name, p in adapter.model.named_parameters() if "lora_" not in name}
    adapter.detach()
    assert addresses == frozen == {p.data_ptr() for p in base.model.parameters()}


def test_fresh_adapters_are_bitwise_equal_only_for_equal_seeds(base):
    states = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(states))
        adapter = attach(base, RECIPE, seed)
        states.append(snapshot(adapter))
        adapter.detach()
    pairs = [[torch.equal(one, other) for one, other in zip(states[0], states[n], strict=True)] for n in (1, 2)]
    assert all(pairs[0])
    assert not all(pairs[1])


def test_a_fresh_adapter_is_on_every_linear_projection_and_changes_no_logits(base):
    before = logits(base.model)
    adapter = attach(base, RECIPE, seed=0)
    assert torch.equal(logits(adapter.model), before)
    assert len(trainable(adapter)) == 2 * 7 * base.model.config.num_hidden_layers
    assert {parameter.dtype for parameter in trainable(adapter)} == {torch.float32}


def test_a_model_that_is_trained_does_not_change_with_its_file(two_layer_folder, tmp_path):
    folder = shutil.copytree(two_layer_folder, tmp_path / "model")
    base = load_base_model(resolve(folder), RECIPE, torch.device("cpu"))
    expected = [parameter.clone() for parameter in base.model.parameters()]
    adapter = attach(base, RECIPE, seed=0)
    (file,) = folder.glob("*.safetensors")
    with file.open("r+b") as stream:
        stream.write(bytes(file.stat().st_size))
    adapter.detach()
    assert all(found.equal(each) for found, each in zip(base.model.parameters(), expected, strict=True))


def test_the_process_random_state_is_unchanged(base, saved):
    before = torch.get_rng_state()
    attach(base, RECIPE, seed=0).detach()
    load(base, saved[0]).detach()
    assert torch.equal(torch.get_rng_state(), before)


def test_an_adapter_without_effect_is_the_base_model_and_is_restored_bitwise(base):
    before, adapter = logits(base.model), attach(base, RECIPE, seed=3)
    disturb(adapter)
    state, changed = snapshot(adapter), logits(adapter.model)
    places = [parameter.data_ptr() for parameter in trainable(adapter)]
    with pytest.raises(ZeroDivisionError), adapter.without_effect():
        assert torch.equal(logits(adapter.model), before)
        assert places == [parameter.data_ptr() for parameter in trainable(adapter)]
        raise ZeroDivisionError
    assert all(map(torch.equal, snapshot(adapter), state))
    assert torch.equal(logits(adapter.model), changed)
    assert not torch.equal(changed, before)


def test_a_snapshot_is_saved_in_the_files_of_the_state_itself(base, tmp_path):
    adapter, expected, found = attach(base, RECIPE, seed=3), tmp_path / "expected", tmp_path / "found"
    expected.mkdir()
    found.mkdir()
    disturb(adapter)
    state = snapshot(adapter)
    adapter.save(expected)
    disturb(adapter)
    present = snapshot(adapter)
    save_snapshots(adapter, {found: state})
    assert all(map(torch.equal, snapshot(adapter), present))
    files = sorted(path.name for path in expected.iterdir())
    assert files == sorted(path.name for path in found.iterdir())
    assert len(files) == 2
    for name in files:
        assert (found / name).read_bytes() == (expected / name).read_bytes()


def test_detach_restores_the_base_model(base):
    before = logits(base.model)
    with unchanged(base.model.requires_grad_(False)):  # as PEFT leaves its weights
        adapter = disturb(attach(base, RECIPE, seed=0))
        assert not torch.equal(logits(adapter.model), before)
        adapter.detach()


@pytest.mark.parametrize("family", MODELS)
def test_a_state_is_read_in_the_order_of_the_attached_parameters(base, family, tmp_path):
    base = dataclasses.replace(base, model=MODELS[family]().to(torch.float32))
    adapter = attach(base, RECIPE, seed=3)
    disturb(adapter)
    adapter.save(tmp_path)
    expected = snapshot(adapter)
    adapter.detach()
    with unchanged(base.model):
        found = read_state(base, tmp_path)
    assert [value.shape for value in found] == [value.shape for value in expected]
    assert all(map(torch.equal, found, expected))


def test_a_state_of_another_base_model_is_refused(base, saved):
    folder, _ = saved
    other = dataclasses.replace(base, model=make_llama(num_hidden_layers=1))
    with pytest.raises(BaseModelMismatch, match="made for another base model"):
        read_state(other, folder)


def test_plain_peft_and_ours_give_the_same_logits(base, saved, two_layer_folder):
    folder, expected = saved
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(two_layer_folder), folder).eval()
    assert torch.equal(logits(plain), expected)
    assert torch.equal(logits(load(base, folder).model), expected)


def test_saved_files_contain_the_models_name_and_no_path(base, saved, two_layer_folder, tmp_path):
    folder, _ = saved
    again = tmp_path / "again"
    again.mkdir()
    load(base, folder).save(again)
    for files in (folder, again):
        assert {path.name for path in files.iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
        config = json.loads((files / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == "micro-llama"
        assert config["target_modules"] == sorted(config["target_modules"])
        for path in files.iterdir():
            for secret in (tmp_path, two_layer_folder.parent):
                assert str(secret).encode() not in path.read_bytes()


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 1}, {"intermediate_size": 64}])
def test_another_base_model_is_refused_and_unchanged(saved, tmp_path, changes):
    save_model(make_llama(**changes), tmp_path / "other")
    other = load_base_model(resolve(tmp_path / "other"), RECIPE, torch.device("cpu"))
    mismatch = pytest.raises(BaseModelMismatch, match="'adapter' was made for another base model than 'other'")
    with unchanged(other.model.requires_grad_(False)), mismatch:
        load(other, saved[0])


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("adapter_model.safetensors", b""),
        ("adapter_model.safetensors", b"no safetensors " * 99),
        ("adapter_config.json", b"{"),
        ("adapter_config.json", b"[]"),
        ("adapter_config.json", b'{"peft_type": "NEW"}'),
        ("adapter_config.json", None),
    ],
)
def test_damaged_files_are_refused_and_the_base_model_is_unchanged(base, saved, file, content):
    path = saved[0] / file
    path.unlink() if content is None else path.write_bytes(content)
    with unchanged(base.model), pytest.raises(AdapterError, match="'adapter' is damaged"):
        load(base, saved[0])


def test_a_folder_without_weights_is_refused(base, saved, tmp_path):
    shutil.copy(saved[0] / "adapter_config.json", tmp_path)
    with pytest.raises(
        AdapterError, match=r"contains no adapter; expected one of adapter_model\.safetensors, model\.safetensors\."
    ):
        load(base, tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        FalconH1Config(**SIZES, mamba_d_ssm=64, mamba_d_state=8, mamba_n_heads=8, mamba_d_head=8),
        NemotronHConfig(
            **SIZES | {"num_hidden_layers": None}, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=8, n_groups=2,
            layers_block_type=["linear_attention", "mlp", "full_attention"],
        ),
    ],
    ids=["falcon-h1", "nemotron-h"],
)  # fmt: skip
def test_what_peft_refuses_is_left_out_by_name(config, tmp_path):
    save_model(make_model(config), tmp_path / "model")
    base = load_base_model(resolve(tmp_path / "model"), RECIPE, torch.device("cpu"))
    linears = {name for name, each in base.model.named_modules() if isinstance(each, torch.nn.Linear)}
    adapter = attach(base, RECIPE, seed=3)
    disturb(adapter)
    adapted = {name.removesuffix(".base_layer") for name, _ in base.model.named_modules() if "base_layer" in name}
    assert linears - adapted == {"lm_head", *(name for name in linears if name.endswith(".out_proj"))}
    (tmp_path / "adapter").mkdir()
    adapter.save(tmp_path / "adapter")
    expected = logits(adapter.model)
    adapter.detach()
    assert torch.equal(logits(load(base, tmp_path / "adapter").model), expected)


def test_an_architecture_that_peft_does_not_support_is_refused_with_a_remedy(base):
    model = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=320, hidden_size=16, num_hidden_layers=1))
    with pytest.raises(ModelError, match=r"mamba.*recipe 'full'"):
        attach(dataclasses.replace(base, model=model), RECIPE, seed=0)
