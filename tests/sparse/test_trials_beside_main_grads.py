"""Trials leave gradients alone that fused adapters add to by themselves, in `main_grad`."""

import random

import pytest
import torch
from against_dense import with_adapter
from builders import IGNORE, make_llama

from sebp_edge.engine.sparse.hoist import Hoisted
from sebp_edge.engine.sparse.rows.batches import pack
from sebp_edge.values.example import Example


@pytest.mark.slow
def test_a_trial_adds_nothing_to_main_grads(kernels, fused_modules):
    model = with_adapter(make_llama(num_hidden_layers=1))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    flat = torch.zeros(sum(parameter.numel() for parameter in trained))
    for parameter, part in zip(trained, flat.split([parameter.numel() for parameter in trained]), strict=True):
        parameter.main_grad = part.view_as(parameter)
    draw = random.Random(4)
    ids = [draw.randrange(60, 120) for _ in range(14)]
    # Rows without a loss, so that the last layer's trial runs.
    tokens = pack([Example(ids, [IGNORE] * 6 + ids[6:], 0)])
    with Hoisted(model) as hoisted:
        hoisted.row_losses(tokens).sum().backward()
        first = flat.clone()
        flat.zero_()
        for parameter in trained:
            parameter.grad = None
        hoisted.row_losses(tokens).sum().backward()
    given = [parameter.grad for parameter in trained if parameter.grad is not None]
    assert first.isfinite().all() and torch.equal(first, flat)
    assert flat.any() or given
