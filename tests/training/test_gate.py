"""The gate says yes only to what is surely better than the base model and not surely worse than the active version."""

import math
import re
from dataclasses import replace

import pytest

from sebp_edge.engine.training.comparison import Comparison
from sebp_edge.engine.training.evaluation import HeldOutLoss
from sebp_edge.engine.training.gate import TOLERANCE, EarlierVersion, Gate, GateResult, Life, Verdict

TOKENS = 100
# The falls of ten documents, in nats per token: 0.2 on average, or 5 % of the base model's 4.
FALLS = [0.1, 0.3, 0.2, 0.15, 0.25, 0.2, 0.1, 0.3, 0.2, 0.2]
DOCUMENTS = range(len(FALLS))
ALONE = {document: document for document in DOCUMENTS}


def losses(*per_token: float, boilerplate: float | None = None) -> HeldOutLoss:
    """The losses of documents in nats per token, perhaps with as many tokens again in boilerplate."""
    found = HeldOutLoss(
        {n: TOKENS * loss for n, loss in enumerate(per_token)}, dict.fromkeys(range(len(per_token)), TOKENS)
    )
    if boilerplate is not None:
        for document in found.nats:
            found.boilerplate_nats[document], found.boilerplate_tokens[document] = TOKENS * boilerplate, TOKENS
            found.nats[document] += TOKENS * boilerplate
            found.tokens[document] += TOKENS
    return found


def fallen(by: float = 1.0, **options) -> HeldOutLoss:
    return losses(*(4 - by * fall for fall in FALLS), **options)


def active(found: HeldOutLoss | None, reason="") -> EarlierVersion:
    return EarlierVersion(3, found, reason)


BASE = losses(*[4.0] * len(FALLS))


def test_a_fall_above_the_margin_is_kept():
    result = Gate(0.01, ALONE).judge(BASE, fallen())
    assert (result.verdict, result.passed) == (Verdict.BETTER, True)
    assert result.gain.gain == pytest.approx(0.05)
    assert 0.03 < result.gain.lower < 0.05
    assert (result.gain.before, result.gain.after) == pytest.approx((4, 3.8))
    assert result.life.active is result.gain_over_active is result.refit_loss is None


@pytest.mark.parametrize(
    ("gain", "lower", "words"),
    [
        (0.131, 0.089, r"predicts the text 13.1 % better than the base model, which is more than chance"),
        (0.044, -0.003, "predicts the text 4.4 % better than the base model, which may be chance; 1.0 % must be sure"),
        (-0.02, -0.05, "predicts the text 2.0 % worse than the base model"),
        (0.044, -math.inf, "predicts the text 4.4 % better than the base model, which may be chance"),
        (0.0001, -0.0002, r"predicts the text 0\.01 % better than the base model, which may be chance"),
        (0.02, 0.00997, r"surely predicts the text only 0\.997 % better .*, and the gate asks for 1\.000 %"),
        (
            math.nan,
            -math.inf,
            "predicts nothing, since its loss, which measures how wrong it is, is not a finite number",
        ),
    ],
)
def test_a_bound_is_said_with_the_sign_of_its_sentence(gain, lower, words):
    after = HeldOutLoss(dict.fromkeys(DOCUMENTS, 100.0), dict.fromkeys(DOCUMENTS, TOKENS))
    comparison = Comparison(4.0, 4.0 * (1 - gain), gain, lower, len(FALLS))
    verdict = Verdict.BETTER if lower >= 0.01 else Verdict.NO_GAIN
    said = GateResult(verdict, BASE, after, gain=comparison).explain(0.01, ())
    assert said.startswith("On 10 documents that it was not trained on, it ")
    assert said.count("%") <= 3
    assert re.search(words, said), said
    assert "-" not in said.replace("near-", "")


