"""A store and a record."""

import pytest
from stored_adapter import RECORD

from sebp_edge.adapters.record import AdapterRecord
from sebp_edge.adapters.store import AdapterStore


@pytest.fixture
def store(tmp_path):
    return AdapterStore(tmp_path / "data")


@pytest.fixture
def record():
    return AdapterRecord(**RECORD)
