"""Chooses the gate's test: the errors and the power of candidates, from the runs that `gate_runs.py` has recorded.

    python kernels/bench/gate.py [--runs FILE.npz] [--draws 100] [--record [FILE]]

A candidate decides from the losses of test documents whether a gain is at least a bound: the margin over the base
model, or minus the tolerance over the active version. The differences between the losses of two trained models, or of
one and the base model, are real. They are recentred so that the true gain is known:

    added       a constant is added to the relative gain of every document
    scaled      the relative gain of every document is multiplied by a constant

Below FOLDS_BELOW documents a trial is a whole run in folds, with its own test documents. Above, the test documents are
drawn from the population with replacement, --draws times for each run. A rate is the mean over jobs, and its standard
error is that between jobs; the worst of the two authors and the two ways to recentre is recorded.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import NormalDist

import numpy as np

import evidence
from sebp_edge.training.comparison import jackknife_bound, t_quantile

RUNS = evidence.RESULTS.parent / "results" / "gate-runs.npz"
SOURCES = ("sebp_edge/training/comparison.py", "kernels/bench/results/gate-runs.npz", __file__)

OWN, TENTH = ADAPTERS = "own", "own, a tenth of the rate"
MARGIN = 0.01
TRUE_GAINS = (0.02, 0.05, 0.1)
TOLERANCES = (0.01, 0.02, 0.03, 0.05)
# True gains over the active version, beside minus the tolerance.
GAINS_OVER_ACTIVE = (0.0, 0.02, 0.05)
CONFIDENCE = 0.95
RESAMPLES = 400
# The documents of each fold; those of a run are in this order.
FOLDS = {6: (2, 2, 2), 13: (5, 4, 4)}
# The runs, by their size, and the number of test documents that are drawn for them; None for those in folds.
SETTINGS = {
    "6 in folds": (6, None),
    "13 in folds": (13, None),
    "6 drawn": (50, 6),
    "13 drawn": (50, 13),
    "5 of 20": (50, 5),
    "7 of 50": (50, 7),
    "30 of 200": (200, 30),
}
# Makes the sizes of documents more unequal.
SIZE_POWER = 1.5


# ----------------------------------------------------------------------------------------------------------- candidates


@cache
def quantile(freedom: float, level: float = CONFIDENCE) -> float:
    return t_quantile(freedom, level)


def ratio(freedom: Callable[[int], float], level: float = CONFIDENCE) -> Callable:
    """The gain's linearised standard error."""

    def accepts(before, saved, bound, folds):
        gain, error = _linearised(before, saved)
        return gain - quantile(freedom(before.shape[-1]), level) * error >= bound

    return accepts


def differences(level: float = CONFIDENCE) -> Callable:
    """A t-test of what remains of each document's gain, in nats, after subtraction of the bound."""

    def accepts(before, saved, bound, folds):
        rest, size = saved - bound * before, before.shape[-1]
        return rest.mean(-1) >= quantile(size - 1, level) * rest.std(-1, ddof=1) / np.sqrt(size)

    return accepts


def jackknife(level: float) -> Callable:
    return lambda before, saved, bound, folds: jackknife_bound(before, before - saved, level) >= bound


def johnson(before, saved, bound, folds):
    """The t-test of the differences, with Johnson's correction for skew."""
    rest, size = saved - bound * before, before.shape[-1]
    mean, variance = rest.mean(-1), rest.var(-1, ddof=1)
    third = ((rest - mean[:, None]) ** 3).mean(-1)
    corrected = mean + third / (6 * variance * size) + third * mean**2 / (3 * variance**2)
    return corrected >= quantile(size - 1) * np.sqrt(variance / size)


def studentised_bootstrap(before, saved, bound, folds):
    chosen = _resamples(before.shape[-1])
    accepted = []
    for before_part, saved_part in _parts(before, saved):
        gain, error = _linearised(before_part, saved_part)
        gains, errors = _linearised(before_part[:, chosen], saved_part[:, chosen])
        statistics = np.nan_to_num((gains - gain[:, None]) / errors, nan=0.0)
        accepted.append(gain - np.quantile(statistics, CONFIDENCE, axis=-1) * error >= bound)
    return np.concatenate(accepted)


