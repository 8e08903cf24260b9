"""Simulates how often the gate finds a small gain, with one split of the documents and with folds.

    python kernels/bench/quality/gate_power.py [--draws 100] [--record [FILE]]

The losses are those of `gate-runs.npz`: of adapters trained on 38 notes each, on 250 notes that none of them has seen,
by two authors. A trial draws the test documents and recentres the differences, so that the true gain is known: a
constant is added to the relative gain of every document ("added"), or it is multiplied by one ("scaled"). With folds,
either one adapter stands for the states of all folds, or each fold has another one; the truth lies between.

A state of a fold is trained on fewer documents than that of the split, so that it gains less: by a power of their
number, fitted to the runs with 4 and with 38. The true gain is that of the split's state; where the keeps at the margin
are counted, it is that of the judged states themselves.
"""

import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from sebp_edge.engine.training.comparison import jackknife_bound, t_quantile

RUNS = evidence.RESULTS.parent / "results" / "gate-runs.npz"
SOURCES = ("sebp_edge/engine/training/comparison.py", RUNS, __file__)
CASES = ("own", "own, a tenth of the rate")
MARGIN, GAINS = 0.01, (0.02, 0.03, 0.05)
# Documents that the runs were trained on: a third of 13, and 50 without those of the other splits.
TRAINED = {"13": 13 / 3, "50": 38}


class Plan(NamedTuple):
    """How many documents each state is trained on and tested with; `states` is 1 for a split."""

    documents: int
    states: int
    trained: int
    tested: int

    @property
    def name(self) -> str:
        return "split" if self.states == 1 else f"{self.states} folds"


def plans() -> Iterator[Plan]:
    for documents in (20, 40, 70, 100, 150):
        test, validation = max(5, documents * 15 // 100), max(4, documents // 10)
        yield Plan(documents, 1, documents - test - validation, test)
        for folds in (3, 4, 5, 6, 8):
            held_out = documents / folds
            yield Plan(documents, folds, round(documents - 2 * held_out), round(held_out))


def main(arguments: list[str] | None = None) -> None:
    parser = evidence.parser(__doc__)
    parser.add_argument("--draws", type=int, default=100, help="trials of each adapter")
    options = parser.parse_args(arguments)
    rows = [evidence.show(row) for row in measured(options.draws)]
    evidence.record("gate-power", SOURCES, rows, options.record, on_cpu=True)


def measured(draws: int) -> Iterator[dict]:
    data = dict(np.load(RUNS))
    power = exponent(data)
    for plan in plans():
        split = next(each for each in plans() if each.documents == plan.documents)
        kept = (plan.trained / split.trained) ** power
        for name, test in TESTS.items():
            if name != CHOSEN and plan.documents != 40:
                continue
            row = {"test": name, **plan._asdict(), "plan": plan.name, "share_of_gain": kept}
            for gain in (MARGIN, *GAINS):
                judged = gain if gain == MARGIN else gain * kept
                rates = [rate for _, rate in passed(data, plan, test, judged, draws)]
                row |= {f"mean_at_{gain:.0%}": np.mean(rates), f"least_at_{gain:.0%}": min(rates)}
                row[f"most_at_{gain:.0%}"] = max(rates)
            yield row


def exponent(data: dict[str, np.ndarray]) -> float:
    """Returns by which power of the number of trained documents the gain rises, on average over the authors."""
    found = []
    for author in (0, 1):
        nats = data[f"author {author} nats"].astype(float)
        own = data["13 author"] == author, data["50 author"] == author
        few, many = (
            mine & (data["cases"][data[f"{size} case"]] == "own") for size, mine in zip(TRAINED, own, strict=True)
        )
        gains = data["13 truths"][few].mean(), (data["50 gains"][many].astype(float) @ nats / nats.sum()).mean()
        found.append(np.log(gains[1] / gains[0]) / np.log(TRAINED["50"] / TRAINED["13"]))
    return float(np.mean(found))


def passed(data, plan: Plan, test: Callable, gain: float, draws: int) -> Iterator[tuple[tuple, float]]:
    """Yields how often a version of this true gain passes: by author, adapters, way to recentre, and states."""
    for author in (0, 1):
        nats = data[f"author {author} nats"].astype(float)
        for case in CASES:
            mine = (data["50 author"] == author) & (data["cases"][data["50 case"]] == case)
            gains = data["50 gains"][mine].astype(float)
            if not len(gains):  # one author has none at a tenth of the rate
                continue
            for way in ("added", "scaled"):
                for kind in ("one state", "other states") if plan.states > 1 else ("one state",):
                    trials = _trials(nats, gains, plan, gain, way, kind, draws)
                    yield (author, case, way, kind), float(test(*trials).mean())


def _trials(nats, gains, plan: Plan, gain: float, way: str, kind: str, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws trials for each adapter; returns the nats of the test documents before and after, [trials, documents]."""
    order = np.random.default_rng(0)
    number, size = len(gains) * draws, plan.documents if plan.states > 1 else plan.tested
    chosen = order.integers(0, len(nats), (number, size))
    state = np.repeat(np.arange(len(gains)), draws)[:, None]
    if kind == "other states":
        fold = np.arange(size) % plan.states
        state = order.integers(0, len(gains), (number, plan.states))[:, fold]
    truths = gains @ nats / nats.sum()
    relative, truth = gains[state, chosen], truths[state]
    truth = np.broadcast_to(truth, relative.shape).mean(-1, keepdims=True)
    relative = relative - truth + gain if way == "added" else relative * gain / truth
    before = nats[chosen]
    return before, before * (1 - relative)


@cache
def _quantile(freedom: int, level: float) -> float:
    return t_quantile(freedom, level)


def jackknife(level: float) -> Callable:
    return lambda before, after: jackknife_bound(before, after, level) >= MARGIN


def differences(before, after, level: float) -> np.ndarray:
    """A t-test of what remains of each document's gain, in nats, after subtraction of the margin."""
    rest, size = before * (1 - MARGIN) - after, before.shape[-1]
    return rest.mean(-1) >= _quantile(size - 1, level) * rest.std(-1, ddof=1) / np.sqrt(size)


def sign_flips(before, after) -> np.ndarray:
    """The share of 1,000 random signs of what remains whose sum is as large, at most a twentieth."""
    rest, order = before * (1 - MARGIN) - after, np.random.default_rng(0)
    signs = order.choice(np.float32([-1, 1]), (1000, before.shape[-1]))
    totals = rest.astype(np.float32) @ signs.T
    return (totals >= rest.sum(-1, keepdims=True)).mean(-1) <= 0.05


CHOSEN = "jackknife, t at 98.5 %"
TESTS = {
    CHOSEN: jackknife(0.985),
    "jackknife, t at 97.5 %": jackknife(0.975),
    "jackknife, t at 95 %": jackknife(0.95),
    "differences, t at 97.5 %": partial(differences, level=0.975),
    "sign flips": sign_flips,
}


if __name__ == "__main__":
    main()
