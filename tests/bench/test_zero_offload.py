"""The benchmark of DeepSpeed's ZeRO-2: the parts of the dense step and, with DeepSpeed installed, all of it."""

import subprocess
import sys

import pytest
import torch

import zero_offload
from models import make_batch, make_model

CPU = torch.device("cpu")


def test_a_step_has_three_parts_and_updates_the_weights():
    (case,) = zero_offload.tiny_cases()
    model, (batch, _) = make_model(case.config, CPU), make_batch(case, CPU)
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found = zero_offload.time_parts(CPU, model, batch, torch.Tensor.backward, optimizer.step, model.zero_grad)
    assert found["peak_gib"] is None
    assert 0 < found["forward_ms"] < found["step_ms"]
    assert found["backward_ms"] > 0
    assert not any(map(torch.equal, before, model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_zero_2_has_the_dense_gradients_and_is_timed_like_the_dense_step():
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install deepspeed")
    command = [sys.executable, zero_offload.__file__, "--tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("tiny BERT")]
    assert ["dense" in lines[0], "ZeRO-2" in lines[1], len(lines)] == [True, True, 2]
    assert "gradients differ by" in lines[1]


def test_tiny_shapes_are_not_recorded(capsys):
    with pytest.raises(SystemExit):
        zero_offload.main(["--tiny", "--record"])
    assert "--record is for GPU runs only" in capsys.readouterr().err


def test_the_error_without_deepspeed_states_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(zero_offload.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        zero_offload.main(["--tiny"])
    assert "DeepSpeed is not installed: pip install deepspeed" in capsys.readouterr().err
