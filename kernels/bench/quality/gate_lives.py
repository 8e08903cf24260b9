"""Simulates lives of adapters: how often 50 decisions of the gate replace a version by one that is worse.

    python kernels/bench/quality/gate_lives.py [--lives 1000] [--record [FILE]]

A life is a chain of adaptations on the recorded losses of `results/gate-runs.npz`. Each version has the losses of a
random adapter by document, shifted so that its true loss is known. It is an error if a version becomes active whose
true loss is more than the tolerance above the lowest true loss of a version that was active before.
"""

import argparse
import sys
from functools import cache
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

import evidence
from sebp_edge.training.comparison import t_quantile
from sebp_edge.training.gate import TOLERANCE, Life

RUNS = Path(__file__).parents[1] / "results" / "gate-runs.npz"
SOURCES = (
    "sebp_edge/training/comparison.py",
    "sebp_edge/training/gate.py",
    "kernels/bench/results/gate-runs.npz",
    __file__,
)
STEPS, FIRST = 50, 0.85  # adaptations; the first version's loss as a share of the base model's
SETTINGS = {"30 of 200": (200, 30), "7 of 50": (50, 7)}
# The share of the test documents that are others at each adaptation.
CHANGED = {"none": 0.0, "a tenth": 0.1, "all": 1.0}
# The true loss of the next version, from those of the active and of the best version.
SCENARIOS = {
    "at the tolerance": lambda draw, active, best: best * (1 + TOLERANCE + 1e-6),
    "0.5 % worse each": lambda draw, active, best: active * 1.005,
    "3 in 10 are 3 % better": lambda draw, active, best: np.where(
        draw.random(len(best)) < 0.3, best * 0.97, best * 1.021
    ),
    "random": lambda draw, active, best: best * np.exp(draw.normal(0.01, 0.02, len(best))),
}
# What a new version is compared with, beside the active one; and the level after a number of refusals.
RULES = {
    "active": (None, lambda refused: 0.985),
    "best by its measured loss": ("measured", lambda refused: 0.985),
    "best if surely no worse": ("sure", lambda refused: 0.985),
    "best by its measured loss, shared chance": ("measured", lambda refused: Life(refused=refused).level),
    "best if surely no worse, shared chance": ("sure", lambda refused: Life(refused=refused).level),
}
CHOSEN = "best if surely no worse, shared chance"


@cache
def quantiles(rule: str, documents: int) -> np.ndarray:
    return np.array([t_quantile(documents - 1, RULES[rule][1](refused)) for refused in range(STEPS + 1)])


class Runs:
    """The losses of one author's documents, and of adapters on them; each state is a run and its true loss."""

    def __init__(self, size: int, author: int):
        data = np.load(RUNS)
        chosen = (data[f"{size} author"] == author) & np.isin(data[f"{size} case"], (0, 1))
        self.nats = data[f"author {author} nats"].astype(float)
        self.gains = data[f"{size} gains"][chosen].astype(float)
        self.truths = self.gains @ self.nats / self.nats.sum()

    def losses(self, state: tuple[np.ndarray, np.ndarray], drawn: np.ndarray) -> np.ndarray:
        run, true = state
        shift = self.truths[run] - (1 - true)
        return self.nats[drawn] * (1 - self.gains[run[:, None], drawn] + shift[:, None])

    def states(self, draw, true: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return draw.integers(0, len(self.gains), len(true)), true


def compare(before: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the gain and its standard error, as `jackknife_bound` computes them."""
    total_before, total_after = before.sum(-1), after.sum(-1)
    without_one = 1 - (total_after[:, None] - after) / (total_before[:, None] - before)
    return 1 - total_after / total_before, np.sqrt(before.shape[-1] - 1) * without_one.std(-1)


def live(runs: Runs, documents: int, changed: float, scenario: str, rule: str, lives: int) -> tuple[float, float]:
    """Returns the share of lives with an error, and the mean number of versions that were accepted."""
    draw, which, table = np.random.default_rng(0), RULES[rule][0], quantiles(rule, documents)
    drawn = draw.integers(0, len(runs.nats), (lives, documents))
    active = best = runs.states(draw, np.full(lives, FIRST))
    lowest, refused, wrong, accepted = active[1], np.zeros(lives, int), np.zeros(lives, bool), 0

    def chosen(keep: np.ndarray, new: tuple, old: tuple) -> tuple:
        return tuple(np.where(keep, *pair) for pair in zip(new, old, strict=True))

    for _ in range(STEPS):
        others = draw.integers(0, len(runs.nats), drawn.shape)
        drawn = np.where(draw.random(drawn.shape) < changed, others, drawn)
        new = runs.states(draw, SCENARIOS[scenario](draw, active[1], lowest))
        after, width = runs.losses(new, drawn), table[refused]
        gain, error = compare(runs.losses(active, drawn), after)
        passes = gain - width * error >= -TOLERANCE
        if which:
            gain, error = compare(runs.losses(best, drawn), after)
            passes &= gain - width * error >= -TOLERANCE
            best = chosen(passes & (gain - (width * error if which == "sure" else 0) >= 0), new, best)
        wrong |= passes & (new[1] > lowest * (1 + TOLERANCE))
        active, refused, accepted = chosen(passes, new, active), refused + ~passes, accepted + passes.sum()
        lowest = np.where(passes, np.minimum(lowest, new[1]), lowest)
    return wrong.mean(), accepted / lives


def accepts(runs: Runs, documents: int, gain: float, rule: str, refused: int, trials: int) -> float:
    """Returns how often a version with a true gain over the active one, which is the best, is accepted."""
    draw = np.random.default_rng(1)
    drawn = draw.integers(0, len(runs.nats), (trials, documents))
    old, new = (runs.states(draw, np.full(trials, FIRST * share)) for share in (1, 1 - gain))
    found, error = compare(runs.losses(old, drawn), runs.losses(new, drawn))
    return (found - quantiles(rule, documents)[refused] * error >= -TOLERANCE).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lives", type=int, default=1000)
    evidence.add_record_option(parser)
    options = parser.parse_args()
    wrong, power = [], []
    for setting, (size, documents) in SETTINGS.items():
        authors = [Runs(size, author) for author in (0, 1)]
        for changed, share in CHANGED.items():
            for scenario in SCENARIOS:
                row = {"test documents": setting, "changed": changed, "next version": scenario}
                for rule in RULES:
                    found = [live(runs, documents, share, scenario, rule, options.lives) for runs in authors]
                    row[rule] = round(100 * max(share for share, _ in found), 1)
                    row[f"accepted, {rule}"] = round(min(number for _, number in found), 1)
                wrong.append(row)
                print(*row.values(), sep="  ", flush=True)
        for gain in (0.0, 0.02, 0.05, 0.1):
            row = {"test documents": setting, "better by": gain}
            for rule, refused in (("active", 0), (CHOSEN, 0), (CHOSEN, 4), (CHOSEN, 49)):
                found = min(accepts(runs, documents, gain, rule, refused, 5 * options.lives) for runs in authors)
                row[f"{rule}, after {refused}"] = round(100 * found, 1)
            power.append(row)
            print(*row.values(), sep="  ", flush=True)
    if options.record:
        evidence.record("gate-lives", SOURCES, wrong, options.record, on_cpu=True)
        evidence.record("gate-lives-power", SOURCES, power, options.record, on_cpu=True)


if __name__ == "__main__":
    main()
