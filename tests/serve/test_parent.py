"""How soon a server ends after its app, and that no other process is taken for that."""

import subprocess
import sys

import psutil
from served import wait_until

from sebp_edge.serve.parent_process import Parent
from sebp_edge.serve.supervisor import _SECONDS_BETWEEN_LOOKS as LOOKS
from sebp_edge.serve.supervisor import END_SECONDS


def test_it_ends_within_2_s_on_a_machine_that_does_nothing_else():
    """MCP's client sends a signal then."""
    assert END_SECONDS + 2 * LOOKS < 2


def test_a_parent_is_the_process_that_started_then():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = psutil.Process(child.pid).create_time()
    known, reused = Parent(child.pid, started), Parent(child.pid, started - 60)
    assert known.is_alive()
    assert not reused.is_alive()
    child.kill()
    wait_until(lambda: not known.is_alive())  # a zombie, since nobody has waited for it
    child.stdin.close()
    child.wait()
    assert not Parent(2**22 + 1).is_alive()
