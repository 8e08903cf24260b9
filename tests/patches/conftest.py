"""Fixtures for tests of patches."""

import pytest

from sebp_edge.engine.sparse import hoist
from sebp_edge.ops.frozen_weights import Matrices


@pytest.fixture
def fits_flash_attention(monkeypatch):
    """Attaches our attention blocks where there is no GPU, too."""
    monkeypatch.setattr(hoist, "_fits_flash_attention", lambda decoder: True)


@pytest.fixture
def rank_products(monkeypatch):
    """The columns of each group of adapters whose last product is computed during the test."""
    products, parts = [], Matrices.parts
    monkeypatch.setattr(Matrices, "parts", lambda weights: products.append(weights.columns) or parts(weights))
    return products
