"""Blocks whose frozen weights are in host memory compute what those on the device compute, bit for bit."""

from functools import partial

import pytest
import torch
from builders import make_examples, make_llama

from sebp_edge import Recipe
from sebp_edge.engine.memory.memory_options import MemoryOptions
from sebp_edge.engine.models.adaptation import attach, trainable
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.loading import load_base_model
from sebp_edge.engine.models.streaming import StreamedBlocks
from sebp_edge.engine.sparse.rows.batches import Collator
from sebp_edge.engine.training.learner import Learner
from sebp_edge.values.example import outlines

CPU = torch.device("cpu")
RECIPE = Recipe(name="test", description="", r=4, learning_rate=1e-2, batch_tokens=200, context_length=64)
SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 5, "tie_word_embeddings": False}
# Of 5 blocks: one, some, and all.
NUMBERS = (1, 3, 5)


@pytest.fixture(params=[False, True], ids=["full precision", "4 bits"])
def recipe(request):
    if request.param:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install 'sebp-edge[4bit]'")
    return RECIPE.replace(load_in_4bit=request.param)


@pytest.fixture
def folder(tokenizer, tmp_path):
    make_llama(attention_bias=True, **SIZES).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def load(folder, recipe, number):
    return load_base_model(resolve(folder), recipe, CPU, streamed_blocks=number)


def random_adaptation(base, recipe):
    adaptation = attach(base, recipe, seed=1)
    with torch.no_grad():
        for number, parameter in enumerate(trainable(adaptation)):
            draw = torch.Generator().manual_seed(number)
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))
    return adaptation


def poison(model):
    """Fills each block's buffer with NaN as soon as the block has run, so that its weights must be copied again."""
    for block in model.modules():
        for hook in list(block._forward_pre_hooks.values()):
            if hook.__module__ == "sebp_edge.engine.models.streaming":
                cells = (cell.cell_contents for cell in hook.__closure__)
                stream = next(each for each in cells if isinstance(each, StreamedBlocks))
                block.register_forward_hook(partial(spoil, stream))


def spoil(stream, block, inputs, output):
    for weight in block.parameters():
        if getattr(weight, "is_streamed", False):
            weight.data.view(torch.uint8).fill_(0xFF)
    stream._held = [None, None]


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
    learner.accumulate(micro_batch, loss_tokens=11)
    found = [parameter.grad.clone() for parameter in learner.parameters]
    outcome = learner.finish_step()
    after, _ = learner.losses_of(micro_batch)
    learner.release()
    learner.remove()
    adaptation.detach()
    return [held_out, after, outcome.loss, *found]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("options", [MemoryOptions(), MemoryOptions(checkpoints=3, offload=True, chunked_blocks=True)])
def test_losses_and_gradients_are_those_of_the_resident_model_bit_for_bit(folder, recipe, number, options):
    examples = make_examples([31, 1, 17, 64, 5])
    expected = losses_and_gradients(load(folder, recipe, 0), recipe, examples, options)
    base = load(folder, recipe, number)
    assert base.streamed_blocks == number and base.in_4bit == bool(recipe.load_in_4bit)
    for poisoned in (False, True):
        found = losses_and_gradients(base, recipe, examples, options, poisoned)
        assert all(map(torch.equal, found, expected))
