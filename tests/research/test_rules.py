"""Row selection: each rule selects as documented, unbiased rules have the exact mean, and drops are reported."""

import logging
import math
from itertools import cycle

import pytest
import torch
from against_dense import assert_same_gradients, loss_and_gradients, padded_batch, with_lora
from builders import checkpoint_activations, make_llama
from pairwise import pairwise
from random_cases import random_energy, random_gradient, selector

from sebp_edge import sparsify
from sebp_edge.errors import OptionError
from sebp_edge.ops import row_norms, select_rows, sparse_linear
from sebp_edge.research import Energy, Threshold, TopN
from sebp_edge.research.rules import row_rules
from sebp_edge.research.rules.selection import AppliedRule, _LayerSelector

SIZES = [1, 7, 130]


def chosen(rule, dout):
    ids, _, _, weights = selector(rule)((dout,)).on_host()
    return ids.tolist(), weights


@pairwise(num_rows=SIZES, n=[1, 3, 64, 1000], ties=[False, True])
def test_top_n_keeps_the_largest_rows_and_the_first_of_equal_ones(num_rows, n, ties):
    energy = random_energy(num_rows, seed=n)
    energy = energy.log10().round().clamp(min=0) if ties else energy
    order = sorted(range(num_rows), key=lambda row: -float(energy[row]))
    expected = sorted(row for row in order[:n] if energy[row] > 0)
    assert row_rules.largest(energy, n).nonzero().squeeze(1).tolist() == expected
    ids, weights = chosen(TopN(n), energy.sqrt()[:, None])
    assert (ids, weights) == (expected, None)