@pytest.mark.parametrize(
    ("gain", "lower", "words"),
    [
        (-0.09, -0.12, "is 9.0 % worse than version 3, .*, and may be 12.0 % worse; the gate allows 2.0 %"),
        (0.01, -0.03, "is 1.0 % better than version 3, .*, but may be 3.0 % worse"),
        (-0.01, -0.0204, r"is 1.0 % worse than version 3, .* may be 2\.04 % worse; the gate allows 2\.00 %"),
    ],
)
def test_a_worse_version_is_told_from_an_earlier_one_in_words(gain, lower, words):
    better, worse = Comparison(4.0, 3.5, 0.125, 0.1, 10), Comparison(4.0, 4.0 * (1 - gain), gain, lower, 10)

    def told(verdict, life, over_active, over_best):
        found = GateResult(verdict, BASE, fallen(), gain=better, life=life)
        return replace(found, gain_over_active=over_active, gain_over_best=over_best)

    is_best, is_not = Life(active(BASE)), Life(active(BASE), EarlierVersion(2, BASE))
    result = told(Verdict.WORSE_THAN_ACTIVE, is_best, worse, worse)
    assert re.search(f"But on documents that neither was trained on, it {words}", said := result.explain(0.01, ()))
    assert said.count("%") <= 3
    assert "version 3, the best so far" in said
    result = told(Verdict.WORSE_THAN_ACTIVE, is_not, worse, better)
    assert result.explain(0.01, ()) == said.replace("the best so far", "which is active")
    result = told(Verdict.WORSE_THAN_BEST, is_not, better, worse)
    assert result.explain(0.01, ()) == said.replace("version 3", "version 2")


def test_texts_of_boilerplate_alone_are_not_judged_for_that_reason():
    only = HeldOutLoss({0: 4.0}, {0: 1}, {0: 4.0}, {0: 1})
    result = Gate(0.01, {0: 0}).judge(only, only)
    assert result.verdict is Verdict.NOT_JUDGED
    assert "All lines of the test documents stand in many documents" in result.explain(0.01, ())


def test_the_lower_bound_has_to_reach_the_margin():
    lower = Gate(0.01, ALONE).judge(BASE, fallen()).gain.lower
    assert Gate(lower, ALONE).judge(BASE, fallen()).passed
    result = Gate(math.nextafter(lower, 1), ALONE).judge(BASE, fallen())
    assert (result.verdict, result.passed) == (Verdict.NO_GAIN, False)
    assert result.gain.gain > lower


@pytest.mark.parametrize("by", [0, 1e-9, 1e-3, -1])
def test_a_fall_below_the_margin_is_no_gain(by):
    assert Gate(0.01, ALONE).judge(BASE, fallen(by)).verdict is Verdict.NO_GAIN


def test_a_fall_of_a_few_documents_only_is_no_gain():
    result = Gate(0.01, ALONE).judge(BASE, losses(2.0, *[4.0] * 9))
    assert result.gain.gain == pytest.approx(0.05)
    assert result.verdict is Verdict.NO_GAIN


def test_a_rise_in_boilerplate_does_not_hide_a_gain():
    before = losses(*[4.0] * len(FALLS), boilerplate=1)
    result = Gate(0.01, ALONE).judge(before, fallen(boilerplate=4))
    assert result.passed
    assert result.gain == Gate(0.01, ALONE).judge(BASE, fallen()).gain
    assert result.after.mean > result.before.mean


def test_nothing_is_judged_if_the_documents_do_not_allow_it():
    result = Gate(0.01, ALONE, can_judge=False, life=Life(active(BASE))).judge(BASE, fallen())
    assert (result.verdict, result.gain, result.gain_over_active) == (Verdict.NOT_JUDGED, None, None)
    assert (result.before, result.after) == (BASE, fallen())


def test_nothing_is_judged_if_all_lines_are_boilerplate():
    before, after = (HeldOutLoss({0: nats}, {0: 9}, {0: nats}, {0: 9}) for nats in (30.0, 20.0))
    result = Gate(0.01, ALONE).judge(before, after)
    assert (result.verdict, result.gain) == (Verdict.NOT_JUDGED, None)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_no_gain(wrong):
    broken = losses(wrong, *(4 - fall for fall in FALLS[1:]))
    for before, after in ((broken, fallen()), (BASE, broken), (broken, broken)):
        result = Gate(0.0, ALONE).judge(before, after)
        assert (result.verdict, result.gain.lower) == (Verdict.NO_GAIN, -math.inf)


# ------------------------------------------------------------------------------------------------ the active version


