"""A hoisted model that changes between steps still trains like the dense one, or is tried again."""

import copy

import pytest
import torch
from against_dense import assert_same_gradients, gradients, loss_and_gradients, padded_batch
from builders import batch_losses, make_llama, row_losses
from model_changes import CHANGES, LORA_CHANGES, dense_model, layer_of, lora_model, mix_all_rows
from model_families import DECODERS, make_decoder
from torch import nn
from transformers.models.llama import modeling_llama

from sebp_edge.engine.sparse import hoist_if_exact as hoisting
from sebp_edge.engine.sparse.hoist import Hoisted
from sebp_edge.engine.sparse.hoist_if_exact import hoist_if_exact
from sebp_edge.engine.sparse.patches.last_layer import LastLayer
from sebp_edge.engine.sparse.patches.state import ModelState, describe
from sebp_edge.errors import SparsityError
from sebp_edge.research import RowPlan

HOISTED_CHANGES = {
    name: CHANGES[name]
    for name in (
        *("nothing", "head replaced", "vocabulary resized", "scaled logits in the hidden states"),
        *("hook on the last query", "block appended", "block removed", "blocks swapped", "sliding window", "eps"),
        *("activation", "frozen", "scale of attention"),
    )
}


def assert_follows(make, change):
    """Checks that the gradients of a hoisted model are the dense ones after the model has changed."""
    batch, expected, model = padded_batch(prompt=5), make(), make()
    with Hoisted(model) as hoisted:
        gradients(model, batch_losses(hoisted, batch))
        change(expected), change(model)
        found = gradients(model, batch_losses(hoisted, batch))
    _, dense = loss_and_gradients(expected, batch)
    assert_same_gradients(dense, found, 1e-5, 1e-15)


@pytest.mark.parametrize("change", HOISTED_CHANGES.values(), ids=HOISTED_CHANGES)
def test_a_hoisted_model_changed_between_steps_trains_like_dense(change):
    assert_follows(dense_model, change)


def test_a_head_untied_between_hoisted_steps_gets_its_own_gradient():
    def tied_model():
        return make_llama(use_cache=False).double().train()

    def untie(model):
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 1.5)

    assert_follows(tied_model, untie)


@pytest.mark.parametrize("name", ["hook that mixes rows", "forward that mixes rows", "table of hooks replaced"])
def test_a_model_that_is_exact_no_longer_is_hoisted_no_longer(name):
    batch, model = padded_batch(), dense_model()
    hoisted, _ = hoist_if_exact(model, [[5, 6, 7, 8, 9, 10], [8, 9, 10]], 2)
    with hoisted:
        batch_losses(hoisted, batch)
        CHANGES[name](model)
        with pytest.raises(SparsityError, match=r"has changed .* (differ from the padded ones|read each other)"):
            batch_losses(hoisted, batch)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_whose_trial_was_interrupted_after_a_change_is_tried_again_by_the_next_batch():
    batch, model, expected = padded_batch(), dense_model(), dense_model()
    plan, interruptions = RowPlan.from_labels(batch["labels"]), [KeyboardInterrupt]

    def interrupt_once(module, inputs, output):
        if interruptions:
            raise interruptions.pop()

    hoisted, _ = hoist_if_exact(model, [[5, 6, 7, 8, 9, 10], [8, 9, 10]], 2)
    with hoisted:
        model.model.layers[0].register_forward_hook(interrupt_once)
        with pytest.raises(KeyboardInterrupt):
            row_losses(hoisted, batch["input_ids"], plan)
        found = gradients(model, row_losses(hoisted, batch["input_ids"], plan))
    _, dense = loss_and_gradients(expected, batch)
    assert_same_gradients(dense, found, 1e-5, 1e-15)
    assert model.config._attn_implementation == "sdpa"


# Of these, the code of the model is the same afterwards.
VALUES_ONLY = {
    *("nothing", "head replaced", "blocks swapped", "generated", "hook on the weight", "rounded", "weights replaced")
}


@pytest.mark.parametrize("name", sorted((CHANGES | LORA_CHANGES).keys() - VALUES_ONLY))
def test_a_model_that_has_passed_is_tried_again_if_anything_but_values_has_changed(name):
    model = lora_model() if name in LORA_CHANGES else dense_model()
    before = describe(model, model)
    assert before is not None and before == describe(model, model)
    (CHANGES | LORA_CHANGES)[name](model)
    assert describe(model, model) != before


@pytest.mark.slow
def test_a_copy_of_a_model_that_has_passed_is_not_tried_again_until_it_differs(monkeypatch):
    trials, of_last_layer, lines = [], [], [[5, 6, 7, 8, 9, 10], [8, 9, 10]]
    padded, unrestricted = hoisting.padded_losses, LastLayer._unrestricted
    monkeypatch.setattr(hoisting, "padded_losses", lambda *given: trials.append(given) or padded(*given))
    monkeypatch.setattr(LastLayer, "_unrestricted", lambda *given: of_last_layer.append(given) or unrestricted(*given))

    def hoist(model, **options):
        hoisted, reason = hoist_if_exact(model, lines, 2, **options)
        with hoisted:
            assert reason is None
            batch = padded_batch(prompt=5)
            batch_losses(hoisted, batch)
        assert len(of_last_layer) == len(trials)
        return len(trials)

    model = lora_model()
    other = copy.deepcopy(model, {id(each): each for each in model.parameters() if not each.requires_grad})
    assert [hoist(each) for each in (model, model, other, model)] == [1, 1, 1, 1]
    assert [hoist(model, checkpoints=1), hoist(model, checkpoints=1), hoist(model)] == [2, 2, 2]
    layer_of(other).scaling.update(default=3.0)
    assert [hoist(other), hoist(other), hoist(model)] == [3, 3, 3]
    with torch.autocast("cpu", torch.bfloat16):
        assert hoist(model) == 4
    assert hoist(lora_model()) == 5  # other weights
    rotate = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda *given, **options: rotate(*given, **options))
    assert [hoist(model), hoist(model)] == [6, 6]
    for each in (*model.parameters(), *other.parameters()):
        each.data.mul_(1.01)
    model.base_model.model.model.layers[1].mlp.register_forward_hook(mix_all_rows)
    assert hoist_if_exact(model, lines, 2)[0] is None


@pytest.mark.parametrize("name", ["head with a bias", "hook on the head", "head's forward replaced"])
def test_a_hoisted_model_refuses_a_head_that_it_would_not_call(name):
    batch, model = padded_batch(), dense_model()
    with Hoisted(model) as hoisted:
        batch_losses(hoisted, batch)
        CHANGES[name](model)
        with pytest.raises(SparsityError, match="head"):
            batch_losses(hoisted, batch)


@pytest.mark.parametrize("family", DECODERS)
def test_training_a_model_does_not_look_like_a_change(family):
    model = make_decoder(family)
    batch = padded_batch()
    model(**batch, use_cache=False).loss.backward()
    state = ModelState(model, model)
    for _ in range(2):
        model(**batch, use_cache=False).loss.backward()
    with torch.no_grad():
        model.eval()(**batch)
    assert state.find_change() is None
