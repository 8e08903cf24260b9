"""Comparison of replacements with the model's code: only rounding is tolerated, and running out of memory is raised."""

import pytest
import torch
from builders import make_llama

from sebp_edge.engine.sparse.patches.agreement import (
    FULL_PRECISION,
    OUTPUTS,
    disagreement,
    find_mismatch,
    gradients_agree,
    varied,
)


def layer(dtype=torch.float32):
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, FULL_PRECISION), (torch.float32, FULL_PRECISION), (torch.bfloat16, OUTPUTS)],
)
def test_the_tolerance_is_that_of_the_models_precision(dtype, tolerance):
    model, expected = layer(dtype), torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    assert disagreement(model, expected, expected * (1 + 0.99 * tolerance)) is None
    assert disagreement(model, expected, expected * (1 + 1.01 * tolerance)) == pytest.approx(1.01 * tolerance)


def test_autocast_has_the_tolerance_of_low_precision():
    model, expected = layer(), torch.ones(3)
    assert disagreement(model, expected, expected + 5e-3)
    with torch.autocast("cpu", torch.bfloat16):
        assert disagreement(model, expected, expected + 5e-3) is None


def test_nan_agrees_with_nothing():
    nan = torch.full((3,), torch.nan)
    assert find_mismatch(layer(), lambda: torch.ones(3), lambda: nan) == "results differ by nan % on a trial batch"
    assert find_mismatch(layer(), lambda: nan, lambda: nan) is not None
    assert not gradients_agree([nan], [nan])


def test_gradients_are_compared_relative_to_their_own_norm_and_that_of_all():
    large, small = torch.full((4,), 1e3), torch.full((4,), 1e-3)
    assert gradients_agree([large, small], [large, 2 * small])
    assert not gradients_agree([small, small], [small, 1.001 * small])
    assert not gradients_agree([large, small], [1.001 * large, small])


def test_running_out_of_memory_is_raised_and_restores_the_modes():
    model = layer().train()
    model[0].eval()

    def run_out():
        assert not any(part.training for part in model.modules())
        assert not torch.is_grad_enabled()
        raise torch.OutOfMemoryError("no more")

    with pytest.raises(torch.OutOfMemoryError):
        find_mismatch(model, run_out, run_out)
    assert [part.training for part in model.modules()] == [True, False, True]


def test_varied_weights_are_put_back_bit_by_bit():
    model = make_llama()
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight.zero_()
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    with pytest.raises(KeyError), varied(model):
        assert all(bool((tensor != 0).all()) for tensor in model.parameters())
        assert not any(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())
        raise KeyError
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())