def bca(before, saved, bound, folds):
    """The bootstrap with bias correction and acceleration; decides by the level that the bound has."""
    chosen = _resamples(before.shape[-1])
    accepted = []
    for before_part, saved_part in _parts(before, saved):
        gain = saved_part.sum(-1) / before_part.sum(-1)
        gains = saved_part[:, chosen].sum(-1) / before_part[:, chosen].sum(-1)
        total, other = before_part.sum(-1, keepdims=True), saved_part.sum(-1, keepdims=True)
        without_one = (other - saved_part) / (total - before_part)
        influence = without_one.mean(-1, keepdims=True) - without_one
        acceleration = (influence**3).sum(-1) / (6 * (influence**2).sum(-1) ** 1.5)
        bias = _normal_quantile((gains < gain[:, None]).mean(-1))
        # The level at which the bound is the lower end, by solving the usual formula for it.
        z = _normal_quantile((gains < bound).mean(-1)) - bias
        accepted.append(z / (1 + acceleration * z) - bias <= NormalDist().inv_cdf(1 - CONFIDENCE))
    return np.concatenate(accepted)


def sign_flips(before, saved, bound, folds):
    rest, size = saved - bound * before, before.shape[-1]
    if size <= 8:
        signs = 1.0 - 2.0 * (np.arange(2**size)[:, None] >> np.arange(size) & 1)
    else:
        signs = np.random.default_rng(0).choice([-1.0, 1.0], (1000, size))
        signs[0] = 1.0
    totals = rest @ signs.T
    return (totals >= rest.sum(-1, keepdims=True) * (1 - 1e-9)).mean(-1) <= 1 - CONFIDENCE


def folds_as_units(before, saved, bound, folds):
    if folds is None:
        return None
    return ratio(lambda size: size - 1)(_of_folds(before, folds), _of_folds(saved, folds), bound, None)


def nadeau_and_bengio(before, saved, bound, folds):
    """The variance of documents, with the term for training sets that share documents; a third of them is tested."""
    if folds is None:
        return None
    gain, error = _linearised(before, saved)
    num_folds, tested_per_trained = max(folds) + 1, 0.5
    return gain - quantile(before.shape[-1] - 1) * error * np.sqrt(1 + num_folds * tested_per_trained) >= bound


def _linearised(before, saved):
    """Returns the gain and its linearised standard error."""
    size, total = before.shape[-1], before.sum(-1)
    gain = saved.sum(-1) / total
    residuals = saved - gain[..., None] * before
    return gain, np.sqrt((residuals**2).sum(-1) * size / (size - 1)) / total


def _of_folds(nats, folds):
    return nats @ np.eye(max(folds) + 1)[list(folds)]


def _resamples(size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, size, (RESAMPLES, size))


def _parts(before, saved) -> Iterator[tuple]:
    """A few hundred trials at a time, for the resamples of more would fill the memory."""
    for start in range(0, len(before), 500):
        yield before[start : start + 500], saved[start : start + 500]


def _normal_quantile(shares: np.ndarray) -> np.ndarray:
    least = 0.5 / RESAMPLES
    counts = np.arange(RESAMPLES + 1) / RESAMPLES
    table = [NormalDist().inv_cdf(min(max(share, least), 1 - least)) for share in counts]
    return np.interp(shares, counts, table)


CHOSEN = "jackknife, t at 97.5 %"
# Each returns whether the gain is at least `bound`, for each row of nats; None if it needs folds and there are none.
TESTS: dict[str, Callable] = {
    "ratio, normal": ratio(lambda size: 1e6),
    "ratio, t": ratio(lambda size: size - 1),
    "ratio, t, half the degrees of freedom": ratio(lambda size: (size - 1) / 2),
    "ratio, t at 97.5 %": ratio(lambda size: size - 1, 0.975),
    "ratio, t at 98 %": ratio(lambda size: size - 1, 0.98),
    "differences, t": differences(),
    "differences, t at 97.5 %": differences(0.975),
    "differences, Johnson's t": johnson,
    "jackknife, t": jackknife(0.95),
    CHOSEN: jackknife(0.975),
    "studentised bootstrap": studentised_bootstrap,
    "BCa bootstrap": bca,
    "sign flips": sign_flips,
    "folds as units, t": folds_as_units,
    "ratio, t, Nadeau and Bengio": nadeau_and_bengio,
}
# Those that are tried against the active version.
RIVALS = (CHOSEN, "ratio, t", "ratio, t at 98 %")


