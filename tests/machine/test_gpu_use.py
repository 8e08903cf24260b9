"""What others compute on a GPU, through a stand-in for NVML: a library in C with the interface that is documented."""

import ctypes
import os
import random
import shutil
import subprocess

import pytest

from sebp_edge.errors import MachineError
from sebp_edge.machine import politeness
from sebp_edge.machine.host import driver_release
from sebp_edge.machine.politeness import LEFT_SECONDS, TAKEN, TAKEN_SECONDS, GpuUse

SOURCE = r"""
#include <string.h>
typedef unsigned int uint;
typedef struct { uint pid; unsigned long long timeStamp; uint smUtil, memUtil, encUtil, decUtil; } sample;
static sample samples[64]; static unsigned int count; static int device, fails; static char wanted[96];
void set_fails(int code) { fails = code; }
void set_gpu(const char *uuid) { strcpy(wanted, uuid); }
void clear(void) { count = 0; }
void add(uint pid, unsigned long long time, uint use) {
    sample s = {pid, time, use, 1, 2, 3};
    samples[count++] = s;
}
int nvmlInit_v2(void) { return 0; }
int nvmlSystemGetDriverVersion(char *into, uint size) { strncpy(into, "570.86.15", size); return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **found) {
    *found = &device;
    return strcmp(uuid, wanted) ? 2 : 0;
}
int nvmlDeviceGetProcessUtilization(void *handle, sample *into, unsigned int *size, unsigned long long since) {
    unsigned int found = 0;
    if (fails) return fails;
    if (handle != &device) return 2;
    for (unsigned int i = 0; i < count; i++)
        if (samples[i].timeStamp > since) { if (found == *size) return 7; into[found++] = samples[i]; }
    *size = found;
    return found ? 0 : 6;
}
"""
UUID = "1b2c3d4e-0000-1111-2222-333344445555"


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or os.name != "posix":
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "nvml.so", folder / "nvml.c"], check=True)
    return folder / "nvml.so"


@pytest.fixture
def nvml(library, load_driver):
    """The stand-in, outside of a container."""
    loaded = ctypes.CDLL(str(library))
    loaded.add.argtypes = [ctypes.c_uint, ctypes.c_ulonglong, ctypes.c_uint]
    loaded.clear(), loaded.set_fails(0), loaded.set_gpu(f"GPU-{UUID}".encode())
    load_driver(lambda name: loaded)
    return loaded


def test_the_release_of_the_driver_is_read(nvml):
    assert driver_release.__wrapped__() == "570.86.15"


def test_without_a_driver_there_is_no_release(load_driver):
    load_driver(_missing)
    assert driver_release.__wrapped__() == ""


@pytest.fixture
def namespace(tmp_path):
    """The namespace of processes outside of containers."""
    (tmp_path / "pid").symlink_to("pid:[4026531836]")
    return tmp_path / "pid"


def test_the_use_of_each_other_process_is_its_mean_since_the_last_look(nvml, namespace):
    use, time = GpuUse(UUID, namespace), 2**40
    assert use.by_others() == 0
    mine, one, other = os.getpid(), os.getpid() + 1, os.getpid() + 2
    shares = [random.randint(0, 30) for _ in range(4)]
    for number, share in enumerate(shares):
        nvml.add(one, time + number, share)
    nvml.add(other, time + 9, 40)
    nvml.add(mine, time + 10, 99)
    assert use.by_others() == pytest.approx(sum(shares) / 4 + 40)
    assert use.by_others() == 0  # all of this was seen
    nvml.add(other, time + 11, 7)
    assert use.by_others() == 7


def test_the_gpu_is_taken_after_some_seconds_and_left_after_more(nvml, namespace, monkeypatch):
    now = [random.uniform(0, 1e6)]
    monkeypatch.setattr(politeness.time, "monotonic", lambda: now[0])
    use, time = GpuUse(UUID, namespace), 1

    def after(seconds, share):
        nonlocal time
        now[0] += seconds
        time += 1
        nvml.clear()
        nvml.add(os.getpid() + 1, time, share)
        return use.is_taken

    assert not after(0, TAKEN)
    assert not after(TAKEN_SECONDS - 0.1, TAKEN - 1)  # a short use counts for nothing
    assert not after(1, TAKEN)
    assert not after(TAKEN_SECONDS - 1.1, 100)
    assert after(0.2, TAKEN)
    assert after(1, 0)
    assert after(LEFT_SECONDS - 1.1, 0)
    assert after(0.05, TAKEN)  # used again
    assert after(LEFT_SECONDS - 0.1, 0)
    assert not after(0.2, 0)


@pytest.mark.parametrize("problem", ["another GPU", "not supported", "no library", "an old library", "a container"])
def test_a_driver_that_does_not_tell_is_an_error_of_one_sentence(nvml, load_driver, namespace, problem):
    match problem:
        case "another GPU":
            nvml.set_gpu(b"GPU-0")
        case "not supported":
            nvml.set_fails(3)
        case "no library":
            load_driver(_missing)
        case "an old library":
            load_driver(lambda name: object())
        case "a container":
            namespace.unlink()
            namespace.symlink_to("pid:[4026532999]")
    with pytest.raises(MachineError, match=r"^[A-Z].*\.$"):
        GpuUse(UUID, namespace)


def _missing(name):
    raise OSError(f"{name}: cannot open shared object file")
