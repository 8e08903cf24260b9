"""Rules of rows, each against its definition written out; what is dropped is reported."""

import math

import pytest
import torch
from pairwise import pairwise
from random_cases import chosen, random_energy, selector

from sebp_edge.ops import row_norms, select_rows
from sebp_edge.research import Energy, Threshold, TopN
from sebp_edge.research.rules import row_rules
from sebp_edge.research.rules.selection import AppliedRule, _LayerSelector

SIZES = [1, 7, 130]


@pairwise(num_rows=SIZES, n=[1, 3, 64, 1000], ties=[False, True])
def test_top_n_keeps_the_largest_rows_and_the_first_of_equal_ones(num_rows, n, ties):
    energy = random_energy(num_rows, seed=n)
    energy = energy.log10().round().clamp(min=0) if ties else energy
    order = sorted(range(num_rows), key=lambda row: -float(energy[row]))
    expected = sorted(row for row in order[:n] if energy[row] > 0)
    assert row_rules.largest(energy, n).nonzero().squeeze(1).tolist() == expected
    assert chosen(TopN(n), energy.sqrt()[:, None]) == expected


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


@pytest.mark.parametrize("num_rows", SIZES)
@pytest.mark.parametrize("share", [0.5, 0.99])
def test_num_top_rows_is_the_fewest_rows_with_a_share_of_the_energy(num_rows, share):
    energy = random_energy(num_rows, num_rows + 1, 2.0).double()
    largest, total, expected = sorted(energy.tolist(), reverse=True), 0.0, 0
    while total < share * sum(largest):
        total, expected = total + largest[expected], expected + 1
    assert int(row_rules.num_top_rows(energy, share)) == expected
    assert int(row_rules.num_top_rows(torch.zeros(num_rows), share)) == 0


def plain_threshold(energy, epsilon, max_lost):
    """Returns the kept rows, by a loop from the smallest row up."""
    active = sorted((float(value), row) for row, value in enumerate(energy) if value > 0)
    bound = epsilon * active[(len(active) - 1) // 2][0] ** 0.5 if active else 0.0
    total, lost, kept = sum(value for value, _ in active), 0.0, []
    for value, row in active:
        lost += value
        if value**0.5 >= bound or lost > max_lost * total:
            kept.append(row)
    return sorted(kept)


@pairwise(num_rows=SIZES, epsilon=[1e-3, 0.5, 1.0, 30.0], max_lost=[0, 1e-6, 1e-3, 0.2, 1])
def test_the_threshold_keeps_rows_above_it_and_enough_of_the_energy(num_rows, epsilon, max_lost):
    energy = random_energy(num_rows, seed=num_rows)
    expected = plain_threshold(energy, epsilon, max_lost)
    keep = row_rules.above_threshold(energy, epsilon, max_lost)
    assert keep.nonzero().squeeze(1).tolist() == expected
    assert float(row_rules.lost_share(energy, keep)) <= max_lost * (1 + 1e-12)
    ids = chosen(Threshold(epsilon=epsilon, max_lost=max_lost), energy.sqrt()[:, None])
    assert ids == expected


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


def test_rows_beyond_the_capacity_are_reported_as_dropped():
    class TwoSelector(_LayerSelector):
        def _choose(self, energy_N):
            return select_rows(energy_N != 0, capacity=2)

    choose = TwoSelector(("layer",), rule=None)
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