# --------------------------------------------------------------------------------------------------------------- trials


@dataclass(frozen=True)
class Trials:
    """Comparisons of two models; each row is one.

    Attributes:
        noise: where the differences come from.
        setting: the documents, and those that are tested with; a key of SETTINGS.
        ways: how the differences can be recentred.
        before: nats of the first model, [trials, documents].
        gains: relative gains of the second model, [trials, documents].
        truths: its true relative gains, [trials].
        authors, jobs: of the runs, [trials].
        folds: the fold of each document, [documents]; None without folds.
    """

    noise: str
    setting: str
    ways: tuple[str, ...]
    before: np.ndarray
    gains: np.ndarray
    truths: np.ndarray
    authors: np.ndarray
    jobs: np.ndarray
    folds: tuple[int, ...] | None

    def saved(self, true_gain: float, way: str) -> np.ndarray:
        """The nats that the second model saves, recentred to a true gain."""
        if way == "added":
            return self.before * (self.gains - self.truths[:, None] + true_gain)
        return self.before * self.gains * (true_gain / self.truths)[:, None]


@dataclass(frozen=True)
class Runs:
    """The runs of one size, from the file.

    Attributes:
        nats: of the base model, [runs, documents].
        gains: [runs, documents]; with folds, of their test documents, else of the population.
        truths: the true gain of each run; with folds, the mean of theirs by the nats of their test documents.
        folds: the fold of each document; None without folds.
    """

    cases: np.ndarray
    authors: np.ndarray
    jobs: np.ndarray
    seeds: np.ndarray
    nats: np.ndarray
    gains: np.ndarray
    truths: np.ndarray
    folds: tuple[int, ...] | None

    def where(self, *cases: str) -> np.ndarray:
        return np.flatnonzero(np.isin(self.cases, cases))

    def pairs(self, cases: tuple[str, str], related: Callable[[int, int], bool]) -> list[tuple[int, int]]:
        """Pairs of runs with one author, of the first and of the second case."""
        return [
            (one, other)
            for one in self.where(cases[0])
            for other in self.where(cases[1])
            if self.authors[one] == self.authors[other] and related(one, other)
        ]


def load(file: Path) -> dict[int, Runs]:
    data = np.load(file)
    nats = [data[f"author {author} nats"].astype(float) for author in range(len(data["names"]))]
    found = {}
    for size in {size for size, _ in SETTINGS.values()}:
        column = {name: data[f"{size} {name}"] for name in ("case", "author", "subset", "seed", "gains")}
        authors, gains = column["author"], column["gains"].astype(float)
        documents = data[f"{size} documents"] if size in FOLDS else np.tile(np.arange(len(nats[0])), (len(gains), 1))
        before = np.stack([nats[author][chosen] for author, chosen in zip(authors, documents, strict=True)])
        if size in FOLDS:
            folds = tuple(np.repeat(np.arange(len(FOLDS[size])), FOLDS[size]).tolist())
            truths = (_of_folds(before, folds) * data[f"{size} truths"]).sum(-1) / before.sum(-1)
        else:
            truths, folds = (before * gains).sum(-1) / before.sum(-1), None
        cases = data["cases"][column["case"]]
        found[size] = Runs(cases, authors, column["subset"], column["seed"], before, gains, truths, folds)
    return found


def against_base(runs: Runs, setting: str, draws: int, cases: tuple[str, ...]) -> Trials:
    chosen = runs.where(*cases)
    return _trials("adapter", setting, ("added", "scaled"), runs, draws, [(None, each) for each in chosen])


