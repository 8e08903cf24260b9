"""The tables of NM.md, which stand beside the N:M paper's claims; each a function from results to Markdown.

The rules of the verdicts were set before any result was recorded. Intervals are Student's 95 % for a mean over seeds; a
comparison pairs runs with the same seed. "Better" is in points of accuracy or, for next tokens, in % of SR-STE's loss.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from statistics import mean, stdev
from typing import NamedTuple

from tables import NOT_RECORDED, Row, index, markdown, recorded, rows

SETTINGS = ("digits", "tiny", "sst2", "notes")
PARTS = 10
# 97.5 % quantiles of Student's t by degrees of freedom.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}
DENSE, SR_STE, COUPLED, EXPONENTIAL, STEPWISE = (
    "dense",
    "sr-ste",
    "sr-ste, coupled",
    "mdgf-exponential",
    "sdgf-stepwise",
)
# The highest sparsity that every setting has, and the one that GPUs compute.
HIGH, LOW = "1:16", "2:4"
# How much worse counts as equal quality, and the paper's saving in training FLOPs.
MARGIN, SAVING = 1.0, 0.3


class Interval(NamedTuple):
    """A mean over seeds, and half of its interval's width."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Interval":
        values = list(values)
        degrees = len(values) - 1
        half = STUDENT[degrees] * stdev(values) / math.sqrt(len(values)) if degrees else math.inf
        return cls(mean(values), half)

    @property
    def verdict(self) -> str:
        """Whether the mean is above zero."""
        if self.mean - self.half > 0:
            return "confirmed"
        return "contradicted" if self.mean + self.half < 0 else "not shown"

    def said(self, form: str) -> str:
        return f"{self.mean:{form}} ± {self.half:{form.removeprefix('+')}}"

    def said_as_ratio(self) -> str:
        """For a mean of logarithms."""
        low, high = (math.exp(end) for end in (self.mean - self.half, self.mean + self.half))
        return f"{math.exp(self.mean):.2f} ({low:.2f} to {high:.2f})"


class Runs:
    """The recorded runs of one setting."""

    def __init__(self, setting: str):
        self.name, self.rows = f"nm-quality-{setting}", rows(f"nm-quality-{setting}")
        self.has_classes = self.rows[0]["accuracy"] is not None
        self.methods = list(dict.fromkeys(row["method"] for row in self.rows))
        self.patterns = list(dict.fromkeys(row["pattern"] for row in self.rows if row["pattern"]))

    def of(self, method: str, pattern: str | None) -> list[Row]:
        """The runs by seed; none if the pattern does not divide the layers."""
        found = (row for row in self.rows if (row["method"], row["pattern"]) == (method, pattern))
        return sorted(found, key=lambda row: row["seed"])

    def better(self, method: str, pattern: str, than: str, than_pattern: str) -> Interval:
        """By how much a method is better than another."""
        pairs = zip(self.of(method, pattern), self.of(than, than_pattern), strict=True)
        if self.has_classes:
            return Interval.of(100 * (one["accuracy"] - other["accuracy"]) for one, other in pairs)
        return Interval.of(100 * (1 - one["loss"] / other["loss"]) for one, other in pairs)

    def noise_ratio(
        self, method: str, pattern: str | None, to: str, to_pattern: str | None, parts: Iterable[int] = range(PARTS)
    ) -> Interval:
        """The logarithm of the ratio of two methods' variances of gradients, its mean over parts of the training."""
        parts = list(parts)
        pairs = zip(self.of(method, pattern), self.of(to, to_pattern), strict=True)
        return Interval.of(
            mean(math.log(one[f"variance_{part}"] / other[f"variance_{part}"]) for part in parts)
            for one, other in pairs
        )


def quality(setting: str) -> str:
    """Held-out loss, and accuracy if there are classes, by method and pattern; the FLOPs below."""
    if not _is_recorded(setting):
        return NOT_RECORDED
    runs = Runs(setting)
    body = []
    for method in runs.methods:
        patterns = [None] if method == DENSE else runs.patterns
        cells = [_quality(runs.of(method, pattern), runs.has_classes) for pattern in patterns]
        body.append([method, *cells, *[""] * (len(runs.patterns) - len(cells))])
    for title, column, method in (
        ("training FLOPs, SR-STE", "training", SR_STE),
        ("training FLOPs, MdGf and SdGf", "training", EXPONENTIAL),
        ("inference FLOPs", "inference", SR_STE),
    ):
        shares = (runs.of(method, pattern)[0][column] for pattern in runs.patterns)
        body.append([title, *(f"{100 * share:.0f} %" for share in shares)])
    first = runs.rows[0]
    what = "loss, accuracy in %" if runs.has_classes else "loss"
    shrunk = f"{100 * runs.of(SR_STE, runs.patterns[0])[0]['shrinkage']:.2g} %"
    return (
        f"{markdown([what, *runs.patterns], body)}\n\nThe dense run is in the first column. {first['steps']:,} steps, "
        f"learning rate {first['learning_rate']:g}. SR-STE's term takes {shrunk} of a pruned weight in all. "
        f"{recorded(runs.name)}"
    )


