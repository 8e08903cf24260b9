"""A base model in FP8: what is quantised, how it trains, and what is refused."""

import copy

import pytest
import torch
from against_dense import padded_batch
from builders import batch_losses, make_llama

from sebp_edge import Personalizer, Recipe
from sebp_edge.engine.models import loading
from sebp_edge.engine.models.adaptation import attach, load, restore, snapshot, trainable
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.fp8 import Fp8Linear, inputs_as_they_are, is_in_fp8, quantise_
from sebp_edge.engine.models.loading import BaseModel, load_base_model
from sebp_edge.engine.sparse.hoist import Hoisted
from sebp_edge.engine.sparse.patches import norms_and_mlps
from sebp_edge.errors import MachineError, ModelError
from sebp_edge.events import ModelLoaded, Notice
from sebp_edge.machine.fp8_support import refuse_without_fp8
from sebp_edge.ops import Fp8Weight
from sebp_edge.research import Sparsified

pytestmark = pytest.mark.usefixtures("unassessed")

CPU = torch.device("cpu")
RECIPE = Recipe(name="test", description="", r=4, learning_rate=2e-2, batch_tokens=200, context_length=64)
IN_FP8 = RECIPE.replace(load_in_fp8=True)


@pytest.fixture
def anywhere(monkeypatch):
    """Lets a CPU train in FP8, by the reference of the kernels."""
    monkeypatch.setattr(loading, "refuse_without_fp8", lambda *_: None)


@pytest.fixture
def folder(tokenizer, tmp_path):
    folder = tmp_path / "model"
    make_llama(attention_bias=True).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load_in(folder, recipe=IN_FP8):
    return load_base_model(resolve(folder), recipe, CPU)


def test_linear_layers_are_in_fp8_and_all_else_is_unchanged(folder, anywhere):
    base, plain = load_in(folder), load_in(folder, RECIPE)
    assert base.in_fp8 and base.precision == "fp8" and not plain.in_fp8 and plain.precision == "float32"
    assert base.num_parameters == plain.num_parameters and base.fingerprint == plain.fingerprint
    for name, parameter in plain.model.named_parameters():
        found = base.model.get_parameter(name)
        if name.endswith("proj.weight"):
            matrix = base.model.get_submodule(name.removesuffix(".weight")).quantised.matrix()
            assert not found.requires_grad and 0 < (matrix - parameter).norm() < 0.04 * parameter.norm()
        else:
            assert torch.equal(found, parameter), name


def random_adaptation(base, recipe=IN_FP8):
    adaptation = attach(base, recipe, seed=1)
    with torch.no_grad():
        for number, parameter in enumerate(trainable(adaptation)):
            draw = torch.Generator().manual_seed(number)
            # Larger adapters would make the bf16 model itself err by half of its gradients.
            parameter.copy_(0.02 * torch.randn(parameter.shape, generator=draw))
    return adaptation


def gradients(adaptation, level, batch):
    with level(adaptation.model) as rows:
        loss = batch_losses(rows, batch).mean()
    loss.backward()
    found = [parameter.grad for parameter in trainable(adaptation)]
    adaptation.model.zero_grad()
    return loss.detach(), torch.cat([each.flatten() for each in found]).double()


@pytest.mark.parametrize("level", [Sparsified, Hoisted], ids=["drop-in", "hoisted"])
def test_gradients_of_two_blocks_err_at_most_ten_times_as_much_as_those_of_bf16(level):
    model, batch, found = make_llama(attention_bias=True).bfloat16(), padded_batch(), {}
    for precision in ("fp32", "bf16", "fp8"):
        own = copy.deepcopy(model).float() if precision == "fp32" else copy.deepcopy(model)
        if precision == "fp8":
            quantise_(own)
        base = BaseModel(resolve("tiny"), own, None, CPU, own.dtype, "")
        found[precision] = gradients(random_adaptation(base, RECIPE), level, batch)
    (true_loss, truth), *others = found.values()
    bf16, fp8 = ((other - truth).norm() / truth.norm() for _, other in others)
    assert 0 < bf16 < fp8 < 10 * bf16
    assert found["fp8"][0] == pytest.approx(true_loss.item(), rel=0.005)


def test_detach_restores_the_base_model_bitwise_and_the_transposed_copies_are_freed(folder, anywhere):
    base = load_in(folder)
    before = {name: tensor.clone() for name, tensor in base.model.state_dict().items()}
    adaptation = random_adaptation(base)
    gradients(adaptation, Hoisted, padded_batch())
    layers = [layer for layer in base.model.modules() if type(layer) is Fp8Linear]
    assert all(layer.weight.untyped_storage().nbytes() == layer.weight.numel() for layer in layers)
    adaptation.detach()
    after = base.model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_an_adapter_trained_in_fp8_is_saved_and_fits_both_precisions(folder, anywhere, tmp_path):
    base, plain = load_in(folder), load_in(folder, RECIPE)
    adaptation = random_adaptation(base)
    state = snapshot(adaptation)
    adaptation.save(tmp_path / "adapter")
    adaptation.detach()
    for other in (base, plain):
        again = load(other, tmp_path / "adapter")
        assert all(torch.equal(one, two) for one, two in zip(snapshot(again), state, strict=True))
        restore(again, state)
        again.detach()


