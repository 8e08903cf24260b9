"""A store and a record."""

import pytest
from stored_adapter import RECORD

from sebp_edge import AdapterRecord, AdapterStore


@pytest.fixture
def store(tmp_path):
    return AdapterStore(tmp_path / "data")


@pytest.fixture
def record():
    return AdapterRecord(**RECORD)
