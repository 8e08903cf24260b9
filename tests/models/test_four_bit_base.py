"""A base model that `Personalizer` loads in 4 bits: what is quantised, how it trains, and where its adapters fit."""

import threading
from dataclasses import asdict

import pytest
import torch
from against_dense import padded_batch
from builders import batch_losses, dequantised_llama, disturb, make_llama, save_model
from typer.testing import CliRunner

from sebp_edge import AdapterRecord, AdapterStore, Personalizer, Recipe
from sebp_edge.cli.commands import app
from sebp_edge.cli.console import NOT_BETTER
from sebp_edge.engine.models.adaptation import attach, restore, snapshot, trainable
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.generation import generate_text
from sebp_edge.engine.models.loading import BaseModel, load_base_model
from sebp_edge.engine.models.sampling import Sampling
from sebp_edge.engine.sparse.hoist import Hoisted
from sebp_edge.errors import Interrupted, ModelError
from sebp_edge.events import ModelLoaded
from sebp_edge.research import Sparsified

pytestmark = pytest.mark.usefixtures("unassessed")

bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install 'sebp-edge[4bit]'")

CPU = torch.device("cpu")
RECIPE = Recipe(name="test", description="", r=4, learning_rate=2e-2, batch_tokens=200, context_length=64)
IN_4_BITS = RECIPE.replace(load_in_4bit=True)
BLOCKS = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 1}
# Keys and values of half the tile size of CPUs with bf16 instructions.
NARROW = BLOCKS | {"num_key_value_heads": 1}
BOTH_SIZES = pytest.mark.parametrize("sizes", [BLOCKS, NARROW], ids=["blocks", "narrow"])


def load(folder, recipe=IN_4_BITS):
    return load_base_model(resolve(folder), recipe, CPU)


@pytest.fixture
def sizes():
    return BLOCKS


