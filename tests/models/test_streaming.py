"""Blocks whose frozen weights are in host memory compute what those on the device compute, bit for bit."""

from functools import partial

import pytest
import torch
from against_dense import padded_batch
from builders import disturb, make_examples, make_llama, save_model
from model_families import OF_NO_KNOWN_KIND, make_of_no_known_kind
from safetensors.torch import load_file, save_file

from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.engine.memory.memory_options import MemoryOptions
from sebp_edge.engine.models.adaptation import attach, trainable
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.generation import generate_text
from sebp_edge.engine.models.loading import load_base_model
from sebp_edge.engine.models.sampling import Sampling
from sebp_edge.engine.models.shape import spread
from sebp_edge.engine.models.streaming import StreamedBlocks, move_to_device
from sebp_edge.engine.sparse.patches import fused_lora
from sebp_edge.engine.sparse.rows.batches import Collator
from sebp_edge.engine.training.learner import Learner
from sebp_edge.engine.training.losses import RowLosses
from sebp_edge.errors import ModelError
from sebp_edge.events import Notice
from sebp_edge.values.example import outlines

CPU = torch.device("cpu")
RECIPE = Recipe(name="test", description="", r=4, learning_rate=1e-2, batch_tokens=200, context_length=64)
SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 5, "tie_word_embeddings": False}
# Of 5 blocks: some, and all.
NUMBERS = (3, 5)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Small weights move into gaps of memory."""
    monkeypatch.setattr(fused_lora, "moved_into_gaps", torch.clone)


@pytest.fixture(params=[False, True], ids=["full precision", "4 bits"])
def recipe(request):
    if request.param:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install 'sebp-edge[4bit]'")
    return RECIPE.replace(load_in_4bit=request.param)


@pytest.fixture
def folder(tmp_path):
    return save_model(make_llama(attention_bias=True, **SIZES), tmp_path / "model")


@pytest.fixture(params=OF_NO_KNOWN_KIND)
def other_folder(request, tmp_path):
    return save_model(make_of_no_known_kind(request.param), tmp_path / "model")


def load(folder, recipe, number):
    return load_base_model(resolve(folder), recipe, CPU, streamed_blocks=number)


def random_adaptation(base, recipe):
    return disturb(attach(base, recipe, seed=1))


def poison(model):
    """Fills each block's buffer with NaN as soon as the block has run, so that its weights must be copied again."""
    for block in model.modules():
        for hook in list(block._forward_pre_hooks.values()):
            if hook.__module__ == "sebp_edge.engine.models.streaming":
                cells = (cell.cell_contents for cell in hook.__closure__)
                stream = next(each for each in cells if isinstance(each, StreamedBlocks))
                block.register_forward_hook(partial(spoil, stream))


def spoil(stream, block, inputs, output):
    fill_buffers(block)
    stream._held = [None, None]


def fill_buffers(model):
    for weight in model.parameters():
        if getattr(weight, "is_streamed", False):
            weight.data.view(torch.uint8).fill_(0xFF)


def losses_and_gradients(base, recipe, examples, options, poisoned=False):
    adaptation = random_adaptation(base, recipe)
    notices = []
    learner = Learner(adaptation, recipe, examples, Collator(64, 2), notices.append, options)
    assert learner.row_losses.hoisted is not None and not notices
    if poisoned:
        poison(base.model)
    (micro_batch,) = learner.row_losses.limit.cut(outlines(examples))
    held_out, _ = learner.losses_of(micro_batch)
    learner.begin_step(1e-3)
    learner.accumulate(micro_batch, loss_tokens=7)
    if poisoned:
        fill_buffers(base.model)  # as a replayed graph does, of which nothing is known afterwards
    learner.accumulate(micro_batch, loss_tokens=11)
    found = [parameter.grad.clone() for parameter in learner.parameters]
    outcome = learner.finish_step()
    after, _ = learner.losses_of(micro_batch)
    learner.release()
    learner.remove()
    adaptation.detach()
    return [held_out, after, outcome.loss, *found]


@pytest.mark.parametrize("options", [MemoryOptions(), MemoryOptions(checkpoints=3, offload=True, chunked_blocks=True)])
def test_losses_and_gradients_are_those_of_the_resident_model_bit_for_bit(folder, recipe, options):
    examples = make_examples([31, 1, 17, 64, 5])
    expected = losses_and_gradients(load(folder, recipe, 0), recipe, examples, options)
    for number in NUMBERS:
        base = load(folder, recipe, number)
        assert base.streamed_blocks == number and base.in_4bit == bool(recipe.load_in_4bit)
        found = losses_and_gradients(base, recipe, examples, options, poisoned=True)
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("checkpoints", [0, 3])
def test_blocks_of_no_known_kind_are_exact_too(other_folder, recipe, checkpoints):
    examples, options = make_examples([31, 1, 17, 64, 5]), MemoryOptions(checkpoints=checkpoints)
    expected = losses_and_gradients(load(other_folder, recipe, 0), recipe, examples, options)
    for number in NUMBERS:
        base = load(other_folder, recipe, number)
        found = losses_and_gradients(base, recipe, examples, options, poisoned=True)
        assert all(map(torch.equal, found, expected))


