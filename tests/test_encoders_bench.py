"""The benchmark of encoders, in small shapes: it measures what is right, and nothing else."""

from dataclasses import replace

import pytest
import torch

import encoders
import models

CPU = torch.device("cpu")


@pytest.fixture(params=list(encoders.tiny_cases()), ids=lambda case: case.model)
def case(request):
    return request.param


def test_tiny_shapes_are_measured_and_shown(capsys):
    encoders.main(["--tiny"])
    said = capsys.readouterr().out
    assert said.count("dense / drop-in: forward") == said.count("dense / hoisted: forward") == 2
    assert said.count("backward 1.0x reached") + said.count("backward 1.0x missed") == 2


def test_each_arm_gets_its_row(case):
    rows = list(encoders.measure(case, CPU))
    assert [row["way"] for row in rows] == ["dense padded", "drop-in", "hoisted"]
    for row in rows:
        assert 0 < row["forward_ms"] < row["step_ms"]
        assert 0 < row["gradient_error"] < 0.1  # bf16 against fp32: never exactly right
        assert row["gpu_backward_ms"] is None and row["gpu_step_ms"] is None
        assert 0 < row["tokens"] < case.batch_size * case.context_length


def test_an_arm_with_wrong_gradients_is_not_timed(case, monkeypatch):
    arms_for = encoders.arms_for

    def with_half_a_loss(model, batch):
        *others, hoisted = arms_for(model, batch)
        return *others, replace(hoisted, loss=lambda handle, batch: hoisted.loss(handle, batch) / 2)

    monkeypatch.setattr(encoders, "arms_for", with_half_a_loss)
    with pytest.raises(models.WrongGradients, match=r"hoisted: the gradient of .* is off"):
        next(encoders.measure(case, CPU))


def test_tiny_shapes_are_not_recorded(capsys):
    with pytest.raises(SystemExit):
        encoders.main(["--tiny", "--record"])
    assert "tiny shapes are no evidence" in capsys.readouterr().err


def test_the_true_shapes_are_the_models_own():
    cases = list(encoders.cases())
    assert len(cases) == 20
    sizes = {case.model: models.make_model(case.config, torch.device("meta")).num_parameters() for case in cases[::10]}
    assert sizes == {"BERT-base": 109_483_778, "RoBERTa-base": 124_647_170}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and there is none here")
def test_on_a_gpu_the_graph_gets_its_row_too(case):
    rows = list(encoders.measure(case, torch.device("cuda")))
    assert [row["way"] for row in rows[2:]] == ["hoisted", "hoisted, in a graph"]
    for row in rows:
        assert row["gpu_step_ms"] > 0 and row["peak_gib"] > 0
