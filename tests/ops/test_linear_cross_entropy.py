"""The op: F.cross_entropy of a head's logits and its gradients, with only a chunk of the logits in memory."""

import pytest
import torch
import torch.nn.functional as F
from pairwise import pairwise
from torch.utils._python_dispatch import TorchDispatchMode

from sebp_edge.ops import linear_cross_entropy


def random_case(rows, hidden_size, vocabulary, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (
        torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)
        for size in ((rows, hidden_size), (vocabulary, hidden_size))
    )
    upstream = torch.rand(rows, generator=generator)
    return hidden, weight, torch.randint(vocabulary, (rows,), generator=generator), upstream


def plain(hidden, weight, targets, scale=1.0, softcap=None):
    logits = (hidden @ weight.T).to(torch.promote_types(hidden.dtype, torch.float32)) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, targets, reduction="none")


class Products(TorchDispatchMode):
    """Records how many rows each matrix product with this many columns has."""

    def __init__(self, num_columns):
        super().__init__()
        self.num_columns, self.rows = num_columns, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function.overloadpacket is torch.ops.aten.mm and out.shape[1] == self.num_columns:
            self.rows.append(len(out))
        return out


def losses_and_gradients(function, hidden, weight, upstream, trained):
    hidden = hidden.clone().requires_grad_()
    weight = weight.clone().requires_grad_(trained)
    losses = function(hidden, weight)
    losses.backward(upstream.to(losses.dtype))
    return losses.detach(), [hidden.grad] + ([weight.grad] if trained else [])