def _quality(found: list[Row], has_classes: bool) -> str:
    if not found:
        return ""
    loss = Interval.of(row["loss"] for row in found).said(".3f")
    right = Interval.of(100 * row["accuracy"] for row in found).said(".1f") if has_classes else ""
    return f"{loss}, {right}" if right else loss


def gains() -> str:
    """By how much each method is better than SR-STE with the same pattern."""
    body = []
    for runs in _all_runs():
        for method in runs.methods:
            if method not in (DENSE, SR_STE):
                body.append([_name(runs), method, *(_gain(runs, method, pattern) for pattern in _patterns())])
    return markdown(("better than SR-STE", "method", *_patterns()), body) if body else NOT_RECORDED


def _gain(runs: Runs, method: str, pattern: str) -> str:
    if not runs.of(method, pattern):
        return ""
    gain = runs.better(method, pattern, SR_STE, pattern)
    return f"{gain.said('+.1f')}{'' if gain.verdict == 'not shown' else ' *'}"


def noise() -> str:
    """Ratios of the variance of gradients, before and in the sparse phase of MdGf and SdGf."""
    body = []
    for runs in _all_runs():
        sparse_from = round(PARTS * (1 - runs.of(EXPONENTIAL, HIGH)[0]["sparse_share"]))
        compared = [(SR_STE, DENSE), *((method, SR_STE) for method in runs.methods if method not in (DENSE, SR_STE))]
        for method, to in compared:
            cells = []
            for pattern in _patterns():
                if not runs.of(method, pattern):
                    cells.append("")
                    continue
                to_pattern = None if to == DENSE else pattern
                phases = (range(sparse_from), range(sparse_from, PARTS))
                ratios = (runs.noise_ratio(method, pattern, to, to_pattern, parts) for parts in phases)
                cells.append("; ".join(ratio.said_as_ratio() for ratio in ratios))
            body.append([_name(runs), f"{method} / {to}", *cells])
    return markdown(("variance of gradients", "", *_patterns()), body) if body else NOT_RECORDED


def claims() -> str:
    """Each claim of the paper on each model: what was found, and whether that confirms it."""
    body = [
        [claim, _name(runs), *found] for claim, judge in CLAIMS.items() for runs in _all_runs() for found in judge(runs)
    ]
    if not body:
        return NOT_RECORDED
    return markdown(("the paper says", "on", "found", "verdict"), body)


def _more_noise(runs: Runs, method: str) -> Iterator[tuple[str, str]]:
    ratio = runs.noise_ratio(SR_STE, HIGH, method, HIGH)
    yield f"{ratio.said_as_ratio()} times the variance of {method}", ratio.verdict


def _noise_grows(runs: Runs) -> Iterator[tuple[str, str]]:
    ratio = runs.noise_ratio(SR_STE, HIGH, SR_STE, LOW)
    yield f"{ratio.said_as_ratio()} times the variance at {LOW}", ratio.verdict


def _better(runs: Runs, method: str) -> Iterator[tuple[str, str]]:
    gain = runs.better(method, HIGH, SR_STE, HIGH)
    yield f"{method}: {gain.said('+.1f')} {_unit(runs)}", gain.verdict


def _cheaper(runs: Runs) -> Iterator[tuple[str, str]]:
    """The cheapest MdGf or SdGf run, whatever its pattern, that is on average no worse than SR-STE with a pattern."""
    decaying = [method for method in runs.methods if method not in (DENSE, SR_STE, COUPLED)]
    savings = []
    for pattern in runs.patterns:
        as_good = [
            (runs.of(method, other)[0]["training"], method, other)
            for method in decaying
            for other in runs.patterns
            if runs.of(method, other) and runs.better(method, other, SR_STE, pattern).mean >= 0
        ]
        if as_good:
            cost, method, other = min(as_good)
            savings.append((1 - cost / runs.of(SR_STE, pattern)[0]["training"], f"{method} {other}", pattern))
    if not savings:
        yield "no run is as good as one by SR-STE", "contradicted"
        return
    saving, cheapest, pattern = max(savings)
    found = f"at best {100 * saving:+.0f} %, by {cheapest} instead of SR-STE {pattern}"
    yield found, "confirmed" if saving > SAVING else "not shown" if saving > 0 else "contradicted"