def test_weights_that_blocks_share_stay_on_the_device():
    model, ids = make_llama(**SIZES), torch.tensor([[5, 6, 7]])
    layers = model.model.layers
    layers[4].mlp.up_proj = layers[1].mlp.up_proj
    with torch.no_grad():
        expected = model(ids).logits
        move_to_device(model, CPU, 5, None, lambda block: None)
        poison(model)
        assert torch.equal(model(ids).logits, expected)
        assert torch.equal(model(ids).logits, expected)
    assert not hasattr(layers[1].mlp.up_proj.weight, "is_streamed") and layers[1].mlp.gate_proj.weight.is_streamed


def test_no_saved_tensor_is_of_a_buffer_and_what_runs_without_active_rows_is_exact_too(folder, recipe):
    # PEFT's own layers save views, whose values are there again in the backward pass.
    examples, batch = make_examples([31, 1, 17]), padded_batch()
    expected = plain_gradients(random_adaptation(load(folder, recipe, 0), recipe), batch)
    base = load(folder, recipe, 5)
    adaptation = random_adaptation(base, recipe)
    poison(base.model)
    assert all(map(torch.equal, plain_gradients(adaptation, batch), expected))
    streamed = (weight for weight in base.model.parameters() if getattr(weight, "is_streamed", False))
    buffers, saved = {weight.untyped_storage().data_ptr() for weight in streamed}, []
    assert len(buffers) == 2

    def pack(tensor):
        saved.append(tensor.untyped_storage().data_ptr())
        return tensor

    with RowLosses(adaptation.model, examples, Collator(64, 2), CPU, list) as losses:
        assert losses.hoisted is not None
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            losses(outlines(examples))
    assert saved and not buffers & {*saved}


def plain_gradients(adaptation, batch):
    loss = adaptation.model(**batch).loss
    loss.backward()
    found = [parameter.grad for parameter in trainable(adaptation)]
    adaptation.model.zero_grad()
    return [loss.detach(), *found]


def test_replies_are_those_of_the_resident_model(folder, recipe):
    def reply(base):
        adaptation = random_adaptation(base, recipe)
        text = generate_text(base.model, base.tokenizer, [5, 6, 7], [], Sampling(max_new_tokens=8, temperature=0))
        adaptation.detach()
        return text

    assert reply(load(folder, recipe, 3)) == reply(load(folder, recipe, 0))


def test_streamed_blocks_are_spread_evenly():
    assert [spread(number, 5) for number in range(6)] == [[], [4], [2, 4], [1, 3, 4], [1, 2, 3, 4], [0, 1, 2, 3, 4]]


def test_more_blocks_than_there_are_and_damaged_ones_are_refused(folder):
    with pytest.raises(ModelError, match="6 blocks were to be streamed, but this model has 5 that are known"):
        load(folder, RECIPE, 6)
    file = folder / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.3.mlp.up_proj.weight"
    weights[name][0, 0] = torch.nan
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ModelError, match=f"contains NaN or infinity, in the tensor '{name}' of model.safetensors"):
        load(folder, RECIPE, 5)


@pytest.mark.slow
@pytest.mark.usefixtures("unassessed")
def test_a_whole_adaptation_saves_the_same_adapter(folder, recipe, notes_folder, tmp_path, monkeypatch):
    def adapt(name):
        store, said = AdapterStore(tmp_path / name), []
        personalizer = Personalizer(folder, recipe=recipe.replace(epochs=1), store=store, device="cpu")
        personalizer.on_event = said.append
        result = personalizer.adapt(notes_folder, activate_anyway=True)
        reply = personalizer.generate("the ferry", max_new_tokens=8, temperature=0)
        notices = [event.message for event in said if isinstance(event, Notice)]
        return (result.path / "adapter_model.safetensors").read_bytes(), result.gain, reply, notices

    *expected, _ = adapt("resident")
    # As if a GPU were too small.
    monkeypatch.setattr("sebp_edge.run.model_in_use.refuse_if_too_big", lambda *given: 5)
    *found, notices = adapt("streamed")
    assert found == expected
    assert any("The weights of 5 blocks stay in host memory" in notice for notice in notices)
