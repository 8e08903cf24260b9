"""A process whose own memory does not matter."""

import pytest

from sebp_edge.machine import process


@pytest.fixture
def no_process_memory(monkeypatch):
    """Sets the memory of the process to zero, since it changes from call to call; then the exact budget matters."""
    monkeypatch.setattr(process, "resident", lambda: 0)
    monkeypatch.setattr(process, "peak_resident", lambda: 0)