def test_what_is_as_good_as_the_active_version_is_kept():
    for by in (1, 0.99, 1.5):
        result = Gate(0.01, ALONE, life=Life(active(fallen()))).judge(BASE, fallen(by))
        assert result.passed
        assert result.gain_over_active.lower >= -TOLERANCE
        assert result.life.active.version == 3


def test_what_is_worse_than_the_active_version_is_not():
    """It is 2.5 % better than the base model, but the active version was 7.5 % better."""
    result = Gate(0.01, ALONE, life=Life(active(fallen(1.5)))).judge(BASE, fallen(0.5))
    assert result.gain.lower > 0.01
    assert result.verdict is Verdict.WORSE_THAN_ACTIVE
    assert result.gain_over_active.gain == pytest.approx(3.7 / 3.7 - 3.9 / 3.7)


def test_what_may_be_worse_than_the_active_version_is_not_kept():
    """The same loss on average, but some documents are much worse."""
    after = losses(*(3.8 + (0.4 if document % 2 else -0.4) for document in DOCUMENTS))
    result = Gate(0, ALONE, life=Life(active(losses(*[3.8] * len(FALLS))))).judge(losses(*[6.0] * len(FALLS)), after)
    assert result.gain_over_active.gain == pytest.approx(0)
    assert result.gain_over_active.lower < -TOLERANCE
    assert result.verdict is Verdict.WORSE_THAN_ACTIVE


def test_only_documents_that_the_active_version_has_not_seen_are_compared():
    """It would be worse on the first five documents, which the active version has learnt."""
    of_active = losses(*(4 - fall for fall in FALLS)).only(range(5, 10))
    after = fallen(1)
    result = Gate(0.01, ALONE, life=Life(active(of_active))).judge(BASE, after)
    assert result.passed
    assert (result.gain_over_active.gain, result.gain_over_active.num_clusters) == (0, 5)
    assert result.gain.num_clusters == 10


def test_boilerplate_is_left_out_of_the_comparison_with_the_active_version():
    before = losses(*[4.0] * len(FALLS), boilerplate=4)
    for of_active, after in ((0.1, 3), (3, 0.1)):
        gate = Gate(0.01, ALONE, life=Life(active(fallen(boilerplate=of_active))))
        result = gate.judge(before, fallen(boilerplate=after))
        assert (result.verdict, result.gain_over_active.gain) == (Verdict.BETTER, 0)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_an_active_version_whose_loss_is_not_finite_is_not_replaced(wrong):
    of_active = losses(wrong, *(4 - fall for fall in FALLS[1:]))
    result = Gate(0.01, ALONE, life=Life(active(of_active))).judge(BASE, fallen())
    assert (result.verdict, result.gain_over_active.lower) == (Verdict.WORSE_THAN_ACTIVE, -math.inf)


@pytest.mark.parametrize("unseen", [0, 1])
def test_fewer_than_two_documents_that_the_active_version_has_not_seen_are_not_comparable(unseen):
    version = active(fallen().only(range(unseen)))
    result = Gate(0.01, ALONE, life=Life(version)).judge(BASE, fallen())
    assert (result.verdict, result.gain_over_active) == (Verdict.NOT_COMPARABLE, None)
    assert result.life.active.reason.endswith(f"that it was not trained on, but there are {unseen}")


# --------------------------------------------------------------------------------------------- the best version so far


def test_what_is_no_worse_than_the_active_version_may_be_worse_than_the_best():
    life = Life(active(fallen(0.5)), EarlierVersion(2, fallen(1.5)))
    result = Gate(0.01, ALONE, life=life).judge(BASE, fallen(0.5))
    assert (result.verdict, result.gain_over_active.gain) == (Verdict.WORSE_THAN_BEST, 0)
    assert result.gain_over_best.gain == pytest.approx(1 - 3.9 / 3.7)
    assert (result.is_best, result.refused) == (False, 1)


def test_the_best_version_is_not_enough_if_the_active_one_is_better():
    """Bounds differ by documents: here the active version is better on those that the best one was trained on."""
    life = Life(active(fallen(1.5)), EarlierVersion(2, fallen(0.5)))
    assert Gate(0.01, ALONE, life=life).judge(BASE, fallen(0.5)).verdict is Verdict.WORSE_THAN_ACTIVE


