"""The memory of a process as tests want it."""

from types import SimpleNamespace

import pytest

from sebp_edge.machine import process


@pytest.fixture
def process_memory(monkeypatch):
    """The bytes of this process, `used`, that only the test changes; the real ones change from call to call."""
    memory = SimpleNamespace(used=0)
    monkeypatch.setattr(process, "resident", lambda: memory.used)
    monkeypatch.setattr(process, "peak_resident", lambda: memory.used)
    return memory
