"""The processes of benchmarks in tests: forked from one that has torch imported."""

import subprocess
from pathlib import Path

import pytest
from command import IS_COLD, python, start

import evidence


@pytest.fixture
def warm(monkeypatch):
    """Python processes that a benchmark starts with -c or -m import nothing anew."""
    if IS_COLD:
        return
    bench = Path(evidence.__file__).parent
    python("")  # starts what the others are forked from

    def popen(command, **options):
        _, option, code, *arguments = map(str, command)
        run = code if option == "-c" else f"import runpy; runpy.run_module({code!r}, run_name='__main__')"
        return start([f"import sys; sys.path.insert(0, {str(bench)!r}); {run}", *arguments], **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
