"""AdamW in place: torch's update in fp32, unbiased rounding in fewer bits; plain PyTorch, and our kernel."""

import pytest
import torch

from sebp_edge.ops import AdamW, Moments, adamw_, reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = [(1,), (7,), (3, 85), (256,), (2, 5, 129)]


@pytest.fixture(params=["torch", "reference", "kernel"])
def path(request, monkeypatch):
    """Torch's own kernel, which a CPU uses for fp32 if it can, and both implementations; on a GPU not torch's."""
    if request.param == "kernel" and DEVICE.type == "cpu":
        request.getfixturevalue("kernels")
    elif request.param == "torch" and DEVICE.type == "cuda":
        pytest.skip("a GPU uses our kernel")
    if request.param == "reference":
        request.getfixturevalue("plain_pytorch")
    if request.param != "torch":
        monkeypatch.setattr("sebp_edge.ops.adamw.updates_by_torch", lambda weight, moments: False)


def draw(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def run(weight, gradients, learning_rate=1e-2, factor=None, seed=0, **settings):
    moments, adamw = Moments.of(weight), AdamW.on(DEVICE, **settings)
    for gradient in gradients:
        adamw.begin_step(learning_rate)
        adamw_(weight, gradient, moments, adamw, seed=seed, factor=factor)
    return moments


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("factor", [None, 0.3])
def test_an_update_in_fp32_equals_torchs(path, size, factor):
    weight, gradients = draw(*size), [draw(*size, seed=seed) for seed in range(1, 6)]
    expected = weight.clone().requires_grad_()
    optimizer = torch.optim.AdamW([expected], lr=1e-2, weight_decay=0.1)
    for gradient in gradients:
        expected.grad = gradient * (factor or 1.0)
        optimizer.step()
    run(weight, gradients, factor=None if factor is None else torch.tensor(factor, device=DEVICE), weight_decay=0.1)
    torch.testing.assert_close(weight, expected.detach(), rtol=2e-6, atol=2e-6)


def test_without_gradient_and_learning_rate_nothing_changes_before_the_first_step(path):
    weight = draw(7)
    before, moments = weight.clone(), Moments.of(weight)
    adamw_(weight, torch.zeros_like(weight), moments, AdamW.on(DEVICE), seed=0, factor=torch.ones((), device=DEVICE))
    assert torch.equal(weight, before) and not moments.first.any() and not moments.second.any()


def test_an_empty_weight_is_accepted(path):
    weight = torch.empty(0, 3, dtype=torch.bfloat16, device=DEVICE)
    run(weight, [torch.empty(0, 3, device=DEVICE)])


def test_the_strides_of_a_gradient_do_not_matter(path):
    one, other = draw(6, 10), draw(6, 10)
    gradient = draw(10, 6, seed=1)
    run(one, [gradient.T])
    run(other, [gradient.T.contiguous()])
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("weight", "gradient", "message"),
    [
        (draw(4, 6).T, draw(6, 4), "contiguous weights in bf16 or fp32"),
        (draw(4).double(), draw(4), "torch.float64"),
        (draw(4), draw(5), r"shape is \(5,\), the weight's \(4,\)"),
    ],
)
def test_unsupported_weights_and_gradients_are_refused(weight, gradient, message):
    with pytest.raises(ValueError, match=message):
        run(weight, [gradient])