def _as_good(runs: Runs) -> Iterator[tuple[str, str]]:
    gain = runs.better(EXPONENTIAL, HIGH, SR_STE, LOW)
    high, low = (runs.of(method, pattern)[0]["inference"] for method, pattern in ((EXPONENTIAL, HIGH), (SR_STE, LOW)))
    worst = gain.mean - gain.half
    verdict = "confirmed" if worst > -MARGIN else "contradicted" if gain.mean + gain.half < -MARGIN else "not shown"
    yield f"{gain.said('+.1f')} {_unit(runs)}, at {100 * (1 - high / low):.0f} % fewer inference FLOPs", verdict


CLAIMS: dict[str, Callable[[Runs], Iterator[tuple[str, str]]]] = {
    f"gradients under SR-STE are noisier than under MdGf ({HIGH})": partial(_more_noise, method=EXPONENTIAL),
    f"and than under SdGf ({HIGH})": partial(_more_noise, method=STEPWISE),
    f"their noise grows with sparsity ({HIGH})": _noise_grows,
    f"MdGf is better than SR-STE at high sparsity ({HIGH})": partial(_better, method=EXPONENTIAL),
    f"so is SdGf ({HIGH})": partial(_better, method=STEPWISE),
    "over 30 % fewer training FLOPs than SR-STE at equal quality": _cheaper,
    f"MdGf-exponential at {HIGH} equals SR-STE at {LOW}, at 60 % fewer inference FLOPs": _as_good,
}


def _is_recorded(setting: str) -> bool:
    return f"nm-quality-{setting}" in index()


def _all_runs() -> list[Runs]:
    return [Runs(setting) for setting in SETTINGS if _is_recorded(setting)]


def _patterns() -> list[str]:
    return list(dict.fromkeys(pattern for runs in _all_runs() for pattern in runs.patterns))


def _name(runs: Runs) -> str:
    return runs.name.removeprefix("nm-quality-")


def _unit(runs: Runs) -> str:
    return "points of accuracy" if runs.has_classes else "% of the loss"


# --------------------------------------------------------------------------------------------------------------- speed


def products() -> str:
    """Microseconds of each layer's product by rows, dense and sparse, and their ratio."""
    if "nm-products" not in index():
        return NOT_RECORDED
    times: dict[int, list[str]] = {}
    for row in rows("nm-products"):
        dense, sparse = row["dense_us"], row["sparse_us"]
        times.setdefault(row["rows"], []).append(f"{dense:.0f} -> {sparse:.0f}, {dense / sparse:.2f}x")
    layers = {row["layer"]: f"{row['layer']}: {row['outputs']} x {row['inputs']}" for row in rows("nm-products")}
    table = markdown(("rows", *layers.values()), ([f"{number:,}", *cells] for number, cells in times.items()))
    return f"{table}\n\n{recorded('nm-products')}"


def generation() -> str:
    """Prompts, further tokens and memory of a model with dense and with compressed weights."""
    if "nm-generation" not in index():
        return NOT_RECORDED
    found = {(row["prompt"], row["weights"]): row for row in rows("nm-generation")}
    body = []
    for prompt in dict.fromkeys(prompt for prompt, _ in found):
        pair = [found[prompt, weights] for weights in ("dense", "sparse")]
        cells = (" -> ".join(f"{row[column]:.1f}" for row in pair) for column in ("prompt_ms", "token_ms"))
        body.append([f"{prompt:,}", *cells, " -> ".join(f"{row['weights_gib']:.2f}" for row in pair)])
    head = ("tokens of the prompt", "prompt, ms", "each further token, ms", "weights, GiB")
    return f"{markdown(head, body)}\n\n{recorded('nm-generation')}"


def pruning() -> str:
    """The time of one pass that prunes or shrinks a weight, relative to a copy of it."""
    if "nm-pruning" not in index():
        return NOT_RECORDED
    found = {(row["pattern"], row["dtype"]): row for row in rows("nm-pruning")}
    dtypes = list(dict.fromkeys(dtype for _, dtype in found))
    body = []
    for pattern in dict.fromkeys(pattern for pattern, _ in found):
        ratios = (
            f"{found[pattern, dtype][column] / found[pattern, dtype]['copy_ms']:.1f}x"
            for column in ("prune_ms", "shrink_ms")
            for dtype in dtypes
        )
        body.append([pattern, *ratios])
    head = ("", *(f"{what}, {dtype}" for what in ("prune", "shrink") for dtype in dtypes))
    return f"{markdown(head, body)}\n\n{recorded('nm-pruning')}"


TABLES: dict[str, Callable[[], str]] = {
    "nm-claims": claims,
    "nm-generation": generation,
    "nm-products": products,
    "nm-pruning": pruning,
    "nm-gains": gains,
    "nm-noise": noise,
    **{f"nm-quality-{setting}": partial(quality, setting) for setting in SETTINGS},
}
