"""Row selection: each rule selects as documented, and drops are reported."""

import math
from itertools import cycle

import pytest
import torch
from against_dense import assert_same_gradients, loss_and_gradients, padded_batch, with_lora
from builders import checkpoint_activations, make_llama
from pairwise import pairwise
from random_cases import chosen, random_gradient, selector

from sebp_edge import sparsify
from sebp_edge.errors import OptionError
from sebp_edge.research import Energy, Threshold, TopN


@pytest.mark.parametrize("wrong", [{"max_lost": 1}, {"max_lost": -0.1}, {"max_lost": "a"}, {"decay": 1}, {"decay": -1}])
def test_energy_refuses_wrong_values(wrong):
    with pytest.raises(OptionError, match="Energy got"):
        Energy(**wrong)


RULES = [TopN(2), Threshold(epsilon=1.0), Threshold(epsilon=5.0, max_lost=0.5)]


@pytest.mark.parametrize("rule", [*RULES, Threshold()])
@pytest.mark.parametrize("num_rows", [0, 1, 9])
def test_no_row_of_a_zero_gradient_is_kept(rule, num_rows):
    choose = selector(rule)
    for _ in range(2):
        ids, *_ = choose((torch.zeros(num_rows, 3),)).on_host()
        assert len(ids) == 0


@pairwise(rule=[*RULES, Threshold()], broken=[math.nan, math.inf, 1e30], among=["others", "zeros"])
def test_a_non_finite_row_is_kept(rule, broken, among):
    for row in (0, 4, 8):
        dout = random_gradient(9, 3).float() if among == "others" else torch.zeros(9, 3)
        dout[row, 1] = broken
        ids = chosen(rule, dout)
        assert row in ids


@pytest.mark.parametrize(
    "make",
    [
        lambda: TopN(0),
        lambda: TopN(-3),
        lambda: TopN(2.5),
        lambda: TopN(True),
        lambda: Threshold(epsilon=0),
        lambda: Threshold(epsilon=math.nan),
        lambda: Threshold(epsilon="1e-3"),
        lambda: Threshold(max_lost=1.5),
        lambda: Threshold(max_lost=-0.1),
        lambda: Threshold(calibration_passes=0),
    ],
)
def test_settings_out_of_range_are_refused(make):
    with pytest.raises(OptionError, match=r"got \w+=.*; expected"):
        make()


@pytest.mark.parametrize("rows", ["top_n", "", TopN, 400, None, [1, 2]])
def test_unknown_selections_are_refused_and_leave_the_model_unchanged(rows):
    model = make_llama()
    with pytest.raises(OptionError, match="expected 'exact', 'detect'"):
        sparsify(model, rows)
    assert not any("forward" in vars(layer) for layer in model.modules())


ALL_KEPT = ["exact", "detect", TopN(10**6), TopN(41), Threshold(), Threshold(epsilon=100.0, max_lost=0)]


@pytest.mark.parametrize(("rows", "has_adapter"), [*zip(ALL_KEPT, cycle([False, True]), strict=False)], ids=str)
def test_selections_that_keep_every_active_row_train_like_dense(rows, has_adapter):
    # Four texts of 11, 1, 24 and 6 tokens: 38 of 42 have a loss, and no row after the last loss row is active.
    model, batch = make_llama().double(), padded_batch(prompt=1)
    model = with_lora(model) if has_adapter else model
    dense_loss, dense = loss_and_gradients(model, batch)
    with sparsify(model, rows, keep_logits=True) as sparsified:
        loss, found = loss_and_gradients(model, batch)
        assert all(dropped.kept == dropped.active > 0 for dropped in sparsified.dropped())
        assert bool(sparsified.dropped()) == (not isinstance(rows, str))
    assert torch.equal(dense_loss, loss)
    assert_same_gradients(dense, found, 1e-10, 1e-15)


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_dropped_rows_are_reported_by_layer(reentrant):
    model, batch = make_llama().double().train(), padded_batch() | {"use_cache": False}
    if reentrant is not None:
        checkpoint_activations(model, reentrant)
    _, dense = loss_and_gradients(model, batch)
    with sparsify(model, TopN(7), keep_logits=True) as sparsified:
        _, found = loss_and_gradients(model, batch)
        layers = set(sparsified.layers)
        reports = sparsified.dropped()
    assert {name for report in reports for name in report.layers} == layers
    assert {report.kept for report in reports} == {7}
    assert {(report.passes, report.rows) for report in reports} == {(1, 4 * 24)}
    assert all(0 < report.lost_energy < 1 for report in reports if report.active > 7)
    assert any((found[name] - gradient).norm() > 0.05 * gradient.norm() for name, gradient in dense.items())


def test_lora_projections_of_one_input_share_a_selection():
    model, batch = with_lora(make_llama()), padded_batch()
    with sparsify(model, TopN(7), keep_logits=True) as sparsified:
        loss_and_gradients(model, batch)
        loss_and_gradients(model, batch)
        reports = sparsified.dropped()
    groups = {tuple(name.split(".")[-1] for name in report.layers) for report in reports}
    assert {("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("down_proj",), ("o_proj",)} <= groups
    assert {(report.passes, report.kept) for report in reports} == {(2, 14)}


def test_each_layer_finds_its_own_epsilon():
    model, batch = make_llama().double(), padded_batch()
    with sparsify(model, Threshold(calibration_passes=2, max_lost=0.05), keep_logits=True) as sparsified:
        loss_and_gradients(model, batch)
        assert {report.epsilon for report in sparsified.dropped()} == {None}
        loss_and_gradients(model, batch)
        found = [report.epsilon for report in sparsified.dropped()]
        assert len(set(found)) > 1
        before = sum(report.kept for report in sparsified.dropped())
        loss_and_gradients(model, batch)
        reports = sparsified.dropped()
    assert [report.epsilon for report in reports] == found
    assert sum(report.active - report.kept for report in reports) > 0
    assert sum(report.kept for report in reports) > before
    assert all(0 <= report.lost_energy <= 0.05 / 3 + 1e-12 for report in reports)