def test_autograd_notices_the_update_of_a_saved_weight(path):
    weight = draw(5, 3).requires_grad_()
    loss = (weight * weight).sum()
    run(weight, [draw(5, 3, seed=1)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits_and_another_seed_other_bits(path):
    weights = [draw(3, 700).bfloat16() for _ in range(3)]
    gradients = [draw(3, 700, seed=seed) for seed in (1, 2)]
    for weight, seed in zip(weights, (5, 5, 6), strict=True):
        run(weight, gradients, learning_rate=1e-4, seed=seed)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.slow
def test_rounding_is_to_a_neighbour_and_exact_in_expectation(path):
    # After the first step, all weights have the same exact value, which lies between two bf16 numbers.
    start, count = 0.02, 2**14
    weight = torch.full((count,), start, dtype=torch.bfloat16, device=DEVICE)
    exact = weight[0].double() - 1e-5
    run(weight, [torch.ones(count, device=DEVICE)], learning_rate=1e-5)
    neighbours = weight.unique().double()
    assert len(neighbours) == 2
    assert neighbours[0] < exact < neighbours[1]
    share = float((exact - neighbours[0]) / (neighbours[1] - neighbours[0]))
    standard_error = (share * (1 - share) / count) ** 0.5
    assert abs(float((weight.double() == neighbours[1]).double().mean()) - share) < 4 * standard_error


@pytest.mark.slow
def test_codes_are_exact_in_expectation_and_rounded_apart_from_their_neighbours(path):
    # The exact moments are 0.1 and 0.001, each between two codes; the weight lies between two bf16 numbers.
    count, betas = 2**14, (0.9, 0.999)
    weight = torch.full((count,), 0.02, dtype=torch.bfloat16, device=DEVICE)
    moments = run(weight, [torch.ones(count, device=DEVICE)], learning_rate=1e-5, betas=betas)
    first = reference.decode(moments.first, moments.exponents[0], signed=True)
    second = reference.decode(moments.second, moments.exponents[1], signed=False)
    rounded_up = []
    for values, exact in ((first, 0.1), (second, 0.001)):
        low, high = values.unique().double()
        share = float((exact - low) / (high - low))
        standard_error = (share * (1 - share) / count) ** 0.5
        rounded_up.append((values.double() == high).double())
        for half in (rounded_up[-1][0::2], rounded_up[-1][1::2]):
            assert abs(float(half.mean()) - share) < 4.5 * 2**0.5 * standard_error
    rounded_up.append((weight == weight.max()).double())
    table = torch.stack([each - each.mean() for each in rounded_up])
    table /= table.square().mean(dim=1, keepdim=True).sqrt()
    # One element's own bits may be related, those of two elements not.
    for distance in (1, 2, 3, 4, 8, 256):
        assert (table @ table.roll(distance, dims=1).T / count).abs().max() < 4.5 / count**0.5


def test_random_bits_are_uniform_and_unrelated_between_neighbours_steps_and_seeds():
    def bits(seed, step):
        return reference.random_bits(seed, torch.tensor(step), 2**15)

    streams = [part.double() / 2**16 - 0.5 for b in (bits(0, 1), bits(0, 2), bits(1, 1)) for part in split(b)]
    streams.append(streams[0].roll(1))
    table = torch.stack(streams) * 12**0.5
    # Means and correlations of uniform numbers have a standard error of 1 / sqrt(count).
    assert table.mean(dim=1).abs().max() < 4.5 / 2**7.5
    correlations = table @ table.T / 2**15 - torch.eye(len(table))
    assert correlations.abs().max() < 4.5 / 2**7.5


def split(bits):
    assert bool((bits >= 0).all())
    return bits & 0xFFFF, bits >> 16 & 0xFFFF, bits >> 32


def test_at_a_small_learning_rate_bf16_follows_an_fp32_master_in_expectation(path):
    count, steps = 2**9, 24
    start = (0.02 * draw(count)).bfloat16()
    gradients = [draw(count, seed=seed) + 0.5 for seed in range(1, steps + 1)]
    master, rounded, nearest = start.float(), start.clone(), start.clone()
    run(master, gradients, learning_rate=1e-5)
    run(rounded, gradients, learning_rate=1e-5)
    plain = torch.optim.AdamW([nearest.requires_grad_()], lr=1e-5, weight_decay=0.0)
    for gradient in gradients:
        nearest.grad = gradient.bfloat16()
        plain.step()
    moved, large = (master - start.float()).mean(), start.abs() > 0.02
    error = rounded.float() - master
    standard_error = error.std() / count**0.5
    assert abs(moved) > 20 * standard_error
    assert abs(error.mean()) < 4 * standard_error
    assert torch.equal(nearest.detach()[large], start[large])
    assert not torch.equal(rounded[large], start[large])


# The interpreter computes with numpy, which warns about these values.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_propagate(path, value):
    weight = draw(600).bfloat16()
    weight[3] = value
    gradient = draw(600, seed=1)
    gradient[300] = value
    moments = run(weight, [gradient, gradient.nan_to_num(0.0, 0.0, 0.0)])
    assert torch.equal(weight[3:4], torch.tensor([value], device=DEVICE).bfloat16()) or weight[3].isnan()
    assert not weight[300].isfinite()
    assert weight.isfinite().sum() == 598
    first = reference.decode(moments.first, moments.exponents[0], signed=True)
    assert not first[300].isfinite()


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_codes_are_exact_in_expectation_and_encoding_their_values_changes_nothing(signed, scale):
    values = draw(700).cpu() * scale
    values = values if signed else values.square() if scale == 1.0 else values.abs()
    values[5] = 0.0
    codes, exponents = torch.zeros(700, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)
    total, times = torch.zeros(700, dtype=torch.float64), 400
    for step in range(times):
        reference.encode_(codes, exponents, values, reference.random_bits(0, torch.tensor(step), 700) & 0xFFFF, signed)
        decoded = reference.decode(codes, exponents, signed)
        total += decoded.double()
        assert ((decoded - values).abs() <= 2**-3 * values.abs() + 2**-14 * values.abs().max()).all()
    error = (total / times - values) / values.abs().clamp(min=1e-4 * float(values.abs().max()))
    # A step between codes is at most an eighth of the value: a standard deviation of at most a sixteenth.
    assert error.abs().max() < 5 / 16 / times**0.5
    before = codes.clone()
    reference.encode_(codes, exponents, decoded, torch.full((700,), 0xFFFF), signed)
    assert torch.equal(reference.decode(codes, exponents, signed), decoded)
    assert signed or torch.equal(codes == 0, before == 0)


def test_codes_of_kernel_and_reference_differ_by_at_most_one(kernels):
    """Both start from the same codes; they differ by their random bits, so by at most one code."""
    weight, gradients = draw(1030).bfloat16(), [draw(1030, seed=seed) for seed in (1, 2, 3)]
    moments = run(weight, gradients)
    both = [Moments(*(values.clone() for values in moments)) for _ in range(2)]
    adamw = AdamW.on(DEVICE)
    adamw.begin_step(1e-3)
    adamw_(weight.clone(), gradients[0], both[0], adamw, seed=0)
    reference.adamw_(weight.clone(), gradients[0], both[1], adamw, 0, None)
    assert torch.equal(both[0].exponents, both[1].exponents)
    for one, other in zip(both[0][:2], both[1][:2], strict=True):
        difference = one.int() - other.int()
        assert difference.abs().max() == 1
        assert difference.abs().float().mean() < 0.5


@pytest.mark.slow
def test_8_bit_moments_equal_fp32_moments_on_average():
    count, steps = 256 * 16, 300
    weights = torch.zeros(count, dtype=torch.bfloat16, device=DEVICE), torch.zeros(count, device=DEVICE)
    scale = torch.logspace(-2, 0, 256, device=DEVICE).repeat(16)
    gradients = [draw(count, seed=seed) * scale for seed in range(steps)]
    found, exact = (run(weight, gradients) for weight in weights)
    first = reference.decode(found.first, found.exponents[0], signed=True)
    second = reference.decode(found.second, found.exponents[1], signed=False)
    # The measured spreads were 0.04 and 0.18.
    for errors, spread in (((first - exact.first) / exact.second.sqrt(), 0.05), (second / exact.second - 1, 0.25)):
        assert errors.std() < spread
        assert errors.mean().abs() < 4 * errors.std() / count**0.5


def test_a_second_moment_that_is_not_zero_stays_above_zero(path):
    weight = torch.zeros(256, dtype=torch.bfloat16, device=DEVICE)
    gradient = torch.full((256,), 1e-9, device=DEVICE)
    gradient[0] = 1.0
    moments = run(weight, [gradient] * 3, learning_rate=1e-3)
    assert (moments.second > 0).all()
    assert weight.abs().max() < 4e-3


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_least_squares_is_solved_as_well_as_with_fp32_moments(noise):
    inputs, truth = draw(64, 24, seed=1), draw(24, 10, seed=2)
    scales = torch.logspace(-3, 0, 24, device=DEVICE)[:, None]

    def error_after_training(weight):
        moments, adamw = Moments.of(weight), AdamW.on(DEVICE)
        first = float((weight.float() - truth).norm())
        for step in range(40):
            gradient = scales * (inputs.T @ (inputs @ (weight.float() - truth)) / 64 + noise * draw(24, 10, seed=step))
            adamw.begin_step(0.1 * (1 - step / 40))
            adamw_(weight, gradient, moments, adamw, seed=0)
        return float((weight.float() - truth).norm()) / first

    exact = error_after_training(torch.zeros(24, 10, device=DEVICE))
    found = error_after_training(torch.zeros(24, 10, dtype=torch.bfloat16, device=DEVICE))
    assert exact < 0.5
    assert found < 1.15 * exact
