"""A trained adapter is scaled down until general text is hardly worse; tests/test_know.py tries it in adaptations."""

from types import SimpleNamespace

import pytest

from sebp_edge.training import restraint
from sebp_edge.training.evaluation import HeldOutLoss


@pytest.mark.parametrize(
    ("rises", "scale"), [((0.014,), 1.0), ((0.03, 0.01), 0.7), ((0.016, 0.0151, 0.01), 0.9), ((9, 9), 0.5)]
)
def test_the_scale_is_the_first_with_little_loss_on_general_text(monkeypatch, rises, scale):
    losses, tried = iter([HeldOutLoss(nats={0: 1 + rise}, tokens={0: 1}) for rise in rises]), []
    monkeypatch.setattr(restraint, "evaluate", lambda learner, general: next(losses))
    monkeypatch.setattr(restraint, "restore_scaled", lambda adaptation, state, scale: tried.append(scale))
    monkeypatch.setattr(restraint, "snapshot", lambda adaptation: ["scaled"])
    learner, progress = SimpleNamespace(adaptation=None), SimpleNamespace(best_state=["trained"])
    assert restraint.restrain(learner, progress, None, 1.0) == pytest.approx(scale)
    assert len(tried) == len(rises) - 1 and tried == sorted(tried, reverse=True)
    assert progress.best_state == ["scaled"]
