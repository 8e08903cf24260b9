"""The job object of Windows, with a stand-in for its library: this has never run on Windows."""

import ctypes
import random
import subprocess
import sys

import psutil
import pytest

from sebp_edge.basics.children import ExtendedLimits, JobObject
from sebp_edge.errors import MachineError

PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
COMMAND = [sys.executable, "-c", "input()"]


class Kernel32:
    """Stands for kernel32: notes calls, and returns what the test says."""

    def __init__(self, **results):
        self.calls, self._results = [], {"CreateJobObjectW": random.randrange(1, 2**31)} | results

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, *(getattr(each, "value", each) for each in arguments)))
            return self._results.get(name, 1)

        setattr(self, name, call)
        return call

    def named(self, name):
        return [call for call in self.calls if call[0] == name]


def test_a_job_object_kills_all_in_it_when_its_handle_is_closed():
    kernel32 = Kernel32()
    JobObject(kernel32)
    ((_, job, kind, limits, size),) = kernel32.named("SetInformationJobObject")
    assert (job, kind, size) == (kernel32._results["CreateJobObjectW"], 9, ctypes.sizeof(ExtendedLimits))
    assert limits._obj.LimitFlags == 0x2000


def test_its_layout_is_that_of_64_bit_windows():
    if ctypes.sizeof(ctypes.c_void_p) != 8:
        pytest.skip("this Python has 32 bits")
    assert ctypes.sizeof(ExtendedLimits) == 144
    assert ExtendedLimits.IoInfo.offset == 64
    assert ExtendedLimits.ProcessMemoryLimit.offset == 112


def test_a_process_is_put_into_it_and_killed_with_it():
    kernel32 = Kernel32()
    children = JobObject(kernel32)
    process = children.start(COMMAND, **PIPES)
    ((_, job, handle),) = kernel32.named("AssignProcessToJobObject")
    assert (job, handle) == (kernel32._results["CreateJobObjectW"], None)  # there are no handles here
    process.kill()  # what the stand-in does not
    children.kill(process)
    assert [call[0] for call in kernel32.calls[-4:]] == [
        "TerminateJobObject",
        "CloseHandle",
        "CreateJobObjectW",
        "SetInformationJobObject",
    ]
    for stream in (process.stdin, process.stdout):
        stream.close()


@pytest.mark.parametrize("refused", ["CreateJobObjectW", "SetInformationJobObject", "AssignProcessToJobObject"])
def test_no_process_is_left_outside_of_it(refused):
    before = psutil.Process().children()
    with pytest.raises(MachineError, match="Windows refuses"):
        JobObject(Kernel32(**{refused: 0})).start([sys.executable, "-c", "import time; time.sleep(1000)"])
    assert psutil.Process().children() == before