def of_unequal_sizes(runs: Runs, setting: str, draws: int) -> list[Trials]:
    """The adapters against the base model if the documents' sizes differed more; nothing with folds.

    The true gains of folds are recorded for the documents as they are.
    """
    if runs.folds:
        return []
    nats = runs.nats**SIZE_POWER
    stretched = replace(runs, nats=nats, truths=(nats * runs.gains).sum(-1) / nats.sum(-1))
    return [replace(against_base(stretched, setting, draws, ADAPTERS), noise="adapter, unequal sizes")]


def between_seeds(runs: Runs, setting: str, draws: int) -> Trials:
    pairs = [
        pair
        for case in ADAPTERS
        for pair in runs.pairs((case, case), lambda one, other: one != other and runs.jobs[one] == runs.jobs[other])
    ]
    return _trials("other seed", setting, ("added",), runs, draws, pairs)


def between_versions(runs: Runs, setting: str, draws: int) -> dict[str, list[Trials]]:
    """Trials of a new version against the active one: those that are worse, equally good, and better by recentring."""
    seeds, ways = between_seeds(runs, setting, draws), ("added", "scaled")
    if runs.folds:
        # The runs in folds share test documents with the base model only, which is the extreme of a weak version.
        own = runs.where(OWN)
        weaker = _trials("base", setting, ways, runs, draws, [(each, None) for each in own])
        stronger = _trials("base", setting, ways, runs, draws, [(None, each) for each in own])
        return {"worse": [seeds, weaker], "equal": [seeds], "better": [seeds, stronger]}

    def with_one_seed(one: int, other: int) -> bool:
        return runs.seeds[one] == runs.seeds[other] and runs.jobs[one] != runs.jobs[other]

    notes = _trials("other notes", setting, ("added",), runs, draws, runs.pairs((OWN, OWN), with_one_seed))
    weaker = _trials("tenth rate", setting, ways, runs, draws, runs.pairs((OWN, TENTH), with_one_seed))
    stronger = _trials("tenth rate", setting, ways, runs, draws, runs.pairs((TENTH, OWN), with_one_seed))
    return {"worse": [seeds, notes, weaker], "equal": [seeds, notes], "better": [seeds, notes, stronger]}


def _trials(noise: str, setting: str, ways: tuple[str, ...], runs: Runs, draws: int, pairs: list[tuple]) -> Trials:
    """Trials of pairs of runs, the first of which may be the base model, or the second."""

    def kept(each: int | None, like: int) -> tuple[np.ndarray, float]:
        """The shares of the base model's nats that remain, and of their true sum."""
        size = runs.gains.shape[-1]
        return (np.ones(size), 1.0) if each is None else (1 - runs.gains[each], 1 - runs.truths[each])

    before, gains, truths, named = [], [], [], []
    for one, other in pairs:
        run = one if other is None else other
        (first, first_truth), (second, second_truth) = kept(one, run), kept(other, run)
        before.append(runs.nats[run] * first)
        gains.append(1 - second / first)
        truths.append(1 - second_truth / first_truth)
        named.append(run)
    before, gains, truths, named = np.array(before), np.array(gains), np.array(truths), np.array(named)
    tested = SETTINGS[setting][1]
    if tested:
        shape = len(before), draws, tested
        drawn = np.random.default_rng(0).integers(0, before.shape[-1], shape).reshape(len(before), -1)
        before, gains = (np.take_along_axis(each, drawn, axis=-1).reshape(-1, tested) for each in (before, gains))
        truths, named = truths.repeat(draws), named.repeat(draws)
    return Trials(noise, setting, ways, before, gains, truths, runs.authors[named], runs.jobs[named], runs.folds)


# ---------------------------------------------------------------------------------------------------------------- rates


