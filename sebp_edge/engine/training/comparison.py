"""Compares the losses of two models on the same documents, with a lower bound of the gain."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sebp_edge.engine.training.evaluation import HeldOutLoss
from sebp_edge.values.word_figures import WordFigures

# 95 % would do for normal differences. Those of real notes are skewed and of unequal size: a bound at 95 % is too high
# in up to a tenth of the samples, and one at this level in about a twentieth (kernels/bench/how-the-gate-decides.md).
_LEVEL = 0.985


@dataclass(frozen=True)
class Comparison:
    """The gain of one model over another."""

    # The mean losses of the two in nats per token.
    before: float
    after: float
    gain: float  # by how much the mean loss fell, as a share of the loss before; NaN if a loss is not finite
    # A lower bound of the gain; -inf if there is none. At the usual level, it holds in 95 % of all samples of
    # documents.
    lower: float
    num_clusters: int  # the number of clusters of near-duplicate documents, the units of the bound


def compare(
    before: HeldOutLoss, after: HeldOutLoss, cluster_of: Mapping[int, int], level: float = _LEVEL
) -> Comparison:
    """Compares two models by their losses on the same documents, with a lower bound at a level of Student's t.

    The bound is that of Student's t for the jackknife of the gain. It needs no correction for documents from several
    folds: the dependence between folds is too small to measure.
    """
    if before.tokens != after.tokens:
        raise ValueError("got the losses of different documents or tokens; both must be of the same")
    units, unit_of = np.unique([cluster_of[document] for document in before.nats], return_inverse=True)
    nats_before = np.bincount(unit_of, list(before.nats.values()), len(units))
    nats_after = np.bincount(unit_of, [after.nats[document] for document in before.nats], len(units))
    with np.errstate(all="ignore"):
        gain = float((nats_before.sum() - nats_after.sum()) / nats_before.sum())
        lower = float(jackknife_bound(nats_before, nats_after, level)) if len(units) > 1 else -math.inf
    return Comparison(
        before=before.mean,
        after=after.mean,
        gain=gain if math.isfinite(gain) else math.nan,
        lower=lower if math.isfinite(lower) else -math.inf,
        num_clusters=len(units),
    )


def interval(losses: HeldOutLoss, cluster_of: Mapping[int, int]) -> tuple[float, float] | None:
    """Returns a 95 % interval of a mean loss, by the jackknife over clusters; None if there are fewer than two.

    Losses of two models on the same documents move together, so their intervals overlap even if one is surely lower:
    that is what `compare` decides.
    """
    units, unit_of = np.unique([cluster_of[document] for document in losses.nats], return_inverse=True)
    if len(units) < 2:
        return None
    nats, tokens = (np.bincount(unit_of, list(part.values()), len(units)) for part in (losses.nats, losses.tokens))
    with np.errstate(all="ignore"):
        # With one nat per token as the loss before, one minus the gain is the mean loss.
        highest = 1 - float(jackknife_bound(tokens, nats, level=0.975))
    if not math.isfinite(highest):
        return None
    return max(0.0, 2 * losses.mean - highest), highest


def compare_words(before: HeldOutLoss, after: HeldOutLoss, cluster_of: Mapping[int, int]) -> WordFigures | None:
    """Compares the words that two models guess in the same documents.

    Returns None if words were not read in all documents, or if no word follows a space.
    """
    is_read = all(test.words.keys() == test.tokens.keys() for test in (before, after))
    if not is_read or not sum(before.words.values()):
        return None
    saved_more = _difference(before.saved, after.saved, before.characters, cluster_of)
    guessed_more = _difference(before.guessed, after.guessed, before.words, cluster_of)
    keystrokes, words = sum(before.characters.values()), sum(before.words.values())
    saved, guessed = ([sum(getattr(test, name).values()) for test in (before, after)] for name in ("saved", "guessed"))
    return WordFigures(keystrokes, *saved, *saved_more, words, *guessed, *guessed_more, is_typed=True)


def _difference(
    before: Mapping[int, int], after: Mapping[int, int], total: Mapping[int, int], cluster_of: Mapping[int, int]
) -> tuple[float, float] | tuple[None, None]:
    """Returns a 95 % interval of how much more of a total is counted after than before, as a share of the total.

    By the paired jackknife over clusters, with half of the gate's error on either side. There is none if fewer than two
    clusters have changed.
    """
    units, unit_of = np.unique([cluster_of[document] for document in total], return_inverse=True)
    totals = np.bincount(unit_of, list(total.values()), len(units))
    more = np.bincount(unit_of, [after[document] - before[document] for document in total], len(units))
    if np.count_nonzero(more) < 2:
        return None, None
    # With one nat of each, before, the gain is the share.
    lowest = float(jackknife_bound(totals, totals - more, level=(1 + _LEVEL) / 2))
    return lowest, 2 * float(more.sum() / totals.sum()) - lowest


def jackknife_bound(before: np.ndarray, after: np.ndarray, level: float = _LEVEL) -> np.ndarray:
    """Returns the lower bound of the gain from the nats of each unit, which are in the last dimension."""
    total_before, total_after = before.sum(-1, keepdims=True), after.sum(-1, keepdims=True)
    num_units = before.shape[-1]
    without_one = 1 - (total_after - after) / (total_before - before)
    standard_error = np.sqrt(num_units - 1) * without_one.std(-1)
    return 1 - (total_after / total_before).squeeze(-1) - t_quantile(num_units - 1, level) * standard_error


def t_quantile(freedom: int, level: float = _LEVEL) -> float:
    """Returns a quantile of Student's t, for a level of one half or more."""
    # With t = sqrt(freedom) * tan(angle), the density of the angle is proportional to cos(angle) ** (freedom - 1).
    angles = np.linspace(0, np.pi / 2, 20_001)
    density = np.cos(angles) ** (freedom - 1)
    share = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
    return float(np.sqrt(freedom) * np.tan(np.interp(2 * level - 1, share / share[-1], angles)))
