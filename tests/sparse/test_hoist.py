"""Hoisted rows: the padded model's losses and gradients, and no example depends on another."""

import pytest
import torch
from against_dense import assert_same_gradients, dense_losses, gradients, padded_batch, record_inputs, with_lora
from builders import batch_losses, hoist, make_examples, make_llama, row_losses
from model_families import MODELS, WITH_STATES, make_model
from pairwise import pairwise
from teachers import dense_losses as dense_taught_losses
from teachers import losses_of, taught
from transformers import GPT2Config, GPT2LMHeadModel, Mamba2Config

from sebp_edge.errors import SparsityError
from sebp_edge.research import RowPlan, Sparsified


@pairwise(family=(MODELS | WITH_STATES).keys(), adapt=["full", "lora"], prompt=[5, 0], level=[hoist, Sparsified])
def test_losses_and_gradients_are_the_padded_dense_ones(family, adapt, prompt, level):
    model = (MODELS | WITH_STATES)[family]().double()
    if adapt == "lora":
        model = with_lora(model)
    batch = padded_batch(prompt=prompt)
    expected = dense_losses(model, batch)
    expected_gradients = gradients(model, expected)
    with level(model) as rows:
        found = batch_losses(rows, batch)
        found_gradients = gradients(model, found)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert_same_gradients(expected_gradients, found_gradients)


def test_hidden_states_in_fp32_are_rounded_for_a_head_in_bf16():
    """As Mamba does, which adds up its blocks' outputs in fp32."""
    sizes = {"vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    heads = {"num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 16}
    model, batch = make_model(Mamba2Config(**sizes, **heads), "eager").bfloat16(), padded_batch()
    with torch.no_grad():
        assert model.backbone(batch["input_ids"]).last_hidden_state.dtype == torch.float32
    expected = dense_losses(model, batch)
    with hoist(model) as hoisted:
        torch.testing.assert_close(batch_losses(hoisted, batch), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("family", MODELS)
def test_an_example_never_depends_on_its_neighbour(family):
    model, batch = MODELS[family](), padded_batch(lengths=(9, 12, 7))
    plan = RowPlan.from_labels(batch["labels"])
    others = plan.loss_rows // batch["input_ids"].shape[1] != 1
    with torch.no_grad(), hoist(model) as hoisted:
        before = row_losses(hoisted, batch["input_ids"], plan)
        batch["input_ids"][1, :12] = torch.arange(100, 112)
        after = row_losses(hoisted, batch["input_ids"], plan)
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[~others], after[~others])


def test_only_active_rows_are_computed():
    model, batch = make_llama(), padded_batch(prompt=5)
    plan = RowPlan.from_labels(batch["labels"])
    seen, in_last = [], []
    with torch.no_grad(), hoist(model) as hoisted:
        record_inputs(model.model.layers[0].mlp, seen)
        record_inputs(model.model.layers[1].mlp.up_proj, in_last)
        losses = row_losses(hoisted, batch["input_ids"], plan)
    # The trial of the last layer runs first.
    assert seen[-1] == (1, len(plan.active_rows))
    assert in_last[-1] == (1, len(plan.loss_rows))
    assert len(plan.loss_rows) < len(plan.active_rows)
    assert len(losses) == len(plan.loss_rows)


def test_without_kernels_norms_and_mlps_are_the_models_own():
    with hoist(make_llama()) as hoisted:
        assert hoisted._small_ops.replaced == []


def test_a_model_whose_attention_is_not_causal_is_refused():
    model, batch = make_llama(), padded_batch()
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(SparsityError, match="Its attention is not causal"), hoist(model) as hoisted:
        batch_losses(hoisted, batch)


def test_a_model_with_absolute_positions_has_the_dense_losses():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=320, n_embd=32, n_layer=2, n_head=4, n_positions=64)).double().eval()
    batch = padded_batch()
    with torch.no_grad():
        expected = dense_losses(model, batch)
        with hoist(model) as hoisted:
            found = batch_losses(hoisted, batch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# One caps its logits. Families otherwise differ below these, as above.
@pytest.mark.slow
@pairwise(
    family=["llama", "gemma2"],
    adapt=["full", "lora"],
    level=[hoist, Sparsified],
    ks=[(0, 20, 0, 3), (20, 20, 20, 20)],
)
def test_losses_and_gradients_with_teachers_are_the_dense_ones(family, adapt, level, ks):
    model = MODELS[family]().double()
    if adapt == "lora":
        model = with_lora(model)
    examples = taught(make_examples([11, 2, 24, 6], prompt=3), ks)
    expected = dense_taught_losses(model, examples)
    expected_gradients = gradients(model, expected)
    with level(model) as rows:
        found = losses_of(rows, examples)
        found_gradients = gradients(model, found)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert_same_gradients(expected_gradients, found_gradients)


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoints": 2},
        {"checkpoints": 2, "offload": True, "chunked_blocks": True},
        {"max_logits": 1},
        {"max_logits": 4 * 320},
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [True, False])
def test_memory_options_do_not_change_what_is_learnt_of_teachers(options, tied):
    model = make_llama(tie_word_embeddings=tied, num_hidden_layers=3).double()
    examples = taught(make_examples([11, 2, 24, 6], prompt=3), (7, 0, 20, 7))
    expected = dense_taught_losses(model, examples)
    expected_gradients = gradients(model, expected)
    with hoist(model, **options) as rows:
        found = losses_of(rows, examples)
        found_gradients = gradients(model, found)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert_same_gradients(expected_gradients, found_gradients)
