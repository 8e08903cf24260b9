"""Checks within a pass: at every layer, forward and backward, without changing a bit."""

import pytest
import torch
from builders import make_llama

from sebp_edge.basics.stopping import PauseRequested, StopRequested
from sebp_edge.engine.sparse.patches.stops import Stops


class Ending:
    """A check that ends what calls it the given time; None for never."""

    def __init__(self, at=None, error=StopRequested):
        self.calls, self.at, self.error = 0, at, error

    def __call__(self):
        self.calls += 1
        if self.calls == self.at:
            raise self.error


def gradients(model, ids):
    return torch.autograd.grad(model(ids, labels=ids).loss, [*model.parameters()])


def test_checks_change_no_bit_and_run_at_every_layer_forward_and_backward():
    model, ids = make_llama(), torch.randint(3, 320, (3, 17))
    expected, check = gradients(model, ids), Ending()
    with Stops(model, check):
        found = gradients(model, ids)
    linear = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    assert check.calls == 2 * linear
    assert all(map(torch.equal, expected, found))
    assert all(map(torch.equal, expected, gradients(model, ids)))
    assert check.calls == 2 * linear


@pytest.mark.parametrize("at", [1, 5, 16, 20, 30])
def test_a_check_ends_a_pass_wherever_it_is_and_the_next_pass_is_the_same(at):
    model, ids = make_llama(), torch.randint(3, 320, (2, 11))
    expected = gradients(model, ids)
    with Stops(model, Ending(at, PauseRequested)), pytest.raises(PauseRequested):
        gradients(model, ids)
    assert all(map(torch.equal, expected, gradients(model, ids)))
