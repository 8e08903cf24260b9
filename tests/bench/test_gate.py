"""The choice of the gate's test: what is simulated is what it says, and a wrong test would be seen."""

import csv
import json
from dataclasses import replace

import gate
import numpy as np
import pytest

import evidence
from sebp_edge.training.comparison import compare
from sebp_edge.training.evaluation import HeldOutLoss

POPULATION, JOBS = 40, 4


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A file like those of `gate_runs.py`, with random gains of about a tenth, or none at all."""
    random, arrays = np.random.default_rng(0), {}
    cases = [gate.OWN, gate.TENTH, "rate 1e-9"]
    for author in range(2):
        arrays[f"author {author} nats"] = random.lognormal(6, 0.5, POPULATION)
    rows = [
        (case, author, job, seed) for case in range(3) for author in range(2) for job in range(JOBS) for seed in (0, 1)
    ]
    for size in (6, 13, 50, 200):
        columns = np.array(rows).T
        number = size if size in gate.FOLDS else POPULATION
        gains = random.normal(0.1, 0.03, (len(rows), number)) * (columns[0] < 2)[:, None]
        named = zip(("case", "author", "subset", "seed"), columns, strict=True)
        arrays |= {f"{size} {name}": column for name, column in named} | {f"{size} gains": gains}
        arrays[f"{size} subset"] = columns[2] + JOBS * columns[1] + 2 * JOBS * columns[0]
        if size in gate.FOLDS:
            arrays[f"{size} documents"] = np.array([random.permutation(POPULATION)[:size] for _ in rows])
            arrays[f"{size} truths"] = np.full((len(rows), 3), 0.1) * (columns[0] < 2)[:, None]
    path = tmp_path_factory.mktemp("runs") / "runs.npz"
    np.savez(path, names=["one", "two"], cases=cases, **arrays)
    return path


@pytest.fixture(scope="module")
def runs(file):
    return gate.load(file)


def normal_trials(count=4000, size=13, gain=0.0):
    random = np.random.default_rng(1)
    before = np.full((count, size), 100.0)
    return before, before * (gain + random.normal(0, 0.03, (count, size)))


@pytest.mark.parametrize("test", gate.TESTS)
def test_every_candidate_is_wrong_about_as_often_as_it_says_for_normal_differences(test):
    folds = tuple(np.repeat(np.arange(3), gate.FOLDS[13]).tolist())
    before, saved = normal_trials(gain=gate.MARGIN)
    assert 0.0 < gate.TESTS[test](before, saved, gate.MARGIN, folds).mean() < 0.085
    before, saved = normal_trials(gain=gate.MARGIN + 0.1)
    assert gate.TESTS[test](before, saved, gate.MARGIN, folds).mean() > 0.95


def test_the_chosen_candidate_is_the_gates():
    random = np.random.default_rng(2)
    before = random.lognormal(6, 1, (20, 7))
    after = before * (1 - random.normal(0.03, 0.03, (20, 7)))
    documents = {document: document for document in range(7)}
    tokens = dict.fromkeys(documents, 100)
    lower = [
        compare(*(HeldOutLoss(dict(enumerate(nats)), tokens) for nats in pair), documents).lower
        for pair in zip(before.tolist(), after.tolist(), strict=True)
    ]
    found = gate.TESTS[gate.CHOSEN](before, before - after, gate.MARGIN, None)
    assert found.tolist() == [bound >= gate.MARGIN for bound in lower]
    assert 0 < found.sum() < 20


def test_recentring_gives_the_population_the_true_gain(runs, monkeypatch):
    monkeypatch.setitem(gate.SETTINGS, "everything", (50, None))
    kinds = gate.between_versions(runs[50], "everything", 1)
    for trials in (gate.against_base(runs[50], "everything", 1, gate.ADAPTERS), *kinds["worse"], *kinds["better"]):
        for way in trials.ways:
            for true_gain in (gate.MARGIN, -0.02):
                saved = trials.saved(true_gain, way)
                assert saved.sum(-1) / trials.before.sum(-1) == pytest.approx(np.full(len(saved), true_gain))


def test_pairs_are_of_one_author_and_of_what_their_name_says(runs):
    seeds = gate.between_seeds(runs[50], "7 of 50", 3)
    # Two authors, four jobs and two orders, at each of the two rates.
    assert seeds.before.shape == (2 * JOBS * 2 * 2 * 3, 7)
    own = runs[50].pairs((gate.OWN, gate.TENTH), lambda one, other: True)
    assert len(own) == 2 * (2 * JOBS) ** 2
    assert all(runs[50].authors[one] == runs[50].authors[other] for one, other in own)


def test_jobs_are_the_units_of_a_rate():
    accepted, jobs = np.array([1, 1, 1, 1, 0, 0]), np.array([0, 0, 0, 0, 1, 2])
    assert gate.clustered(accepted, jobs) == pytest.approx((1 / 3, 1 / 3, 3))


def test_an_unfinished_correction_would_be_seen(runs):
    """Twice the variance within jobs, as if all documents came twice, doubles the rate of a test that ignores it."""
    trials = gate.against_base(runs[50], "13 drawn", 200, gate.ADAPTERS)
    twice = replace(trials, before=np.tile(trials.before, 2), gains=np.tile(trials.gains, 2))
    one, two = (
        np.mean([row["rate"] for row in gate.rates(gate.CHOSEN, each, gate.MARGIN, gate.MARGIN)])
        for each in (trials, twice)
    )
    assert two > 2 * one


def test_main_records_three_tables(file, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "sys.argv", ["gate.py", "--runs", str(file), "--draws", "1", "--record", str(tmp_path / "r.json")]
    )
    monkeypatch.setattr(gate, "RESAMPLES", 20)
    gate.main()
    found = {
        name: list(csv.DictReader((tmp_path / entry["table"]).read_text().splitlines()))
        for name, entry in json.loads((tmp_path / "r.json").read_text()).items()
    }
    assert set(found) == {"gate-base", "gate-active", "gate-verdicts"}
    assert {row["setting"] for row in found["gate-base"]} == set(gate.SETTINGS)
    assert {row["test"] for row in found["gate-base"]} == set(gate.TESTS)
    nulls = [row for row in found["gate-verdicts"] if row["case"] == "rate 1e-9"]
    assert len(nulls) == 8
    assert {row["kept"] for row in nulls} == {"0"}


def test_in_the_recorded_results_the_gate_keeps_its_promise():
    def recorded(name):
        return list(csv.DictReader((evidence.RESULTS.parent / "results" / f"{name}.csv").read_text().splitlines()))

    at_margin = [
        row
        for row in recorded("gate-base")
        if (row["test"], row["noise"], row["true_gain"]) == (gate.CHOSEN, "adapter", str(gate.MARGIN))
    ]
    assert len(at_margin) == len(gate.SETTINGS)
    assert all(float(row["rate"]) <= 0.05 for row in at_margin)
    nulls = [row for row in recorded("gate-verdicts") if float(row["true_gain"]) < gate.MARGIN / 2]
    assert {row["case"] for row in nulls} >= {"rate 1e-9", "rate 1e-6", "shuffled words"}
    assert {row["kept"] for row in nulls} == {"0"}