@pairwise(
    shape=[(0, 4, 5), (1, 1, 2), (5, 8, 11), (67, 16, 130)],
    trained=[False, True],
    options=[{}, {"scale": 0.25}, {"softcap": 3.0}, {"scale": 2.0, "softcap": 5.0}],
    max_logits=[1, 500, 2**26],
)
def test_losses_and_gradients_equal_plain_ones(shape, trained, options, max_logits, poisoned_memory):
    rows, _, vocabulary = shape
    hidden, weight, targets, upstream = random_case(*shape)
    expected, truths = losses_and_gradients(
        lambda h, w: plain(h, w, targets, **options), hidden, weight, upstream, trained
    )
    with Products(vocabulary) as products:
        losses, found = losses_and_gradients(
            lambda h, w: linear_cross_entropy(h, w, targets, max_logits=max_logits, **options),
            hidden,
            weight,
            upstream,
            trained,
        )
    # A trained head's logits are computed a second time in the backward pass.
    assert sum(products.rows) == rows * (2 if trained else 1)
    assert max(products.rows, default=0) == min(rows, max(1, max_logits // vocabulary))
    assert losses.dtype == torch.float32
    # Softmax runs in fp32 whatever the inputs are.
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    for one, truth in zip(found, truths, strict=True):
        torch.testing.assert_close(one, truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("trained", [False, True])
def test_the_error_is_no_larger_than_plain_in_the_same_dtype(dtype, trained):
    hidden, weight, targets, upstream = random_case(64, 32, 400, dtype)
    weight = weight * 0.3
    tensors = (hidden, weight)
    exact, truths = losses_and_gradients(
        lambda h, w: plain(h, w, targets), *(t.double() for t in tensors), upstream, trained
    )
    dense, allowed = losses_and_gradients(lambda h, w: plain(h, w, targets), *tensors, upstream, trained)
    losses, found = losses_and_gradients(lambda h, w: linear_cross_entropy(h, w, targets), *tensors, upstream, trained)
    for one, other, truth in zip([losses, *found], [dense, *allowed], [exact, *truths], strict=True):
        error, most = ((value.double() - truth).norm() / truth.norm() for value in (one, other))
        assert error <= 2 * most + 1e-4


def test_without_gradients_none_are_computed():
    hidden, weight, targets, _ = random_case(5, 8, 11)
    with torch.no_grad():
        losses = linear_cross_entropy(hidden.requires_grad_(), weight, targets)
    assert not losses.requires_grad


def test_huge_logits_do_not_overflow():
    hidden, weight, targets, _ = random_case(5, 8, 11, torch.float32)
    assert linear_cross_entropy(hidden * 1e4, weight, targets).isfinite().all()


def random_others(rows, vocabulary, number, targets, seed=1):
    """Other targets with shares, and the distribution of each row that they make; every third row has none."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(rows, vocabulary, generator=generator).scatter_(1, targets[:, None], -1).argsort(1)
    ids, weights = order[:, 1:][:, :number], torch.rand(rows, number + 1, generator=generator)
    shares = (weights / weights.sum(1, keepdim=True))[:, 1:]
    shares[::3] = 0
    wanted = torch.zeros(rows, vocabulary, dtype=torch.float64).scatter_(1, ids, shares.double())
    wanted[range(rows), targets] = 1 - shares.double().sum(1)
    return (ids, shares), wanted


@pairwise(
    shape=[(0, 4, 5), (1, 1, 2), (5, 8, 11), (67, 16, 130)],
    trained=[False, True],
    options=[{}, {"scale": 0.25}, {"softcap": 3.0}, {"scale": 2.0, "softcap": 5.0}],
    max_logits=[1, 500, 2**26],
)
def test_with_other_targets_it_is_the_cross_entropy_with_their_shares(
    shape, trained, options, max_logits, poisoned_memory
):
    rows, _, vocabulary = shape
    hidden, weight, targets, upstream = random_case(*shape)
    others, wanted = random_others(rows, vocabulary, min(6, vocabulary - 1), targets)

    def dense(hidden, weight, scale=1.0, softcap=None):
        logits = hidden @ weight.T * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return -(wanted * logits.log_softmax(1)).sum(1)

    expected, truths = losses_and_gradients(lambda h, w: dense(h, w, **options), hidden, weight, upstream, trained)
    losses, found = losses_and_gradients(
        lambda h, w: linear_cross_entropy(h, w, targets, others=others, max_logits=max_logits, **options),
        hidden,
        weight,
        upstream,
        trained,
    )
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=2e-5)
    for one, truth in zip(found, truths, strict=True):
        torch.testing.assert_close(one, truth, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("trained", [False, True])
def test_shares_of_zero_change_nothing(trained):
    hidden, weight, targets, upstream = random_case(64, 32, 400, torch.bfloat16)
    others = torch.zeros(64, 3, dtype=torch.int64), torch.zeros(64, 3)
    expected, truths = losses_and_gradients(
        lambda h, w: linear_cross_entropy(h, w, targets), hidden, weight, upstream, trained
    )
    losses, found = losses_and_gradients(
        lambda h, w: linear_cross_entropy(h, w, targets, others=others), hidden, weight, upstream, trained
    )
    assert torch.equal(losses, expected)
    assert all(torch.equal(one, truth) for one, truth in zip(found, truths, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("trained", [False, True])
def test_other_targets_add_no_more_error_than_plain_in_the_same_dtype(dtype, trained):
    hidden, weight, targets, upstream = random_case(64, 32, 400, dtype)
    weight = weight * 0.3
    others, wanted = random_others(64, 400, 19, targets)

    def dense(hidden, weight):
        return -(wanted * (hidden @ weight.T).float().log_softmax(1)).sum(1).float()

    exact, truths = losses_and_gradients(dense, hidden.double(), weight.double(), upstream, trained)
    plainly, allowed = losses_and_gradients(dense, hidden, weight, upstream, trained)
    losses, found = losses_and_gradients(
        lambda h, w: linear_cross_entropy(h, w, targets, others=others), hidden, weight, upstream, trained
    )
    for one, other, truth in zip([losses, *found], [plainly, *allowed], [exact, *truths], strict=True):
        error, most = ((value.double() - truth).norm() / truth.norm() for value in (one, other))
        assert error <= 2 * most + 1e-4


def test_without_gradients_other_targets_give_the_same_losses(no_host_sync):
    hidden, weight, targets, _ = random_case(5, 8, 11)
    others, wanted = random_others(5, 11, 4, targets)
    with torch.no_grad(), no_host_sync():
        losses = linear_cross_entropy(hidden.requires_grad_(), weight, targets, others=others)
    assert not losses.requires_grad
    torch.testing.assert_close(losses.double(), -(wanted * (hidden @ weight.T).log_softmax(1)).sum(1).detach())
