"""The doctor's findings, on this machine and on simulated ones."""

from importlib.metadata import version
from types import SimpleNamespace

from fake_gpu import FakeCuda, simulate

from sebp_edge.cli import doctor_checks as doctor


def findings():
    return {finding.subject: finding for finding in doctor.examine()}


def test_everything_an_adaptation_depends_on_is_checked(own_data_folder):
    found = findings()
    assert list(found) == [
        *("python", "libraries", "device", "driver", "kernels", "memory", "model cache", "adapters"),
    ]
    assert f"torch {version('torch')}" in found["libraries"].state
    assert "free of" in found["memory"].state
    assert found["adapters"].state == f"{own_data_folder}, 0 adapters"
    assert not own_data_folder.exists()


def test_a_cuda_build_without_a_driver_is_a_problem(machine, monkeypatch):
    machine.has_gpus(0, cuda="13.0")
    monkeypatch.setattr(doctor, "driver_release", lambda: "")
    driver = findings()["driver"]
    assert driver.state == "torch is built for CUDA 13.0; no NVIDIA driver found"
    assert "update its driver" in driver.problem


class T4(FakeCuda):
    def is_available(self):
        return True

    def device_count(self):
        return 1

    def get_device_properties(self, device):
        return SimpleNamespace(name="Tesla T4", total_memory=int(15.8e9), major=7, minor=5)

    def is_bf16_supported(self, including_emulation):
        return False


def test_a_gpu_without_bf16_is_a_problem(monkeypatch):
    simulate(monkeypatch, T4())
    found = doctor._device()
    assert found.state == "Tesla T4, 15.8 GB, compute capability 7.5"
    assert "fp32 and take twice the memory" in found.problem


def test_a_folder_without_access_or_space_is_a_problem(tmp_path, mount_disk):
    assert doctor._write_problem(tmp_path / "not" / "yet") is None
    (tmp_path / "file").touch()
    assert "cannot be written to: Not a directory" in doctor._write_problem(tmp_path / "file" / "in it")
    assert doctor._write_problem(mount_disk("300m")) == "It has only 0.3 GB of free disk space."
