"""The benchmark of whole models, in small shapes: it measures what is right, and nothing else."""

from contextlib import contextmanager

import pytest
import torch

import models
from sebp_edge.insight.bench.ways import DENSE, Way

CPU = torch.device("cpu")


@pytest.fixture(params=list(models.tiny_cases()), ids=lambda case: case.model)
def case(request):
    return request.param


def test_tiny_shapes_are_measured_and_shown(capsys):
    models.main(["--tiny"])
    said = capsys.readouterr().out
    assert said.count("dense / drop-in: backward") == len(list(models.tiny_cases()))


def test_each_arm_gets_its_row(case):
    dense, ours = models.measure(case, CPU)
    assert (dense["way"], ours["way"]) == ("dense padded", "drop-in")
    for row in (dense, ours):
        assert 0 < row["backward_ms"] < row["step_ms"]
        assert 0 < row["gradient_error"] < 0.1  # bf16 against fp32: never exactly right
        assert row["gpu_backward_ms"] is None
        assert 0 < row["tokens"] < case.batch_size * case.context_length


def test_wrong_gradients_of_one_small_parameter_are_refused(case):
    model, (batch, _) = models.make_model(case.config, CPU), models.make_batch(case, CPU)

    @contextmanager
    def half_a_gradient(model):
        handle = list(model.parameters())[-1].register_hook(lambda gradient: gradient / 2)
        with DENSE.attach(model) as dense:
            yield dense
        handle.remove()

    arms = (DENSE, Way("half", half_a_gradient, DENSE.loss))
    last = list(dict(model.named_parameters()))[-1]
    with pytest.raises(models.WrongGradients, match=f"half: the gradient of {last} is off"):
        models.gradient_errors(model, batch, arms)


def test_the_reference_sees_the_same_texts_with_less_padding(case):
    batch, tokens = models.make_batch(case, CPU)
    shorter = models.without_padding(batch)
    assert shorter.input_ids.shape[1] < case.context_length
    assert int(shorter.input_ids.ne(0).sum()) == int(batch.input_ids.ne(0).sum()) == tokens


def test_tiny_shapes_are_not_recorded(capsys):
    with pytest.raises(SystemExit):
        models.main(["--tiny", "--record"])
    assert "tiny shapes are no evidence" in capsys.readouterr().err


def test_the_true_shapes_are_the_models_own():
    bert, *_, llama = models.cases()
    meta = torch.device("meta")
    sizes = [sum(p.numel() for p in models.make_model(case.config, meta).parameters()) for case in (bert, llama)]
    assert sizes == [109_483_778, 3_212_749_824]
