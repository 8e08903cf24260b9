"""A trained adapter is scaled down until general text is hardly worse; tests/know tries it in adaptations."""

import pytest

from sebp_edge.engine.training.scale_down import largest_scale


@pytest.mark.parametrize(
    ("rise", "power", "scale"),
    [(0.014, 2, 1.0), (0.016, 2, 0.95), (0.03, 2, 0.7), (0.03, 4, 0.8), (0.0299, 1, 0.5), (9, 2, 0.5)],
)
def test_the_scale_is_the_largest_with_little_loss_on_general_text(rise, power, scale):
    tried = []

    def is_little(scale):
        tried.append(scale)
        return rise * scale**power <= 0.015

    assert largest_scale(is_little) == pytest.approx(scale)
    assert len(tried) <= 5