def rates(test: str, trials: Trials, true_gain: float, bound: float) -> Iterator[dict]:
    """How often a test accepts, for each author and each way to recentre."""
    for way in trials.ways:
        with np.errstate(all="ignore"):
            accepted = TESTS[test](trials.before, trials.saved(true_gain, way), bound, trials.folds)
        if accepted is None:
            return
        for author in np.unique(trials.authors):
            of_author = trials.authors == author
            rate, error, count = clustered(accepted[of_author], trials.jobs[of_author])
            yield {
                "test": test,
                "setting": trials.setting,
                "noise": trials.noise,
                "bound": bound,
                "true_gain": true_gain,
                "rate": round(rate, 4),
                "error": round(error, 4),
                "jobs": count,
                "author": int(author),
                "recentred": way,
            }


def clustered(accepted: np.ndarray, jobs: np.ndarray) -> tuple[float, float, int]:
    """The mean over jobs, its standard error, and their number."""
    of_job = np.array([accepted[jobs == job].mean() for job in np.unique(jobs)])
    error = of_job.std(ddof=1) / np.sqrt(len(of_job)) if len(of_job) > 1 else np.nan
    return float(of_job.mean()), float(error), len(of_job)


def worst(rows: Iterable[dict], *, is_error: bool) -> list[dict]:
    """Returns the row with the highest rate of errors, or with the lowest power; nothing without rows."""
    rows = list(rows)
    return [(max if is_error else min)(rows, key=lambda row: row["rate"])] if rows else []


def base_rows(runs: dict[int, Runs], draws: int) -> list[dict]:
    """False keeps at the margin and power above it, of every candidate in every setting."""
    found = []
    for setting, (size, _) in SETTINGS.items():
        adapters = against_base(runs[size], setting, draws, ADAPTERS)
        seeds = between_seeds(runs[size], setting, draws)
        unequal = of_unequal_sizes(runs[size], setting, draws)
        for test in TESTS:
            for trials in (adapters, seeds, *unequal):
                found += worst(rates(test, trials, MARGIN, MARGIN), is_error=True)
            for true_gain in TRUE_GAINS:
                found += worst(rates(test, adapters, true_gain, MARGIN), is_error=False)
    return found


def active_rows(runs: dict[int, Runs], draws: int) -> list[dict]:
    """False accepts at a difference of minus the tolerance, and acceptance of versions that are as good or better."""
    found = []
    for setting, (size, _) in SETTINGS.items():
        trials = between_versions(runs[size], setting, draws)
        for test in RIVALS:
            for tolerance in TOLERANCES:
                for each in trials["worse"]:
                    found += worst(rates(test, each, -tolerance, -tolerance), is_error=True)
                for true_gain in GAINS_OVER_ACTIVE:
                    for each in trials["better" if true_gain else "equal"]:
                        found += worst(rates(test, each, true_gain, -tolerance), is_error=False)
    return found


def verdicts(runs: dict[int, Runs], draws: int) -> list[dict]:
    """What the chosen test says of the runs as they are."""
    found = []
    for setting in ("6 in folds", "13 in folds", "7 of 50", "30 of 200"):
        of_size = runs[SETTINGS[setting][0]]
        for case in dict.fromkeys(of_size.cases.tolist()):
            trials = against_base(of_size, setting, draws, (case,))
            kept = TESTS[CHOSEN](trials.before, trials.before * trials.gains, MARGIN, trials.folds)
            for author in np.unique(trials.authors):
                chosen = trials.authors == author
                found.append(
                    {
                        "case": case,
                        "setting": setting,
                        "author": int(author),
                        "true_gain": round(float(trials.truths[chosen].mean()), 5),
                        "jobs": len(np.unique(trials.jobs[chosen])),
                        "kept": int(kept[chosen].sum()),
                        "trials": int(chosen.sum()),
                    }
                )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=RUNS)
    parser.add_argument("--draws", type=int, default=100)
    evidence.add_record_option(parser)
    options = parser.parse_args()
    runs = load(options.runs)
    for name, rows_of in (("gate-base", base_rows), ("gate-active", active_rows), ("gate-verdicts", verdicts)):
        rows = rows_of(runs, options.draws)
        print(f"{name}\n" + "\n".join("  ".join(map(str, row.values())) for row in rows))
        if options.record:
            evidence.record(name, SOURCES, rows, options.record, on_cpu=True)


if __name__ == "__main__":
    main()