def test_the_best_version_gives_way_only_to_one_that_is_surely_no_worse():
    for by, is_best in ((1, True), (1.1, True), (0.99, False)):
        result = Gate(0.01, ALONE, life=Life(active(fallen()))).judge(BASE, fallen(by))
        assert (result.passed, result.is_best) == (True, is_best)
    uneven = losses(*(3.79 + (0.05 if document % 2 else -0.05) for document in DOCUMENTS))
    result = Gate(0.01, ALONE, life=Life(active(losses(*[3.8] * len(FALLS))))).judge(BASE, uneven)
    assert result.gain_over_best.gain > 0 > result.gain_over_best.lower
    assert (result.passed, result.is_best) == (True, False)


def test_each_refusal_asks_the_next_version_to_be_surer():
    after = losses(*(3.8 + (0.1 if document % 2 else -0.1) for document in DOCUMENTS))
    bounds = []
    for refused in (0, 1, 5, 50, 10**6):
        life = Life(active(losses(*[3.8] * len(FALLS))), refused=refused)
        result = Gate(0.0, ALONE, life=life).judge(losses(*[6.0] * len(FALLS)), after)
        assert result.refused == refused + (not result.passed)
        bounds.append(result.gain_over_active.lower)
    assert bounds == sorted(bounds, reverse=True)
    assert len(set(bounds)) == len(bounds)
    assert math.isfinite(bounds[-1])
    shares = [1 - Life(refused=refused).level for refused in range(10_000)]
    assert sum(shares) == pytest.approx(0.003, rel=1e-3)


def test_what_was_not_decided_beside_an_earlier_version_is_no_refusal():
    earlier = active(fallen())
    for life, after in ((Life(), BASE), (Life(active(None, "reason")), fallen()), (Life(earlier), fallen())):
        assert Gate(0.01, ALONE, life=replace(life, refused=4)).judge(BASE, after).refused == 4
    assert Gate(0.01, ALONE, life=Life(earlier, refused=4)).judge(None, None).refused == 4
    assert Gate(0.01, ALONE, life=Life(earlier, refused=4)).judge(BASE, BASE).refused == 5


@pytest.mark.parametrize("unseen", [0, 1])
def test_a_best_version_that_has_seen_all_documents_is_left_out_and_that_is_said(unseen):
    life = Life(active(fallen(0.5)), EarlierVersion(2, fallen(1.5).only(range(unseen))))
    result = Gate(0.01, ALONE, life=life).judge(BASE, fallen(0.5))
    assert (result.verdict, result.gain_over_best) == (Verdict.BETTER, result.gain_over_active)
    assert result.life.best_version == 3
    assert "It was not compared with version 2, the best so far: this takes 2 test documents" in result.explain(0, ())


# ------------------------------------------------------------------------------------------------------ the refit

KEPT, NO_GAIN = GateResult(Verdict.BETTER), GateResult(Verdict.NO_GAIN)


@pytest.mark.parametrize("has_judged_state", [True, False])
@pytest.mark.parametrize("before", [KEPT, NO_GAIN])
def test_a_last_training_with_a_lower_loss_is_used(before, has_judged_state):
    result = before.with_refit(3.0, 3.1, has_judged_state=has_judged_state)
    assert (result.is_refit, result.refit_loss, result.verdict) == (True, 3.0, before.verdict)


@pytest.mark.parametrize("loss", [3.1, 3.2, math.inf, math.nan])
def test_if_its_loss_is_not_lower_the_judged_state_is_used(loss):
    result = KEPT.with_refit(loss, 3.1, has_judged_state=True)
    assert (result.is_refit, result.passed) == (False, True)
    assert result.refit_loss is loss


@pytest.mark.parametrize("loss", [3.1, 3.2, math.inf, math.nan])
def test_without_a_single_judged_state_it_is_saved_but_not_kept(loss):
    result = KEPT.with_refit(loss, 3.1, has_judged_state=False)
    assert (result.is_refit, result.verdict, result.passed) == (True, Verdict.REFIT_FAILED, False)
    # A verdict against the adapter stays.
    assert NO_GAIN.with_refit(loss, 3.1, has_judged_state=False).verdict is Verdict.NO_GAIN