@pytest.mark.slow
def test_a_whole_adaptation_runs_in_fp8(folder, anywhere, notes_folder):
    events = []
    personalizer = Personalizer(folder, recipe=IN_FP8.replace(epochs=2), device="cpu", on_event=events.append)
    result = personalizer.adapt(notes_folder)
    (loaded,) = (event for event in events if isinstance(event, ModelLoaded))
    assert loaded.dtype == "fp8"
    assert not any("padded batches" in event.message for event in events if isinstance(event, Notice))
    assert result.heldout_loss_after < result.heldout_loss_before
    assert result.record.recipe["load_in_fp8"] is True


def test_layers_of_other_sizes_stay_as_they_are(anywhere, tokenizer, tmp_path):
    narrow = make_llama(intermediate_size=72)
    quantise_(narrow)
    assert is_in_fp8(narrow) and {type(layer).__name__ for layer in narrow.model.layers[0].mlp.children()} >= {"Linear"}
    make_llama(hidden_size=24, num_attention_heads=2, num_key_value_heads=1, head_dim=12).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no linear layer whose sizes are multiples of 16, as FP8 needs; leave out"):
        load_in(tmp_path)


def test_full_fine_tuning_is_refused(folder, anywhere):
    with pytest.raises(ModelError, match="is in FP8, which full fine-tuning cannot train; load it in 16 bits"):
        attach(load_in(folder), Recipe.load("full"), seed=0)


@pytest.mark.parametrize(
    "device, capability, found",
    [
        ("cpu", (0, 0), "this device is 'cpu'"),
        ("mps", (0, 0), "this device is 'mps'"),
        ("cuda", (8, 6), "this GPU has 8.6"),
    ],
)
def test_devices_that_do_not_multiply_fp8_are_refused_in_one_sentence(device, capability, found):
    with pytest.raises(MachineError) as refused:
        refuse_without_fp8(device, capability)
    assert str(refused.value) == (
        "A base model in FP8 needs an NVIDIA GPU of compute capability 8.9 or more (Ada, Hopper, Blackwell), but "
        f"{found}; leave out load_in_fp8."
    )
    refuse_without_fp8("cuda", (8, 9))


@pytest.mark.parametrize("budget", [None, "4GB"])
def test_a_cpu_is_refused_before_the_training(folder, notes_folder, budget):
    with pytest.raises(MachineError, match="A base model in FP8 needs an NVIDIA GPU"):
        Personalizer(folder, recipe=IN_FP8, device="cpu", memory_budget=budget).adapt(notes_folder)


@pytest.mark.usefixtures("fused_modules")
def test_norms_and_gates_hand_on_their_outputs_in_fp8_and_change_nothing(anywhere, monkeypatch):
    model, batch, found, known = make_llama(attention_bias=True).bfloat16(), padded_batch(), [], []
    quantise_(model)
    monkeypatch.setattr(Fp8Weight, "outputs_", watch(Fp8Weight.outputs_, known))
    for is_fused in (True, False):
        monkeypatch.setattr(norms_and_mlps, "runs_kernels", lambda tensor, is_fused=is_fused: is_fused)
        adaptation = random_adaptation(BaseModel(resolve("tiny"), model, None, CPU, model.dtype, ""), RECIPE)
        known.clear()
        found.append(gradients(adaptation, Hoisted, batch))
        # Four products in each of two blocks, and the last block's queries by themselves; attention's outputs are not.
        assert (sum(known), len(known)) == (7 if is_fused else 0, 9)
        adaptation.detach()
    (loss, fused), (expected_loss, expected) = found
    assert loss == pytest.approx(expected_loss.item(), rel=1e-3)
    assert (fused - expected).norm() <= 0.03 * expected.norm()


def watch(outputs_, known):
    """The same method, which notes of each product with adapters whether its rows are known in FP8."""

    def watched(weight, out, x, small=None, x_in_fp8=None):
        if small is not None:
            known.append(x_in_fp8 is not None)
        return outputs_(weight, out, x, small, x_in_fp8)

    return watched


def test_layers_round_what_they_read_but_in_trials(folder, anywhere):
    base = load_in(folder)
    layer = base.model.model.layers[0].mlp.gate_proj
    x = torch.randn(3, layer.in_features)
    exact = torch.nn.functional.linear(x, layer.quantised.matrix())
    with torch.no_grad():
        assert 0 < (layer(x) - exact).norm() <= 0.04 * exact.norm()
        with inputs_as_they_are(base.model):
            assert torch.equal(layer(x), exact)
        assert not torch.equal(layer(x), exact)
    assert torch.equal(layer(x), exact)
