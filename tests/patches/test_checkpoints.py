"""Checkpointed blocks: gradients are bitwise those of kept activations, and few activations are kept."""

import gc
import weakref
from collections.abc import MutableMapping

import pytest
import torch
from against_dense import all_gradients, gradients, padded_batch, with_adapter
from builders import batch_losses, make_examples, make_llama, make_step, row_losses
from model_families import MODELS, make_gemma4

from sebp_edge import Recipe
from sebp_edge.engine.memory.memory_options import FASTEST, MemoryOptions
from sebp_edge.engine.models.adaptation import trainable
from sebp_edge.engine.sparse.hoist import Hoisted
from sebp_edge.engine.sparse.patches.checkpoints import _HostInput
from sebp_edge.engine.sparse.rows.batches import Collator
from sebp_edge.engine.training.recovery import RecoveringLearner
from sebp_edge.errors import SparsityError
from sebp_edge.events import silent
from sebp_edge.ops import LoraGroup
from sebp_edge.research import RowPlan
from sebp_edge.values.example import Example

RECIPE = Recipe(name="test", description="", r=4, learning_rate=1e-2, batch_tokens=150, context_length=64)
LOW_MEMORY = MemoryOptions(max_rows=70, checkpoints=1, small_buffers=True)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert any(gradient.any() for gradient in found.values())


@pytest.mark.parametrize(
    ("family", "adapt", "prompt"),
    [(family, *(("full", 0), ("lora", 5))[number % 2]) for number, family in enumerate([*MODELS, "gemma4"])],
)
def test_gradients_are_bitwise_those_of_kept_activations(family, adapt, prompt):
    model = (MODELS | {"gemma4": make_gemma4})[family]().eval()
    model = with_adapter(model) if adapt == "lora" else model
    kept = all_gradients(model, 0, prompt)
    assert_equal(all_gradients(model, 1, prompt), kept)
    assert_equal(all_gradients(model, 1, prompt, offload=True), kept)


def test_keys_that_blocks_share_are_freed_with_the_losses():
    """Without Python's collector of cycles: a checkpoint must not keep what it passes on."""
    model, batch, keys = make_gemma4(), padded_batch(), []

    def note(_block, _inputs, kwargs, _out):
        (shared,) = (given for given in kwargs.values() if isinstance(given, MutableMapping))
        keys.append(weakref.ref(shared["full_attention"][0]))

    model.model.layers[3].self_attn.register_forward_hook(note, with_kwargs=True)
    with Hoisted(model, checkpoints=5) as rows:
        gc.collect()
        keys.clear()
        gc.disable()
        try:
            losses = batch_losses(rows, batch)
            losses.sum().backward(retain_graph=True)
            assert len(keys) == 2  # the second while its block was recomputed
            del losses
            assert [key() for key in keys] == [None, None]
        finally:
            gc.enable()


@pytest.mark.parametrize(("num_blocks", "offload"), [(1, True), (3, False), (3, True)])
def test_all_blocks_except_the_last_can_be_checkpointed(num_blocks, offload):
    model = with_adapter(make_llama(num_hidden_layers=4))
    assert_equal(all_gradients(model, num_blocks, 5, offload=offload), all_gradients(model, 0, 5))


@pytest.mark.slow
def test_offloading_supports_successive_batches_of_any_size():
    model = with_adapter(make_llama(num_hidden_layers=3))
    batches = [padded_batch(prompt=prompt) for prompt in (9, 0, 5)]

    def accumulated(**options):
        with Hoisted(model, **options) as rows:
            losses = (batch_losses(rows, batch) for batch in batches)
            return gradients(model, losses)

    def gradients(model, losses):
        model.zero_grad()
        for each in losses:
            each.sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    assert_equal(accumulated(checkpoints=2, offload=True), accumulated())


def test_an_offloaded_input_keeps_its_dtype():
    host = _HostInput()
    for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16):
        hidden = torch.randn(2, 3).to(dtype)
        host.put(hidden)
        assert torch.equal(host._input, hidden)
        assert torch.equal(host.take(hidden.device), hidden)
    assert len(host._buffers) == 2


def test_an_offloaded_input_overwritten_by_another_forward_pass_is_refused():
    model, batch = with_adapter(make_llama(num_hidden_layers=3)), padded_batch()
    with Hoisted(model, checkpoints=2, offload=True) as rows:
        first, second = (batch_losses(rows, batch).sum() for _ in range(2))
        with pytest.raises(SparsityError, match="each backward pass before the next forward pass"):
            first.backward()
        second.backward()


def test_a_base_model_in_4_bits_has_the_gradients_of_kept_activations():
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.nn import Linear4bit

    model = make_llama(hidden_size=64, intermediate_size=128, num_hidden_layers=3).requires_grad_(False)
    for block in model.model.layers:
        for parent, name in ((block.mlp, "down_proj"), (block.mlp, "up_proj"), (block.self_attn, "v_proj")):
            layer = Linear4bit(*reversed(getattr(parent, name).weight.shape), bias=False, compute_dtype=torch.float32)
            layer.load_state_dict(getattr(parent, name).state_dict())
            layer.support_avx512bf16_for_cpu = False
            setattr(parent, name, layer.to("cpu"))
    model = with_adapter(model)
    assert_equal(all_gradients(model, 2), all_gradients(model, 0))


