"""Compares the losses of two models on the same documents."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

from sebp_edge.training.evaluation import HeldOutLoss


@dataclass(frozen=True)
class Comparison:
    before: float
    after: float
    gain: float
    lower: float
    num_clusters: int


def compare(before: HeldOutLoss, after: HeldOutLoss, cluster_of: Mapping[int, int]) -> Comparison:
    total = sum(before.tokens.values())
    saved, tokens = {}, {}
    for d in before.nats:
        c = cluster_of[d]
        saved[c] = saved.get(c, 0) + before.nats[d] - after.nats[d]
        tokens[c] = tokens.get(c, 0) + before.tokens[d]
    fall = sum(saved.values()) / total
    n = len(saved)
    if n < 2:
        return Comparison(before.mean, after.mean, fall / before.mean, -math.inf, n)
    residuals = sum((saved[c] - fall * tokens[c]) ** 2 for c in saved)
    se = math.sqrt(residuals * n / (n - 1)) / total
    z = NormalDist().inv_cdf(0.95)
    v = n - 1
    t = z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v * v)
    return Comparison(before.mean, after.mean, fall / before.mean, (fall - t * se) / before.mean, n)
