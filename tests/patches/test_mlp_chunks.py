"""Chunked MLPs: the gradients are the same up to rounding, and only one chunk of an MLP exists at a time."""

import pytest
import torch
from against_dense import all_gradients, padded_batch, with_adapter
from builders import batch_losses, hoist, make_llama
from model_families import MODELS
from pairwise import pairwise

from sebp_edge.errors import SparsityError


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5 * float(expected[name].abs().max()))


@pairwise(family=[*MODELS], adapt=["full", "lora"], options=[{}, {"checkpoints": 1, "offload": True}])
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_gradients_are_those_of_whole_mlps(family, adapt, options, chunk_rows):
    chunk_rows(7)
    model = MODELS[family]().eval()
    model = with_adapter(model) if adapt == "lora" else model
    found = all_gradients(model, options.get("checkpoints", 0), 5, chunked_blocks=True, offload="offload" in options)
    assert_close(found, all_gradients(model, 0, 5))


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 5, 19, 10**6])
def test_chunks_have_any_size(number, chunk_rows):
    chunk_rows(number)
    model, lengths = with_adapter(make_llama(num_hidden_layers=3)), (13, 7)
    chunked = all_gradients(model, 2, 5, lengths, chunked_blocks=True)
    assert_close(chunked, all_gradients(model, 0, 5, lengths))


@pytest.mark.slow
def test_gradients_of_our_kernels_are_those_of_whole_mlps_and_bitwise_those_of_more_checkpoints(
    chunk_rows, kernels, fused_modules
):
    chunk_rows(9)
    # Rows for two chunks.
    model, lengths = with_adapter(make_llama(num_hidden_layers=3)), (9, 5)
    whole = all_gradients(model, 0, lengths=lengths)
    assert_close(all_gradients(model, 1, lengths=lengths, chunked_blocks=True), whole)
    in_one, in_two = (all_gradients(model, checkpoints, lengths=lengths) for checkpoints in (1, 2))
    # Without checkpoints weights are joined with their adapters, which rounds otherwise.
    assert_close(in_one, whole)
    assert in_one.keys() == in_two.keys()
    assert all(torch.equal(gradient, in_two[name]) for name, gradient in in_one.items())


def test_a_chunked_mlp_computes_no_more_products_than_a_checkpointed_one(chunk_rows, rank_products):
    """The backward pass recomputes its gate and up projections, but not its down projection."""
    chunk_rows(10**6)
    model = with_adapter(make_llama(num_hidden_layers=3))

    def count(checkpoints, **options):
        rank_products.clear()
        all_gradients(model, checkpoints, **options)
        return len(rank_products)

    # One more: the last block's gate and up projections, since that block is not in a checkpoint.
    assert count(2, chunked_blocks=True) == count(2) + 1


def test_only_one_chunk_of_an_mlp_exists_at_a_time(chunk_rows, monkeypatch):
    chunk_rows(7)
    model, widest = with_adapter(make_llama(num_hidden_layers=3)), []
    intermediate = model.config.intermediate_size
    for block in model.get_base_model().model.layers:
        block.mlp.act_fn.register_forward_hook(lambda module, inputs, output: widest.append(output.shape))
    all_gradients(model, 2, 5, chunked_blocks=True)
    assert widest
    assert max(shape.numel() // intermediate for shape in widest) == 7


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_only_the_norms_after_mlps_can_be_trained(chunk_rows):
    chunk_rows(7)
    model = MODELS["gemma2"]().eval().requires_grad_(False)
    for block in model.model.layers:
        block.post_feedforward_layernorm.requires_grad_(True)
    assert_close(all_gradients(model, 1, 5, chunked_blocks=True), all_gradients(model, 0, 5))


def test_active_dropout_in_an_mlp_is_refused():
    model, batch = make_llama(), padded_batch()
    model.model.layers[0].mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.1))
    with (
        hoist(model.train(), chunked_blocks=True) as hoisted,
        pytest.raises(SparsityError, match="do not support dropout"),
    ):
        batch_losses(hoisted, batch)