@pytest.fixture
def folder(sizes, tmp_path):
    folder = tmp_path / "model"
    model = make_llama(attention_bias=True, **sizes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("proj.bias"):
                parameter.copy_(torch.linspace(-0.3, 0.3, len(parameter)))
    return save_model(model, folder)


@BOTH_SIZES
def test_linear_layers_are_in_4_bits_and_all_else_is_unchanged(folder):
    base, plain = load(folder), load(folder, RECIPE)
    assert base.in_4bit and not plain.in_4bit
    assert base.num_parameters == plain.num_parameters
    assert base.dtype == torch.float32
    for name, parameter in plain.model.named_parameters():
        found = base.model.get_parameter(name)
        if name.endswith("proj.weight"):
            assert found.quant_type == "nf4" and found.quant_state.nested and not found.requires_grad
            assert base.model.get_submodule(name.removesuffix(".weight")).compute_dtype == torch.float32
            # Half the widest step of the 16 values between -1 and 1 is 0.152, of the largest value in a block.
            difference = bnb.functional.dequantize_4bit(found.data, found.quant_state) - parameter
            assert 0 < difference.abs().max() < 0.16 * parameter.abs().max()
        else:
            assert torch.equal(found, parameter), name


def gradients(adaptation, level, batch):
    if level is None:
        loss = adaptation.model(**batch).loss
    else:
        with level(adaptation.model) as rows:
            loss = batch_losses(rows, batch).mean()
    loss.backward()
    found = [parameter.grad for parameter in trainable(adaptation)]
    for parameter in trainable(adaptation):
        parameter.grad = None
    return loss.detach(), found


@BOTH_SIZES
@pytest.mark.parametrize("level", [None, Sparsified, Hoisted], ids=["peft", "drop-in", "hoisted"])
def test_training_equals_that_of_the_dequantised_model_even_after_generation(folder, sizes, level):
    base, batch = load(folder), padded_batch()
    # Generation is when bitsandbytes would repack weights, on CPUs with bf16 instructions.
    generate_text(base.model, base.tokenizer, [5, 6, 7], [], Sampling(max_new_tokens=3, temperature=0))
    adaptation = disturb(attach(base, IN_4_BITS, seed=1))
    loss, found = gradients(adaptation, level, batch)
    twin = BaseModel(
        base.reference,
        dequantised_llama(base.model, attention_bias=True, **sizes),
        base.tokenizer,
        CPU,
        torch.float32,
        base.fingerprint,
    )
    plain = attach(twin, RECIPE, seed=1)
    restore(plain, snapshot(adaptation))
    true_loss, truth = gradients(plain, None, batch)
    torch.testing.assert_close(loss, true_loss)
    for one, other in zip(found, truth, strict=True):
        assert other.norm() > 0
        assert (one - other).norm() <= 2e-5 * other.norm()


@pytest.mark.slow
def test_an_adapter_trained_in_4_bits_is_kept_and_fits_both_precisions(folder, notes_folder, tmp_path):
    store, events = AdapterStore(tmp_path), []
    in_4_bits = Personalizer(folder, recipe=IN_4_BITS, store=store, device="cpu", on_event=events.append)
    result = in_4_bits.adapt(notes_folder, name="four")
    assert result.passed
    assert next(event for event in events if isinstance(event, ModelLoaded)).dtype == "nf4"
    in_full = Personalizer(folder, recipe=RECIPE, store=store, device="cpu")
    assert in_full.adapt(notes_folder, name="full").passed
    assert in_full.in_use.base.fingerprint == in_4_bits.in_use.base.fingerprint
    assert in_full.load_adapter("four").recipe["load_in_4bit"] is True
    assert in_4_bits.load_adapter("full").recipe["load_in_4bit"] is False
    assert all(one.generate("the ferry", seed=1, max_new_tokens=8) for one in (in_full, in_4_bits))


@pytest.mark.slow
def test_an_adaptation_that_fails_after_a_change_of_precision_leaves_the_adapter_in_use(folder, notes_folder, tmp_path):
    stop = threading.Event()
    personalizer = Personalizer(folder, recipe=RECIPE, store=AdapterStore(tmp_path), device="cpu")
    assert personalizer.adapt(notes_folder, name="mine").passed
    personalizer.recipe = IN_4_BITS
    personalizer.on_event = lambda event: stop.set() if isinstance(event, ModelLoaded) else None
    with pytest.raises(Interrupted):
        personalizer.adapt(notes_folder, stop_when=stop)
    assert personalizer.in_use.base.in_4bit
    texts = [
        personalizer.generate("the ferry", **adapter, temperature=0, max_new_tokens=8)
        for adapter in ({}, {"adapter": "mine"}, {"adapter": None})
    ]
    assert texts[0] == texts[1] != texts[2]


@BOTH_SIZES
def test_detach_restores_the_4_bit_base_model_bitwise(folder):
    base = load(folder)
    before = {name: value.clone() for name, value in base.model.state_dict().items()}
    attach(base, IN_4_BITS, seed=0).detach()
    after = base.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_full_fine_tuning_of_a_4_bit_base_model_is_refused(folder):
    with pytest.raises(ModelError, match="'model' is in 4 bits, which full fine-tuning cannot train"):
        attach(load(folder), Recipe.load("full"), seed=0)


def test_layers_that_bitsandbytes_dequantises_wrongly_on_the_cpu_are_refused(model_folder):
    with pytest.raises(
        ModelError, match=r"'micro-llama' has a layer with 32 inputs, .* exact only for multiples of 64"
    ):
        load(model_folder)


@pytest.mark.slow
def test_the_command_line_generates_in_the_trained_or_requested_precision(folder, notes_folder, monkeypatch):
    loaded = []

    def spy(*arguments, **options):
        loaded.append(load_base_model(*arguments, **options).in_4bit)
        return load_base_model(*arguments, **options)

    monkeypatch.setattr("sebp_edge.run.model_in_use.load_base_model", spy)
    learn = ["adapt", str(notes_folder), "--model", str(folder), "--epochs", "1", "--name", "mine", "--4bit"]
    with_mine = ["generate", "the ferry", "--model", str(folder), "--max-tokens", "3", "--name", "mine"]
    without = [*with_mine[:-2], "--json"]
    AdapterStore().adapter("mine").save(attach(load(folder), IN_4_BITS, 0), record_of(load(folder)), activate=True)
    for arguments in (learn, with_mine, [*with_mine, "--no-4bit"], without, [*without, "--4bit"]):
        assert CliRunner().invoke(app, arguments).exit_code in (0, NOT_BETTER)
    assert loaded == [True, True, False, False, True]


def record_of(base):
    counts = {"documents": 1, "examples": 1, "tokens": 1, "seed": 0}
    losses = {"heldout_loss_before": None, "heldout_loss_after": None}
    names = {"base_model": "model", "model": "model", "fingerprint": base.fingerprint, "recipe": asdict(IN_4_BITS)}
    return AdapterRecord(**names, **counts, **losses)
