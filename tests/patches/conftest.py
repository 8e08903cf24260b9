"""Fixtures for tests of patches."""

import pytest

from sebp_edge.sparse.patches.lora import LoraGroup


@pytest.fixture
def rank_products(monkeypatch):
    """The columns of each group of adapters whose last product is computed during the test."""
    products, matrices = [], LoraGroup.matrices
    monkeypatch.setattr(LoraGroup, "matrices", lambda group: products.append(group.columns) or matrices(group))
    return products
