"""Fixtures for tests of patches."""

import pytest

from sebp_edge.engine.sparse import hoist
from sebp_edge.engine.sparse.patches.fused_lora import LoraGroup


@pytest.fixture
def fits_flash_attention(monkeypatch):
    """Attaches our attention blocks where there is no GPU, too."""
    monkeypatch.setattr(hoist, "_fits_flash_attention", lambda decoder: True)


@pytest.fixture
def rank_products(monkeypatch):
    """The columns of each group of adapters whose last product is computed during the test."""
    products, matrices = [], LoraGroup.matrices
    monkeypatch.setattr(LoraGroup, "matrices", lambda group: products.append(group.columns) or matrices(group))
    return products
