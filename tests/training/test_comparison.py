"""The comparison of two models: its gain, its bound, and when there is none."""

import math

import numpy as np
import pytest

from sebp_edge.engine.training.comparison import compare, t_quantile
from sebp_edge.engine.training.evaluation import HeldOutLoss


def loss(nats, tokens=None):
    return HeldOutLoss(dict(enumerate(nats)), dict(enumerate(tokens or [10] * len(nats))))


def test_the_gain_is_that_of_the_mean_loss_over_all_tokens():
    found = compare(loss([40.0, 300.0], [10, 100]), loss([20.0, 270.0], [10, 100]), range(2))
    assert (found.before, found.after) == pytest.approx((340 / 110, 290 / 110))
    assert found.gain == pytest.approx(50 / 340)
    assert found.num_clusters == 2


def test_the_bound_is_that_of_t_for_documents_of_one_size():
    before, gains = [50.0] * 6, np.array([0.02, 0.05, 0.03, 0.04, 0.01, 0.03])
    found = compare(loss(before), loss([50 * (1 - gain) for gain in gains]), range(6))
    assert found.lower == pytest.approx(gains.mean() - 3.002875 * gains.std(ddof=1) / math.sqrt(6), abs=1e-7)


def test_one_large_document_lowers_the_bound_more_than_its_linear_error():
    before, gains = np.array([50.0] * 5 + [500.0]), np.array([0.05] * 5 + [0.01])
    found = compare(loss(before.tolist()), loss((before * (1 - gains)).tolist()), range(6))
    residuals = before * (gains - found.gain)
    linear = found.gain - 3.002875 * math.sqrt((residuals**2).sum() * 6 / 5) / before.sum()
    assert found.lower < linear - 0.01


def test_near_duplicates_count_as_one_document():
    before, after = [50.0, 40.0, 60.0], [48.0, 37.0, 59.0]
    once = compare(loss(before), loss(after), range(3))
    four_times = compare(loss(before * 4), loss(after * 4), {document: document % 3 for document in range(12)})
    assert (four_times.gain, four_times.lower) == pytest.approx((once.gain, once.lower))
    assert four_times.num_clusters == 3
    assert compare(loss(before * 4), loss(after * 4), range(12)).lower > once.lower


def test_a_loss_that_is_not_finite_has_no_bound():
    for bad in (math.nan, math.inf):
        for before, after in (([50.0, 40.0], [48.0, bad]), ([50.0, bad], [48.0, 37.0]), ([bad, 40.0], [bad, 37.0])):
            found = compare(loss(before), loss(after), range(2))
            assert math.isnan(found.gain)
            assert found.lower == -math.inf


def test_one_cluster_has_a_gain_but_no_bound():
    found = compare(loss([50.0, 40.0]), loss([45.0, 36.0]), {0: 7, 1: 7})
    assert found.gain == pytest.approx(0.1)
    assert (found.lower, found.num_clusters) == (-math.inf, 1)


def test_losses_of_different_documents_or_tokens_are_refused():
    one = loss([50.0, 40.0])
    for other in (loss([50.0]), loss([50.0, 40.0, 30.0]), loss([50.0, 40.0], [10, 11])):
        for before, after in ((one, other), (other, one)):
            with pytest.raises(ValueError, match="different documents or tokens"):
                compare(before, after, range(3))


def test_the_quantiles_are_those_of_students_t():
    known = {1: 12.7062, 2: 4.30265, 5: 2.57058, 29: 2.04523, 199: 1.97196}
    assert {freedom: t_quantile(freedom, 0.975) for freedom in known} == pytest.approx(known, rel=1e-5)
    assert t_quantile(5, 0.95) == pytest.approx(2.01505, rel=1e-5)
