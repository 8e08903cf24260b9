"""A trained adapter is scaled down until general text is hardly worse; tests/know tries it in adaptations."""

from types import SimpleNamespace

import pytest

from sebp_edge.training import scale_down
from sebp_edge.training.evaluation import HeldOutLoss


@pytest.mark.parametrize(
    ("rise", "power", "scale"),
    [(0.014, 2, 1.0), (0.016, 2, 0.95), (0.03, 2, 0.7), (0.03, 4, 0.8), (0.0299, 1, 0.5), (9, 2, 0.5)],
)
def test_the_scale_is_the_largest_with_little_loss_on_general_text(monkeypatch, rise, power, scale):
    def evaluate(learner, general):
        return HeldOutLoss(nats={0: 1 + rise * tried[-1] ** power}, tokens={0: 1})

    tried = []
    monkeypatch.setattr(scale_down, "MAX_RISE", 0.015)
    monkeypatch.setattr(scale_down, "evaluate", evaluate)
    monkeypatch.setattr(scale_down, "restore_scaled", lambda adaptation, state, scale: tried.append(scale))
    monkeypatch.setattr(scale_down, "snapshot", lambda adaptation: ["scaled"])
    learner, progress = SimpleNamespace(adaptation=None), SimpleNamespace(best_state=["trained"])
    assert scale_down.scale_down(learner, progress, None, 1.0) == pytest.approx(scale)
    assert tried[-1] == pytest.approx(scale) and len(tried) <= 6
    assert progress.best_state == ["scaled"]
