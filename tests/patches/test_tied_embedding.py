"""A tied embedding: the gradient is the dense one, and no second gradient of the vocabulary's size is allocated."""

import pytest
import torch
from against_dense import padded_batch
from builders import batch_losses, make_llama, row_losses
from torch.utils._python_dispatch import TorchDispatchMode

from sebp_edge.engine.sparse.hoist import Hoisted
from sebp_edge.research import RowPlan


def tied(**sizes):
    return make_llama(tie_word_embeddings=True, **sizes).double()


def gradient(model, batch, *, times=1):
    """Returns the embedding's gradient on hoisted rows."""
    model.zero_grad()
    with Hoisted(model) as rows:
        for _ in range(times):
            batch_losses(rows, batch).sum().backward()
    return model.get_input_embeddings().weight.grad.clone()


def dense(model, batch):
    model.zero_grad()
    mask = batch["labels"] != -100
    (model(**batch, use_cache=False).loss * mask[:, 1:].sum()).backward()
    return model.get_input_embeddings().weight.grad.clone()


class Allocations(TorchDispatchMode):
    """Records the addresses of tensors of one shape, without references: autograd copies a gradient that has any."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.addresses = shape, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape == self.shape:
            self.addresses.add(out.data_ptr())
        return out


@pytest.mark.parametrize("prompt", [0, 5])
@pytest.mark.parametrize("padding_idx", [None, 3, 9])
def test_the_gradient_is_the_dense_one(prompt, padding_idx):
    model, batch = tied(), padded_batch(prompt=prompt)
    # A token that is repeated, also in succession.
    batch["input_ids"][0, 1:7] = 3
    model.get_input_embeddings().padding_idx = padding_idx
    torch.testing.assert_close(gradient(model, batch), dense(model, batch), rtol=1e-5, atol=1e-6)


def test_only_one_gradient_of_the_vocabulary_is_allocated():
    model, batch = tied(), padded_batch()
    weight, plan = model.get_input_embeddings().weight, RowPlan.from_labels(batch["labels"])
    with Hoisted(model) as rows, Allocations(weight.shape) as allocations:
        row_losses(rows, batch["input_ids"], plan).sum().backward()
    assert allocations.addresses == {weight.data_ptr(), weight.grad.data_ptr()}


def test_gradients_accumulate_over_batches():
    model, batch = tied(), padded_batch(prompt=5)
    torch.testing.assert_close(gradient(model, batch, times=2), 2 * gradient(model, batch), rtol=1e-5, atol=1e-6)


def test_several_batches_and_other_uses_of_the_weight_add_to_one_gradient():
    model, batch, other = tied(), padded_batch(), padded_batch(prompt=5)
    weight = model.get_input_embeddings().weight
    expected = gradient(model, batch) + gradient(model, other) + 2 * weight.detach()
    model.zero_grad()
    with Hoisted(model) as rows:
        losses = [batch_losses(rows, each) for each in (batch, other)]
        (losses[0].sum() + losses[1].sum() + weight.square().sum()).backward()
    torch.testing.assert_close(weight.grad, expected, rtol=1e-5, atol=1e-6)


def test_a_backward_pass_can_be_repeated():
    model, batch = tied(), padded_batch()
    expected = 2 * gradient(model, batch)
    model.zero_grad()
    with Hoisted(model) as rows:
        loss = batch_losses(rows, batch).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    torch.testing.assert_close(model.get_input_embeddings().weight.grad, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["untied", "frozen", "another class", "wrapped"])
def test_other_embeddings_are_not_replaced(kind):
    model = make_llama(tie_word_embeddings=False).double() if kind == "untied" else tied()
    embedding, batch = model.get_input_embeddings(), padded_batch()
    if kind == "another class":
        embedding.__class__ = type("Scaled", (torch.nn.Embedding,), {})
    elif kind == "wrapped":
        own = embedding.forward
        embedding.forward = lambda ids: own(ids)
    elif kind == "frozen":
        embedding.weight.requires_grad_(False)
        model.model.norm.requires_grad_(True)
    before = vars(embedding).get("forward")
    with Hoisted(model) as rows:
        batch_losses(rows, batch).sum().backward()
        if kind != "frozen":
            assert vars(embedding).get("forward") is before
    assert vars(embedding).get("forward") is before
    if kind == "frozen":
        assert embedding.weight.grad is None
        assert model.model.norm.weight.grad.any()
    else:
        torch.testing.assert_close(embedding.weight.grad, dense(model, batch), rtol=1e-5, atol=1e-6)