def test_recomputing_a_block_neither_copies_adapters_nor_computes_its_last_product(rank_products, monkeypatch):
    copies, copy = [], LoraGroup.copies
    monkeypatch.setattr(LoraGroup, "copies", lambda group: copies.append(group) or copy(group))
    model = with_adapter(make_llama(num_hidden_layers=3))

    def count(checkpoints):
        rank_products.clear()
        copies.clear()
        all_gradients(model, checkpoints)
        return len(rank_products), len(copies)

    (expected, expected_copies), (found, found_copies) = count(0), count(2)
    # Of q, k and v; o; gate and up; down: all except the last.
    assert found - expected == 2 * 3
    assert found_copies == expected_copies


def test_losses_without_gradients_are_the_same():
    model, batch = make_llama(), padded_batch()
    with torch.no_grad(), Hoisted(model) as rows:
        expected = batch_losses(rows, batch)
    with torch.no_grad(), Hoisted(model, checkpoints=1) as rows:
        assert torch.equal(batch_losses(rows, batch), expected)


def test_a_pass_without_gradients_keeps_nothing_to_recompute():
    # It would overwrite the inputs that the other pass keeps in host memory.
    model, batch = with_adapter(make_llama()), padded_batch()
    plan = RowPlan.from_labels(batch["labels"])
    with Hoisted(model, checkpoints=1, offload=True) as rows:
        losses = row_losses(rows, batch["input_ids"], plan)
        with torch.no_grad():
            row_losses(rows, batch["input_ids"].flip(0), plan)
        found = gradients(model, losses)
    assert_equal(found, all_gradients(model, 0))


def test_the_random_state_is_unchanged():
    model, before = with_adapter(make_llama()), torch.get_rng_state()
    all_gradients(model, 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_active_dropout_is_refused():
    model = MODELS["phi3"]().train()
    model.model.layers[0].resid_mlp_dropout.p = 0.1
    with pytest.raises(SparsityError, match="do not support dropout; disable it"):
        all_gradients(model, 1)
    all_gradients(model.eval(), 1)


def test_active_dropout_of_attention_is_refused():
    model = make_llama(attention_dropout=0.3).train()
    with pytest.raises(SparsityError, match="do not support dropout; disable it"):
        all_gradients(model, 1)
    assert_equal(all_gradients(model.eval(), 1), all_gradients(model, 0))


def test_host_memory_is_freed_with_its_handle():
    model, batch = with_adapter(make_llama(num_hidden_layers=3)), padded_batch()
    gc.disable()
    try:
        with Hoisted(model, checkpoints=2, offload=True) as rows:
            batch_losses(rows, batch).sum().backward()
            host = [block.forward.forward._host for block in model.get_base_model().model.layers[:2]]
            buffers = [weakref.ref(one._buffers[0]) for one in host]
            del host, rows
        assert not any(buffer() for buffer in buffers)
    finally:
        gc.enable()


@pytest.mark.parametrize("num_blocks", [2, 3])
def test_checkpointing_the_last_block_is_refused_and_leaves_the_model_unchanged(num_blocks):
    model = with_adapter(make_llama())
    with pytest.raises(SparsityError, match=f"{num_blocks} blocks cannot be checkpointed; expected at most 1 of 2"):
        Hoisted(model, checkpoints=num_blocks)
    assert not any("forward" in vars(module) for module in model.modules())
    assert model.config._attn_implementation == "sdpa"


# ---------------------------------------------------------------------------------------------------------- trainings


class LoraAdaptation:
    def __init__(self, model):
        self.model = model


# A narrow range of tokens, so that there is something to learn.
EXAMPLES = [
    Example(
        [3 + token % 20 for token in one.input_ids], [-100, *(3 + token % 20 for token in one.input_ids[1:])], number
    )
    for number, one in enumerate(make_examples([31, 2, 17, 64, 5, 40, 23, 8]))
]


def trained(model, options, recipe=RECIPE, steps=6):
    """Returns the losses of some steps, and the trained weights."""
    adapted = LoraAdaptation(model)
    with RecoveringLearner(adapted, recipe, EXAMPLES, Collator(64, 2), silent, options) as learner:
        losses = [float(learner.step(make_step(learner, EXAMPLES), 3e-3).loss) for _ in range(steps)]
    return losses, [parameter.detach().clone() for parameter in trainable(adapted)]


@pytest.mark.slow
def test_training_with_little_memory_learns_the_same():
    (losses, weights), (expected_losses, expected) = (
        trained(with_adapter(make_llama(initializer_range=0.2)), options) for options in (LOW_MEMORY, FASTEST)
    )
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    assert losses[-1] < losses[0] - 0.5
    for found, truth in zip(weights, expected, strict=True):
        assert (found - truth).norm() <= 1e-3 * truth.norm()


@pytest.mark.slow
def test_moments_in_8_bits_learn_equally_well():
    options = MemoryOptions(moments_in_8_bits=True)
    (losses, _), (expected, _) = (
        trained(with_adapter(make_llama(initializer_range=0.2)), one, steps=40) for one in (options, FASTEST)
    )
    drop = expected[0] - expected[-1]
    assert drop > 2.5
    # Measured: 0.007 after 60 steps.
    assert max(abs(one - other) for one, other in zip(losses, expected, strict=True)) < 0.02 * drop


@pytest.mark.slow
def test_weights_updated_in_the_backward_pass_are_reread_before_their_update(updated_in_backward):
    recipe = RECIPE.replace(method="full")

    def whole():
        return make_llama(num_hidden_layers=4).requires_grad_(True).eval()

    (losses, weights), (expected_losses, expected) = (
        trained(whole(), options, recipe) for options in (MemoryOptions(checkpoints=3), FASTEST)
    )
    assert losses == expected_losses
    assert losses[-1] < losses[0] - 0.5
    assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))
