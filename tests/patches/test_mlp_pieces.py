"""MLPs in pieces of the rows: the gradients are the same to rounding, and little of an MLP is there at once."""

import pytest
import torch
from against_dense import all_gradients, padded_batch, with_adapter
from builders import make_llama, row_losses
from model_families import MODELS

from sebp_edge.errors import SparsityError
from sebp_edge.ops import LoraGroup
from sebp_edge.patches import norms_and_mlps
from sebp_edge.rows.row_plan import RowPlan
from sebp_edge.sparse.hoist import Hoisted


@pytest.fixture
def rows(monkeypatch):
    """Sets how many rows a piece has."""
    return lambda number: monkeypatch.setattr("sebp_edge.sparse.hoist.ROWS", number)


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5 * float(expected[name].abs().max()))


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("adapt", ["full", "lora"])
@pytest.mark.parametrize("how", [{}, {"checkpoints": 1}, {"checkpoints": 1, "offload": True}], ids=str)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_gradients_are_those_of_whole_mlps(family, adapt, how, rows):
    rows(7)
    model = MODELS[family]().eval()
    model = with_adapter(model) if adapt == "lora" else model
    found = all_gradients(model, how.get("checkpoints", 0), 5, chunked_blocks=True, offload="offload" in how)
    assert_close(found, all_gradients(model, 0, 5))


@pytest.mark.parametrize("number", [1, 5, 31, 10**6])
def test_pieces_have_any_size(number, rows):
    rows(number)
    model = with_adapter(make_llama(num_hidden_layers=3))
    assert_close(all_gradients(model, 2, 5, chunked_blocks=True), all_gradients(model, 0, 5))


def test_gradients_by_our_kernels_are_those_of_whole_mlps(rows, kernels, monkeypatch):
    rows(9)
    monkeypatch.setattr(norms_and_mlps, "runs_kernels", lambda tensor: True)
    model = with_adapter(make_llama(num_hidden_layers=2))
    assert_close(all_gradients(model, 1, 5, chunked_blocks=True), all_gradients(model, 0, 5))


def test_an_mlp_is_multiplied_no_more_often_than_in_a_checkpoint(rows, monkeypatch):
    """Its gate and up projection once more for the backward pass, its down projection not."""
    rows(10**6)
    model, products, matrices = with_adapter(make_llama(num_hidden_layers=3)), [], LoraGroup.matrices
    monkeypatch.setattr(LoraGroup, "matrices", lambda group: products.append(group.columns) or matrices(group))

    def counted(checkpoints, **how):
        products.clear()
        all_gradients(model, checkpoints, **how)
        return len(products)

    whole, last_one = counted(2), 1
    # The last block's gate and up projection too, since it is not in a checkpoint.
    assert counted(2, chunked_blocks=True) == whole + last_one


def test_a_piece_is_the_most_that_there_is_of_an_mlp_at_once(rows, monkeypatch):
    rows(7)
    model, widest = with_adapter(make_llama(num_hidden_layers=3)), []
    wide = model.config.intermediate_size
    for block in model.get_base_model().model.layers:
        block.mlp.act_fn.register_forward_hook(lambda module, inputs, output: widest.append(output.shape))
    all_gradients(model, 2, 5, chunked_blocks=True)
    assert widest
    assert max(shape.numel() // wide for shape in widest) == 7


def test_without_gradients_pieces_give_the_same(rows):
    rows(7)
    model, batch = with_adapter(make_llama()), padded_batch()
    plan = RowPlan.from_labels(batch["labels"])
    with torch.no_grad():
        with Hoisted(model) as hoisted:
            expected = row_losses(hoisted, batch["input_ids"], plan)
        with Hoisted(model, chunked_blocks=True) as hoisted:
            torch.testing.assert_close(row_losses(hoisted, batch["input_ids"], plan), expected)


def test_mlps_have_the_forward_back_that_they_had(monkeypatch):
    model = make_llama()
    first, second = (block.mlp for block in model.model.layers)
    own = first.forward
    first.forward = lambda x: own(x)
    before = first.forward
    with Hoisted(model, chunked_blocks=True):
        assert first.forward is not before
        assert "forward" in vars(second)
    assert first.forward is before
    assert "forward" not in vars(second)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_norms_after_the_mlp_alone_may_be_trained(rows):
    rows(7)
    model = MODELS["gemma2"]().eval().requires_grad_(False)
    for block in model.model.layers:
        block.post_feedforward_layernorm.requires_grad_(True)
    assert_close(all_gradients(model, 1, 5, chunked_blocks=True), all_gradients(model, 0, 5))


def test_dropout_in_an_mlp_is_refused_while_it_is_on():
    model, batch = make_llama(), padded_batch()
    model.model.layers[0].mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.1))
    plan = RowPlan.from_labels(batch["labels"])
    with Hoisted(model.train(), chunked_blocks=True) as hoisted, pytest.raises(SparsityError, match="does not drop"):
        row_losses(hoisted, batch["input_ids"], plan)