@pytest.mark.parametrize("num_rows", SIZES)
@pytest.mark.parametrize("n", [1, 3, 64, 1000])
def test_water_filling_is_proportional_up_to_one_and_sums_to_n(num_rows, n):
    energy = random_energy(num_rows, seed=n)
    norms = energy.sqrt().tolist()
    found = row_rules.water_filling(energy, n)
    active = sum(norm > 0 for norm in norms)
    low, high = 0.0, 1e30
    for _ in range(300):
        tau = (low * high) ** 0.5 if low else high / 2
        low, high = (tau, high) if sum(min(1, tau * norm) for norm in norms) < min(n, active) else (low, tau)
    expected = torch.tensor([min(1, high * norm) for norm in norms], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert math.isclose(float(found.sum()), min(n, active), rel_tol=1e-12)


def test_energy_keeps_the_fewest_rows_with_the_share_in_its_first_pass_and_an_average_of_numbers_later():
    first, second = 1 + torch.rand(40, generator=torch.Generator().manual_seed(0)), 2.0 ** -torch.arange(40.0)
    numbers = [int(row_rules.num_top_rows(energy, 0.9)) for energy in (first, second)]
    assert numbers[1] < numbers[0] - 2
    select = selector(Energy(max_lost=0.1, decay=0.5))
    kept = [select((energy.sqrt()[:, None],)) for energy in (first, second)]
    expected = [numbers[0], -(-sum(numbers) // 2)]
    for energy, rows, number in zip((first, second), kept, expected, strict=True):
        assert int(rows.count) == number
        assert set(rows.ids[:number].tolist()) == set(energy.argsort(descending=True)[:number].tolist())


def test_energy_drops_nothing_if_nothing_may_be_lost():
    energy = random_energy(40, seed=3)
    assert int(selector(Energy(max_lost=0))((energy.sqrt()[:, None],)).count) == int((energy > 0).sum())


@pytest.mark.parametrize("wrong", [{"max_lost": 1}, {"max_lost": -0.1}, {"max_lost": "a"}, {"decay": 1}, {"decay": -1}])
def test_energy_refuses_wrong_values(wrong):
    with pytest.raises(OptionError, match="Energy got"):
        Energy(**wrong)


@pytest.mark.parametrize("num_rows", SIZES)
@pytest.mark.parametrize("share", [0.5, 0.99])
def test_num_top_rows_is_the_fewest_rows_with_a_share_of_the_energy(num_rows, share):
    energy = random_energy(num_rows, num_rows + 1, 2.0).double()
    largest, total, expected = sorted(energy.tolist(), reverse=True), 0.0, 0
    while total < share * sum(largest):
        total, expected = total + largest[expected], expected + 1
    assert int(row_rules.num_top_rows(energy, share)) == expected
    assert int(row_rules.num_top_rows(torch.zeros(num_rows), share)) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("num_rows", "dtype"), [(1, torch.float32), (7, torch.float64), (130, torch.float32)])
def test_a_draw_keeps_each_row_with_its_probability_and_as_many_rows_as_their_sum(num_rows, dtype):
    generator = torch.Generator().manual_seed(num_rows)
    probability = torch.rand(num_rows, generator=generator).to(dtype)
    probability[::5], probability[3::5] = 0, 1
    draws = 1000
    counts = torch.zeros(num_rows)
    for _ in range(draws):
        keep, weights = row_rules.draw(probability, generator)
        assert abs(int(keep.sum()) - float(probability.sum())) < 1 + 1e-6
        assert torch.allclose(weights[keep], 1 / probability[keep], rtol=1e-6, atol=0)
        assert (weights[~keep] == 0).all()
        counts += keep
    error = (counts / draws - probability).abs()
    assert (error <= 5 * (probability * (1 - probability) / draws).sqrt() + 1e-9).all()


def plain_threshold(energy, epsilon, max_lost):
    """Returns the kept rows and the threshold, by a loop from the smallest row up."""
    active = sorted((float(value), row) for row, value in enumerate(energy) if value > 0)
    bound = epsilon * active[(len(active) - 1) // 2][0] ** 0.5 if active else 0.0
    total, lost, kept = sum(value for value, _ in active), 0.0, []
    for value, row in active:
        lost += value
        if value**0.5 >= bound or lost > max_lost * total:
            kept.append(row)
    return sorted(kept), bound


@pairwise(num_rows=SIZES, epsilon=[1e-3, 0.5, 1.0, 30.0], max_lost=[0, 1e-6, 1e-3, 0.2, 1])
def test_the_threshold_keeps_rows_above_it_and_enough_of_the_energy(num_rows, epsilon, max_lost):
    energy = random_energy(num_rows, seed=num_rows)
    expected, bound = plain_threshold(energy, epsilon, max_lost)
    keep, found_bound = row_rules.above_threshold(energy, epsilon, max_lost)
    assert keep.nonzero().squeeze(1).tolist() == expected
    assert float(row_rules.lost_share(energy, keep)) <= max_lost * (1 + 1e-12)
    ids, _ = chosen(Threshold(epsilon=epsilon, max_lost=max_lost), energy.sqrt()[:, None])
    assert ids == expected
    lowest_kept = float(energy[expected].min().sqrt()) if expected else 0.0
    assert math.isclose(float(found_bound), min(bound, lowest_kept), rel_tol=1e-12) or not expected
    probability = row_rules.threshold_probabilities(energy, epsilon, max_lost)
    soft = [float(value) ** 0.5 / float(found_bound) if value else 0.0 for value in energy]
    wanted = [1.0 if row in expected else value for row, value in enumerate(soft)]
    torch.testing.assert_close(probability, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=0)


def plain_knee(passes, max_lost):
    """Computes epsilon in loops: tenths of a decade, cumulative counts, sums of five, the knee, the cap."""
    counts, energies = [0] * 140, [0.0] * 140
    for energy in passes:
        norms = [float(value) ** 0.5 for value in energy if value > 0]
        median, total = sorted(norms)[(len(norms) - 1) // 2], sum(norm**2 for norm in norms)
        for norm in norms:
            bin_index = min(max(math.floor((math.log10(norm / median) + 12) * 10), 0), 139)
            counts[bin_index] += 1
            energies[bin_index] += norm**2 / total
    below = [sum(counts[:edge]) for edge in range(141)]
    smooth = [sum(below[min(max(edge + shift, 0), 140)] for shift in range(-2, 3)) for edge in range(141)]
    bends = [smooth[edge - 1] - 2 * smooth[edge] + smooth[edge + 1] for edge in range(1, 140)]
    knee = 1 + bends.index(min(bends))
    allowed = max(edge for edge in range(141) if sum(energies[:edge]) <= max_lost * sum(energies))
    return 10 ** (min(knee, allowed) / 10 - 12)


@pytest.mark.parametrize("max_lost", [0, 1e-3, 0.3, 1])
@pytest.mark.parametrize("spread", [0.2, 1.0, 3.0])
def test_epsilon_is_the_knee_of_the_distribution_unless_it_loses_too_much(max_lost, spread):
    histogram = row_rules.NormHistogram(torch.device("cpu"))
    passes = [random_energy(200, seed, spread) * 10.0**seed for seed in range(3)]
    for energy in passes:
        histogram.add(energy)
    assert math.isclose(float(histogram.epsilon(max_lost)), plain_knee(passes, max_lost), rel_tol=1e-5)


@pytest.mark.parametrize("noisy", [0.3, 0.8])
@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_a_calibrated_threshold_drops_noise_and_little_else(noisy, scale):
    generator = torch.Generator().manual_seed(3)
    choose = selector(Threshold(calibration_passes=2))
    for number in range(4):
        decades = 0.3 * torch.randn(300, generator=generator)
        noise = torch.rand(300, generator=generator) < noisy
        decades[noise] = -4 + 0.02 * torch.randn(int(noise.sum()), generator=generator)
        decades[:20] = -torch.inf
        dout = scale * (10**decades)[:, None].expand(-1, 3)
        ids, *_ = choose((dout,)).on_host()
        kept = torch.zeros(300, dtype=torch.bool).index_fill(0, ids, True)
        if number < 2:
            assert torch.equal(kept, row_norms(dout) != 0)
        else:
            assert not kept[noise].any()
            lost = row_rules.lost_share(row_norms(dout), kept)
            assert lost <= 1e-3
            assert kept.sum() >= 0.5 * (~noise[20:]).sum()


RULES = [TopN(2), TopN(2, unbiased=True), Threshold(epsilon=1.0), Threshold(epsilon=5.0, max_lost=1, unbiased=True)]


@pytest.mark.parametrize("rule", [*RULES, Threshold()])
@pytest.mark.parametrize("num_rows", [0, 1, 9])
def test_no_row_of_a_zero_gradient_is_kept(rule, num_rows):
    choose = selector(rule)
    for _ in range(2):
        ids, *_ = choose((torch.zeros(num_rows, 3),)).on_host()
        assert len(ids) == 0


@pairwise(rule=[*RULES, Threshold()], broken=[math.nan, math.inf, 1e30], among=["others", "zeros"])
def test_a_non_finite_row_is_kept_with_weight_one(rule, broken, among):
    for row in (0, 4, 8):
        dout = random_gradient(9, 3).float() if among == "others" else torch.zeros(9, 3)
        dout[row, 1] = broken
        ids, weights = chosen(rule, dout)
        assert row in ids
        assert weights is None or float(weights[ids.index(row)]) == 1.0


def test_a_large_weight_does_not_overflow_in_half_precision():
    dout = torch.full((8, 3), 2.0**-24, dtype=torch.float16)
    x = torch.ones(8, 2, dtype=torch.float16, requires_grad=True)
    keep = select_rows(torch.ones(8, dtype=torch.bool), torch.full((8,), 1e6))
    sparse_linear(x, torch.ones(3, 2, dtype=torch.float16), None, lambda douts: keep).backward(dout)
    torch.testing.assert_close(x.grad, torch.full((8, 2), 3 * 2.0**-24 * 1e6, dtype=torch.float16), rtol=1e-2, atol=0)


@pytest.mark.parametrize("rule", RULES)
def test_zero_rows_are_never_kept(rule):
    for seed in range(5):
        dout = random_gradient(40, 3, seed).float()
        ids, _ = chosen(rule, dout)
        assert ids
        assert dout[ids].ne(0).any(dim=1).all()
        assert ids == sorted(set(ids))


def sampled_gradients(rule, seed, draws):
    """Returns dX and dW of a linear layer along some directions, from each draw [draws, 18], and exact [18].

    The directions are those of the exact gradients, and random ones.
    """
    generator = torch.Generator().manual_seed(100 + seed)
    x, weight, *directions = (
        torch.randn(*size, generator=generator, dtype=torch.float64)
        for size in [(60, 5), (4, 5), (8, 60, 5), (8, 4, 5)]
    )
    dout = random_gradient(60, 4, seed)
    exact = dout @ weight, dout.T @ x
    directions = [torch.cat([one[None], others]) for one, others in zip(exact, directions, strict=True)]

    def along(gradients):
        return torch.cat([(d * g).sum(dim=(1, 2)) for d, g in zip(directions, gradients, strict=True)])

    leaves, choose = (x.requires_grad_(), weight.requires_grad_()), selector(rule)
    found = [torch.autograd.grad(sparse_linear(*leaves, None, choose), leaves, dout) for _ in range(draws)]
    return torch.stack([along(gradients) for gradients in found]), along(exact)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", [TopN(12, unbiased=True), TopN(1, unbiased=True), Threshold(epsilon=4.0, max_lost=1, unbiased=True)]
)
def test_the_mean_of_unbiased_gradients_is_exact_and_that_of_biased_ones_is_not(rule):
    seed, draws = 0, 400
    samples, exact = sampled_gradients(rule, seed, draws)
    standard_error = samples.std(dim=0) / draws**0.5
    assert standard_error.min() > 0
    # Correct means are all within 4 standard errors in 999 of 1000 cases; the seeds are fixed.
    assert ((samples.mean(dim=0) - exact).abs() / standard_error).max() <= 4
    biased = TopN(rule.n) if isinstance(rule, TopN) else Threshold(epsilon=rule.epsilon, max_lost=1)
    biased_sample, _ = sampled_gradients(biased, seed, 1)
    assert ((biased_sample[0] - exact).abs() / standard_error).max() > 8


def test_unbiased_top_n_never_exceeds_its_capacity():
    for seed in range(20):
        dout = random_gradient(301, 3, seed).float()
        for n in (1, 17, 100):
            selected = selector(TopN(n, unbiased=True, seed=seed))((dout,))
            assert len(selected.ids) == n + 1
            assert abs(int(selected.count) - n) <= 1
            energy = row_norms(dout)
            keep, _ = row_rules.draw(row_rules.water_filling(energy, n), torch.Generator().manual_seed(seed))
            assert selected.ids[: int(selected.count)].tolist() == keep.nonzero().squeeze(1).tolist()


def test_rows_beyond_the_capacity_are_reported_as_dropped():
    class ChooseTwo:
        epsilon = None

        def __call__(self, energy_N):
            return select_rows(energy_N != 0, capacity=2)

    choose = _LayerSelector(("layer",), ChooseTwo())
    dout = torch.tensor([[0.0], [1.0], [0.0], [2.0], [3.0], [1.0]])
    assert choose((dout,)).on_host()[0].tolist() == [1, 3]
    report = choose.dropped()
    assert (report.rows, report.active, report.kept) == (6, 4, 2)
    assert math.isclose(report.lost_energy, 10 / 15, rel_tol=1e-6)


def test_the_report_covers_all_passes_of_each_group_of_layers():
    layers = torch.nn.ModuleDict({"one": torch.nn.Linear(1, 2), "other": torch.nn.Linear(1, 1)})
    selection = AppliedRule(layers, TopN(2))
    assert selection.dropped() == []
    together, alone = selection.selector(layers.values()), selection.selector([layers["other"]])
    assert selection.selector(list(layers.values())) is together
    together((torch.tensor([[3.0, 0], [0, 1], [0, 0], [0, 0]]), torch.tensor([[4.0], [0], [0], [2]])))
    together((torch.zeros(5, 2), torch.ones(5, 1)))
    alone((torch.ones(1, 1),))
    first, second = selection.dropped()
    assert (first.layers, first.passes, first.rows, first.active, first.kept) == (("one", "other"), 2, 9, 8, 4)
    assert math.isclose(first.lost_energy, (1 / 30 + 3 / 5) / 2, rel_tol=1e-6)
    assert first.epsilon is None
    assert (second.layers, second.rows, second.kept, second.lost_energy) == (("other",), 1, 1, 0.0)


def test_draws_depend_on_their_seed_and_leave_torchs_random_state_unchanged():
    dout = random_gradient(60, 3)
    before = torch.get_rng_state()
    rows = {seed: [chosen(TopN(9, unbiased=True, seed=seed), dout)[0] for _ in range(2)] for seed in (1, 2)}
    assert torch.equal(before, torch.get_rng_state())
    assert rows[1][0] == rows[1][1] != rows[2][0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: TopN(0),
        lambda: TopN(-3),
        lambda: TopN(2.5),
        lambda: TopN(True),
        lambda: Threshold(epsilon=0),
        lambda: Threshold(epsilon=math.nan),
        lambda: Threshold(epsilon="1e-3"),
        lambda: Threshold(max_lost=1.5),
        lambda: Threshold(max_lost=-0.1),
        lambda: Threshold(calibration_passes=0),
    ],
)
def test_settings_out_of_range_are_refused(make):
    with pytest.raises(OptionError, match=r"got \w+=.*; expected"):
        make()


@pytest.mark.parametrize("rows", ["top_n", "", TopN, 400, None, [1, 2]])
def test_unknown_selections_are_refused_and_leave_the_model_unchanged(rows):
    model = make_llama()
    with pytest.raises(OptionError, match="expected 'exact', 'detect'"):
        sparsify(model, rows)
    assert not any("forward" in vars(layer) for layer in model.modules())


ALL_KEPT = ["exact", "detect", TopN(10**6), TopN(41), Threshold(), Threshold(epsilon=100.0, max_lost=0)]
ALL_KEPT += [TopN(10**6, unbiased=True), TopN(42, unbiased=True)]


@pytest.mark.parametrize(("rows", "has_adapter"), [*zip(ALL_KEPT, cycle([False, True]), strict=False)], ids=str)
def test_selections_that_keep_every_active_row_train_like_dense(rows, has_adapter):
    # Four texts of 11, 1, 24 and 6 tokens: 38 of 42 have a loss, and no row after the last loss row is active.
    model, batch = make_llama().double(), padded_batch(prompt=1)
    model = with_lora(model) if has_adapter else model
    dense_loss, dense = loss_and_gradients(model, batch)
    with sparsify(model, rows, keep_logits=True) as sparsified:
        loss, found = loss_and_gradients(model, batch)
        assert all(dropped.kept == dropped.active > 0 for dropped in sparsified.dropped())
        assert bool(sparsified.dropped()) == (not isinstance(rows, str))
    assert torch.equal(dense_loss, loss)
    assert_same_gradients(dense, found, 1e-10, 1e-15)


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_dropped_rows_are_reported_by_layer(reentrant):
    model, batch = make_llama().double().train(), padded_batch() | {"use_cache": False}
    if reentrant is not None:
        checkpoint_activations(model, reentrant)
    _, dense = loss_and_gradients(model, batch)
    with sparsify(model, TopN(7), keep_logits=True) as sparsified:
        _, found = loss_and_gradients(model, batch)
        layers = set(sparsified.layers)
        reports = sparsified.dropped()
    assert {name for report in reports for name in report.layers} == layers
    assert {report.kept for report in reports} == {7}
    assert {(report.passes, report.rows) for report in reports} == {(1, 4 * 24)}
    assert all(0 < report.lost_energy < 1 for report in reports if report.active > 7)
    assert any((found[name] - gradient).norm() > 0.05 * gradient.norm() for name, gradient in dense.items())


def test_lora_projections_of_one_input_share_a_selection():
    model, batch = with_lora(make_llama()), padded_batch()
    with sparsify(model, TopN(7), keep_logits=True) as sparsified:
        loss_and_gradients(model, batch)
        loss_and_gradients(model, batch)
        reports = sparsified.dropped()
    groups = {tuple(name.split(".")[-1] for name in report.layers) for report in reports}
    assert {("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("down_proj",), ("o_proj",)} <= groups
    assert {(report.passes, report.kept) for report in reports} == {(2, 14)}


def test_each_backward_pass_through_a_graph_draws_anew():
    model, batch = make_llama().double(), padded_batch()
    with sparsify(model, TopN(7, unbiased=True), keep_logits=True) as sparsified:
        loss = model(**batch).loss
        weight = model.model.layers[0].mlp.down_proj.weight
        one, other = (torch.autograd.grad(loss, weight, retain_graph=True)[0] for _ in range(2))
        assert not torch.equal(one, other)
        assert {report.passes for report in sparsified.dropped() if "layers.1" in report.layers[0]} == {2}


def test_each_layer_finds_its_own_epsilon():
    model, batch = make_llama().double(), padded_batch()
    with sparsify(model, Threshold(calibration_passes=2, max_lost=0.05), keep_logits=True) as sparsified:
        loss_and_gradients(model, batch)
        assert {report.epsilon for report in sparsified.dropped()} == {None}
        loss_and_gradients(model, batch)
        found = [report.epsilon for report in sparsified.dropped()]
        assert len(set(found)) > 1
        before = sum(report.kept for report in sparsified.dropped())
        loss_and_gradients(model, batch)
        reports = sparsified.dropped()
    assert [report.epsilon for report in reports] == found
    assert sum(report.active - report.kept for report in reports) > 0
    assert sum(report.kept for report in reports) > before
    assert all(0 <= report.lost_energy <= 0.05 / 3 + 1e-12 for report in reports)


def test_approximate_gradients_are_logged_once(caplog):
    with caplog.at_level(logging.INFO, logger="sebp_edge"):
        with sparsify(make_llama()), sparsify(make_llama(), "detect"):
            pass
        assert "approximations" not in caplog.text
        with sparsify(make_llama(), TopN(5)):
            pass
    assert caplog.text.count("approximations") == 1
    assert "TopN(n=5" in caplog.text
