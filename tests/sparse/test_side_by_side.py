"""Adapters side by side in a hoisted model: the losses and gradients of each are those that it has alone."""

import random

import pytest
import torch
from against_dense import with_adapter
from builders import make_llama

from sebp_edge.errors import SparsityError
from sebp_edge.sparse.hoist import Hoisted
from sebp_edge.sparse.rows.row_plan import IGNORE
from sebp_edge.sparse.rows.share_beginnings import share_beginnings
from sebp_edge.sparse.rows.side_by_side import owned, side_by_side, sums_by_owner
from sebp_edge.texts.batches import pack
from sebp_edge.texts.examples import Example

NUMBER = 3


@pytest.fixture
def model():
    return with_adapter(make_llama(num_hidden_layers=2)).double()


@pytest.fixture
def small_model():
    return with_adapter(make_llama(num_hidden_layers=1))


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def draw_adapters(model, number=NUMBER - 1):
    """Returns further adapters, of other random numbers than the model's."""
    generator = torch.Generator().manual_seed(5)
    return [
        {own: (torch.randn(own.shape, generator=generator).to(own) / 4).requires_grad_() for own in trained(model)}
        for _ in range(number)
    ]


def draw_batches():
    """Returns batches of different sizes: with prompts, with a common beginning, and of one token."""
    draw = random.Random(3)
    common = [draw.randrange(60) for _ in range(9)]

    def example(ids, without_loss):
        return Example(ids, [IGNORE] * without_loss + ids[without_loss:], 0)

    first = [example([draw.randrange(60, 120) for _ in range(size)], size // 2) for size in (14, 5, 8)]
    second = [example(common + [draw.randrange(60, 120) for _ in range(size)], 9) for size in (4, 6)]
    return pack(first), share_beginnings(pack(second)), pack([example([7, 8], 1)])


def results(hoisted, tokens, leaves):
    """Returns the losses, and the gradients of their weighted sum."""
    losses = hoisted.row_losses(tokens)
    gradients = torch.autograd.grad((losses * tokens.weights).sum(), leaves, allow_unused=True)
    return losses.detach(), gradients


def alone(model, adapter, tokens):
    """Returns the results of a model with this adapter only."""
    before = [own.detach().clone() for own in trained(model)]
    for own, value in zip(trained(model), adapter, strict=True):
        own.data.copy_(value)
    with Hoisted(model) as hoisted:
        found = results(hoisted, tokens, trained(model))
    for own, value in zip(trained(model), before, strict=True):
        own.data.copy_(value)
    return found


def assert_close(found, expected):
    """A gradient that is zero in exact arithmetic, as of one token's queries, is rounding of terms as the largest."""
    largest = max(other.norm() for other in expected)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm() + 1e-7 * largest


@pytest.mark.parametrize("numbers", [(0, 1, 2), (2,), (1, 0)], ids=str)
def test_losses_and_gradients_of_each_are_those_of_it_alone(model, numbers):
    compare_with_each_alone(model, numbers)


@pytest.mark.slow
def test_losses_and_gradients_of_each_are_those_of_it_alone_with_our_kernels(small_model, kernels, fused_modules):
    compare_with_each_alone(small_model, (0, 1, 2))


def compare_with_each_alone(model, numbers):
    further = draw_adapters(model)
    adapters = [trained(model), *(list(each.values()) for each in further)]
    batches = {number: batch.weighted(0.5 + number) for number, batch in zip(numbers, draw_batches(), strict=False)}
    together = side_by_side(batches, NUMBER)
    bucket = together.sizes._replace(tokens=64, sequences=16, loss_rows=40)
    with Hoisted(model) as hoisted:
        hoisted.lay_side_by_side(further)
        leaves = [leaf for adapter in adapters for leaf in adapter]
        losses, gradients = results(hoisted, together, leaves)
        filled_losses, filled = results(hoisted, together.filled(bucket), leaves)
        again = results(hoisted, together, leaves)
    assert torch.equal(losses, again[0])
    assert all(map(torch.equal, gradients, again[1]))
    assert_close(filled_losses[: len(losses)][None], losses[None])
    assert_close(filled, gradients)
    ends = together.cu_owned[1].tolist()
    sums = sums_by_owner(losses * together.weights, together)
    for number, adapter in enumerate(adapters):
        own = gradients[number * len(adapter) :][: len(adapter)]
        if number in batches:
            own_losses, expected = alone(model, adapter, batches[number])
            assert_close([losses[ends[number] : ends[number + 1]], *own], [own_losses, *expected])
            assert float(sums[number]) == pytest.approx(float((own_losses * batches[number].weights).sum()), rel=1e-5)
        else:
            assert not any(gradient.any() for gradient in own)
            assert sums[number] == 0


@pytest.mark.parametrize("runs_kernels", [False, True])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, in Triton's interpreter
def test_an_adapter_that_diverged_leaves_the_others_as_they_are(small_model, runs_kernels, request):
    if runs_kernels:
        request.getfixturevalue("kernels")
    model = small_model
    further = draw_adapters(model)
    together = side_by_side(dict(enumerate(draw_batches())), NUMBER)
    leaves = [*further[0].values()]
    own = torch.zeros(len(together.loss_indices), dtype=torch.bool)
    own[together.cu_owned[1, 1] : together.cu_owned[1, 2]] = True
    with Hoisted(model) as hoisted:
        hoisted.lay_side_by_side(further)
        losses, gradients = results(hoisted, together, leaves)
        for parameter in (*trained(model), *further[1].values()):
            parameter.data.fill_(torch.nan)
        beside, gradients_beside = results(hoisted, together, leaves)
    assert beside[~own].isnan().all()
    assert torch.equal(losses[own], beside[own])
    assert all(map(torch.equal, gradients, gradients_beside))
    sums = sums_by_owner(beside, together)
    assert sums.isnan().tolist() == [True, False, True]


def test_an_evaluation_is_that_of_the_adapter_which_owns_it(model):
    further, batch = draw_adapters(model), draw_batches()[0]
    with Hoisted(model) as hoisted, torch.no_grad():
        expected = hoisted.row_losses(batch)
        hoisted.lay_side_by_side(further)
        assert_close(hoisted.row_losses(batch)[None], expected[None])
        found = [hoisted.row_losses(owned(batch, number, NUMBER)) for number in range(NUMBER)]
        assert_close(found[0][None], expected[None])
        hoisted.lay_side_by_side(())
        assert torch.equal(hoisted.row_losses(batch), expected)
    for number, adapter in enumerate(further, start=1):
        assert_close(found[number][None], alone(model, list(adapter.values()), batch)[0][None])


def test_a_changed_model_keeps_its_adapters(model):
    further, batch = draw_adapters(model), owned(draw_batches()[0], 1, NUMBER)
    with Hoisted(model) as hoisted, torch.no_grad():
        hoisted.lay_side_by_side(further)
        before, state = hoisted.row_losses(batch), hoisted.state
        model.get_base_model().config.unused_by_anything = 1
        assert_close(hoisted.row_losses(batch)[None], before[None])
        assert hoisted.state is not state


def test_what_cannot_compute_side_by_side_is_refused(model):
    further = draw_adapters(model)
    with Hoisted(model, checkpoints=1) as hoisted, pytest.raises(SparsityError, match="recomputed"):
        hoisted.lay_side_by_side(further)
    with Hoisted(model) as hoisted:
        hoisted.lay_side_by_side(further)
        with pytest.raises(SparsityError, match="only be called by its handle"):
            model(input_ids=torch.tensor([[5, 6]]))
        layer = model.get_base_model().model.layers[0].self_attn.o_proj
        layer.lora_dropout["default"] = torch.nn.Dropout(0.5)
        with pytest.raises(SparsityError):
            hoisted.row_losses(draw_batches()[0])
    with Hoisted(model) as hoisted, pytest.raises(SparsityError, match="several adapters side by side"):
        hoisted.lay_side_by_side(further)


@pytest.mark.slow
def test_what_is_kept_of_an_mlp_is_what_one_adapter_keeps(small_model, kernels, fused_modules):
    model = small_model
    further, batch, kept = draw_adapters(model), draw_batches()[2], []
    columns = model.get_base_model().config.intermediate_size

    def widest(tokens):
        found = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.setdefault(t.data_ptr(), t), lambda t: t):
            hoisted.row_losses(tokens)
        adapters = {each.data_ptr() for each in (*trained(model), *further[0].values(), *further[1].values())}
        states = [tensor for address, tensor in found.items() if address not in adapters]
        return sum(tensor.numel() for tensor in states if tensor.shape[-1] == columns)

    with Hoisted(model) as hoisted:
        kept.append(widest(batch))
        hoisted.lay_side_by_side(further)
        kept.append(widest(owned(batch, 1, NUMBER)))
    assert kept[0] == kept[1] > 0
