"""The tables of the N:M paper's claims: verdicts follow from intervals, and nothing is shown before it is recorded."""

import math

import pytest

import nm_tables
from nm_tables import Interval

DECAYING = ("mdgf-linear", "mdgf-exponential", "sdgf-stepwise")


def row(method, pattern, seed, loss, accuracy, variance):
    methods = {"dense": (1.0, 1.0, 0.0), "sr-ste": (0.5, 0.4, 1.0)}
    training, inference, sparse_share = methods.get(method, (0.8, 0.3, 0.4))
    found = {"method": method, "pattern": pattern, "seed": seed, "steps": 20, "learning_rate": 1e-3}
    found |= {"loss": loss, "accuracy": accuracy, "training": training, "inference": inference}
    found |= {"sparse_share": sparse_share, "shrinkage": 1e-4}
    return found | {f"variance_{part}": variance for part in range(nm_tables.PARTS)}


@pytest.fixture
def recorded(monkeypatch):
    """Records runs of "digits", whose accuracies and variances a test sets by method; others are not recorded."""

    def record(accuracy, variance, spread=0.001):
        found = [row("dense", None, seed, 0.1, 0.95 + spread * seed, 1.0) for seed in range(3)]
        for method in ("sr-ste", *DECAYING):
            for pattern in ("2:4", "1:16"):
                for seed in range(3):
                    key = (method, pattern)
                    noisy = 0.01 * seed * (method == "sr-ste")
                    right = accuracy.get(key, 0.9) + spread * seed * (1 + noisy)
                    found.append(row(*key, seed, 1 - right, right, variance.get(key, 1.0) * (1 + noisy)))
        monkeypatch.setattr(nm_tables, "rows", lambda name: found)
        monkeypatch.setattr(nm_tables, "index", lambda: {"nm-quality-digits": {}})
        monkeypatch.setattr(nm_tables, "recorded", lambda name: f"Recorded: {name}.")

    return record


def verdicts():
    lines = [line.strip("| ").split(" | ") for line in nm_tables.claims().splitlines()[2:]]
    return [line[-1] for line in lines]


def test_intervals_are_students():
    interval = Interval.of([1.0, 2.0, 3.0])
    assert interval == pytest.approx((2.0, 4.303 / math.sqrt(3)), rel=1e-4)
    assert interval.said("+.1f") == "+2.0 ± 2.5" and interval.verdict == "not shown"
    assert Interval.of([1.0, 1.01, 1.02]).verdict == "confirmed"
    assert Interval.of([-1.0, -1.01, -1.02]).verdict == "contradicted"
    assert Interval.of([1.0]).verdict == "not shown"


def test_claims_are_confirmed_if_the_papers_methods_are_better(recorded):
    better = {(method, "1:16"): 0.95 for method in DECAYING}
    recorded(better, {("sr-ste", "1:16"): 2.0})
    assert verdicts() == ["confirmed"] * 5 + ["contradicted", "confirmed"]
    # At 2:4 and 1:16 they cost 0.8 of dense, SR-STE half.
    assert "at best -60 %, by mdgf-exponential 1:16 instead of SR-STE" in nm_tables.claims()
    assert "at 25 % fewer inference FLOPs" in nm_tables.claims()


def test_claims_are_contradicted_if_they_are_worse(recorded):
    worse = {(method, pattern): 0.85 for method in DECAYING for pattern in ("2:4", "1:16")}
    recorded(worse, {("sr-ste", "1:16"): 0.5})
    assert verdicts() == ["contradicted"] * 7
    assert "no run is as good as one by SR-STE" in nm_tables.claims()


def test_cells_have_means_and_intervals(recorded):
    recorded({("mdgf-linear", "1:16"): 0.93}, {("sr-ste", "2:4"): 3.0})
    lines = nm_tables.quality("digits").splitlines()
    assert lines[0] == "| loss, accuracy in % | 2:4 | 1:16 |"
    assert lines[2] == "| dense | 0.100 ± 0.000, 95.1 ± 0.2 | |"
    assert "| training FLOPs, MdGf and SdGf | 80 % | 80 % |" in lines
    assert "SR-STE's term takes 0.01 % of a pruned weight in all" in lines[-1]
    assert "| digits | mdgf-linear | " in nm_tables.gains() and "| +3.0 ± 0.0 * |" in nm_tables.gains()
    assert "| digits | sr-ste / dense | 3.03 (2.96 to 3.11); 3.03 (2.96 to 3.11) |" in nm_tables.noise()


def test_nothing_is_shown_before_it_is_recorded(monkeypatch):
    monkeypatch.setattr(nm_tables, "index", dict)
    assert {table() for table in nm_tables.TABLES.values()} == {"Not recorded yet."}
