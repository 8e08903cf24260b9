"""N:M pruning: the reference against a definition by sorting, the kernel against the reference."""

import pytest
import torch
from random_cases import draw

from sebp_edge.ops import prune_, shrink_pruned_

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PATTERNS = [(1, 2), (2, 4), (1, 1), (3, 3), (3, 5), (1, 8), (7, 8), (5, 16), (2, 31), (1, 32), (8, 64), (8, 256)]


@pytest.fixture(params=["reference", "kernel"])
def path(request):
    """Both implementations; on a GPU only its own, the kernel."""
    if request.param == "kernel" and DEVICE.type == "cpu":
        request.getfixturevalue("kernels")
    elif request.param == "reference" and DEVICE.type == "cuda":
        request.getfixturevalue("plain_pytorch")


def kept_by_sorting(weight, n, m):
    """The definition: sort each group by magnitude, the first of equal ones first, and keep n."""
    groups = weight.abs().cpu().double().reshape(-1, m)
    order = groups.argsort(dim=1, descending=True, stable=True)
    kept = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, order[:, :n], True)
    return kept.view(weight.shape).to(weight.device)


@pytest.mark.parametrize(("n", "m", "decay"), [*((*pattern, 0.0) for pattern in PATTERNS), (2, 4, 0.3), (5, 16, 1.0)])
def test_the_largest_of_each_group_are_kept_and_the_others_decay(path, n, m, decay):
    weight = draw(3, 3 * m, seed=n)
    out = torch.full_like(weight, torch.nan)
    prune_(out, weight, n, m, decay)
    expected = torch.where(kept_by_sorting(weight, n, m), weight, weight * decay)
    assert torch.equal(out, expected)
    if decay == 0:
        assert ((out != 0).view(-1, m).sum(1) == n).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_of_equal_magnitudes_the_first_are_kept(path, dtype):
    # In few bits, many magnitudes are equal; signs differ.
    weight = (draw(64, 96).round() / 2).to(dtype)
    out = torch.empty_like(weight)
    prune_(out, weight, 3, 8)
    assert torch.equal(out, torch.where(kept_by_sorting(weight, 3, 8), weight, 0))
    prune_(out, torch.zeros_like(weight), 3, 8)
    assert not out.any()


@pytest.mark.parametrize("size", [(9, 8), (1, 1), (3, 1023), (64, 64)])
def test_weights_shrink_where_the_pruned_weight_is_zero(path, size):
    weight, pruned = draw(*size), draw(*size, seed=1)
    is_pruned = draw(*size, seed=2) > 0
    pruned[is_pruned] = 0
    before = weight.clone()
    shrink_pruned_(weight, pruned, 0.25, seed=0, step=1)
    torch.testing.assert_close(weight, torch.where(is_pruned, 0.75 * before, before), rtol=1e-6, atol=0)
    assert torch.equal(weight[~is_pruned], before[~is_pruned])


@pytest.mark.slow
def test_a_shrinkage_below_the_precision_of_bf16_counts_on_average(path):
    weight = draw(128, 256, dtype=torch.bfloat16)
    kept, before, pruned = kept_by_sorting(weight, 2, 4), weight.clone(), torch.empty_like(weight)
    prune_(pruned, weight, 2, 4)
    for step in range(2):
        shrink_pruned_(weight, pruned, 1e-4, seed=3, step=step)
    assert torch.equal(weight[kept], before[kept])
    ratio = (weight.double().abs().sum() - before[kept].double().abs().sum()) / before[~kept].double().abs().sum()
    # 16,384 weights round by about 0.2 %; the standard error of their mean is below 3e-5.
    assert abs(float(ratio) - (1 - 1e-4) ** 2) < 1e-4
    again = before[:4].clone()
    for step in range(2):
        shrink_pruned_(again, pruned[:4], 1e-4, seed=3, step=step)
    assert torch.equal(again, weight[:4])


def test_autograd_notices_the_change_of_a_saved_weight(path):
    weight, out = draw(4, 8), draw(4, 8).requires_grad_()
    loss = (out * out).sum()
    with torch.no_grad():
        prune_(out, weight, 2, 4)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_empty_weight_is_accepted(path):
    weight = draw(0, 8)
    prune_(torch.empty_like(weight), weight, 2, 4)
    shrink_pruned_(weight, torch.empty_like(weight), 0.5, seed=0, step=0)


@pytest.mark.parametrize(
    ("out", "weight", "n", "m", "message"),
    [
        (draw(2, 8), draw(2, 8), 0, 4, "0:4 does not divide"),
        (draw(2, 8), draw(2, 8), 5, 4, "5:4 does not divide"),
        (draw(2, 8), draw(2, 8), 1, 3, "1:3 does not divide rows of 8"),
        (draw(2, 8), draw(8, 2).T, 2, 4, "contiguous floating-point"),
        (draw(2, 8), torch.ones(2, 8, dtype=torch.int64), 2, 4, "torch.int64"),
        (draw(2, 4), draw(2, 8), 2, 4, "the weight"),
    ],
)
def test_unsupported_tensors_and_patterns_are_refused(out, weight, n, m, message):
    with pytest.raises(ValueError, match=message):
        prune_(out, weight, n, m)


def test_pruning_in_place_is_refused():
    weight = draw(2, 8)
    with pytest.raises(ValueError, match="different tensors"):
        prune_(weight, weight, 2, 4)


@pytest.mark.gpu
def test_a_weight_of_more_than_2_31_elements_is_pruned():
    weight = torch.randn(2**20, 2**11 + 8, device=DEVICE, dtype=torch.bfloat16)
    out = torch.empty_like(weight)
    prune_(out, weight, 2, 4)
    assert torch.equal(out[-5:], torch.where(kept_by_sorting(weight[-5:], 2, 4), weight[-5:], 0))
