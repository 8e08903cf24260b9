"""Fixtures of the tests of exports."""

import pytest


@pytest.fixture
def no_memory(machine):
    """Leaves an export no memory to run the model in, which then takes half of the time."""
    machine.has_memory(1000)
