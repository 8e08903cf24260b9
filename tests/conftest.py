"""Settings for the whole session. `shared_fixtures` has what tests use, and imports what takes seconds."""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

import evidence

# Set before torch and transformers are imported, and inherited by the processes that tests start. No test reaches the
# network, and each process uses one thread, since a second one only waits with models this small.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = os.environ.get("SEBP_EDGE_TEST_THREADS", "1")
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# Else each run would rewrite the assertions of all tests, and each process that tests start compile what it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A background job of a shell ignores SIGINT, and so would processes that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Stores flush each file that they write. On a disk, tests would wait for that about as long as they compute.
IN_MEMORY = Path("/dev/shm")
can_hold = os.access(IN_MEMORY, os.W_OK) and not os.statvfs(IN_MEMORY).f_flag & os.ST_NOEXEC
if can_hold and shutil.disk_usage(IN_MEMORY).free > 4 * 10**9:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))

# Failed assertions in these modules show the compared values, as in a test file.
pytest.register_assert_rewrite("against_dense", "command", "damage", "memory_plans", "random_cases")


def pytest_xdist_auto_num_workers(config):
    """One process per core, at most eight; tests named one by one run in this process, which a debugger needs."""
    if all("::" in argument for argument in config.args):
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(cores, 8)


def pytest_collection_modifyitems(items):
    """Leaves the quick half, `-m "not slow"`, the first case of each parametrised test."""
    seen = set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        if test in seen:
            item.add_marker(pytest.mark.slow)
        seen.add(test)


def pytest_addoption(pluginmanager):
    """Loads the fixtures, before other conftests import what they need, unless this process only hands out tests."""
    options = pluginmanager.get_plugin("pytestconfig").known_args_namespace
    runs_here = options.usepdb or options.collectonly or any("::" in argument for argument in options.file_or_dir)
    if runs_here or "PYTEST_XDIST_WORKER" in os.environ or not getattr(options, "numprocesses", None):
        pluginmanager.import_plugin("shared_fixtures")


def pytest_configure():
    if os.environ.get("SEBP_EDGE_RECORD"):
        evidence.machine()  # fails before the tests, not after them, if there is no GPU


def pytest_runtest_setup(item):
    """Skips tests that need a GPU where there is none, and those that need all of its memory where others run."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU, and there is none here")
    if item.get_closest_marker("fills_gpu") and int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        pytest.skip("has the GPU's memory for itself; run it with -n 0")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    """Frees what a test of large matrices has left in torch's cache, before smaller ones settle there."""
    if item.get_closest_marker("gpu"):
        import torch

        cached = torch.cuda.is_initialized() and torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if cached > 2**30:
            torch.cuda.empty_cache()


def pytest_terminal_summary(terminalreporter):
    """Records the outcomes of the tests on this GPU in FILE, if SEBP_EDGE_RECORD=FILE is set."""
    file = os.environ.get("SEBP_EDGE_RECORD")
    # A worker process knows only its own tests.
    if file and not os.environ.get("PYTEST_XDIST_WORKER"):
        evidence.record_tests(terminalreporter.stats, Path(file))
