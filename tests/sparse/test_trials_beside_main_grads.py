"""Trials leave gradients alone that fused adapters add to by themselves, in `main_grad`."""

import pytest
import torch
from against_dense import padded_batch, with_adapter
from builders import hoist, make_llama

from sebp_edge.research import ActiveTokens, RowPlan


@pytest.mark.slow
def test_a_trial_adds_nothing_to_main_grads(kernels, fused_modules):
    model = with_adapter(make_llama(num_hidden_layers=1))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    flat = torch.zeros(sum(parameter.numel() for parameter in trained))
    for parameter, part in zip(trained, flat.split([parameter.numel() for parameter in trained]), strict=True):
        parameter.main_grad = part.view_as(parameter)
    # Rows without a loss, so that the last layer's trial runs.
    batch = padded_batch(lengths=(14,), prompt=6)
    tokens = ActiveTokens.gather(batch["input_ids"], RowPlan.from_labels(batch["labels"]))
    with hoist(model) as hoisted:
        hoisted.row_losses(tokens).sum().backward()
        first = flat.clone()
        flat.zero_()
        for parameter in trained:
            parameter.grad = None
        hoisted.row_losses(tokens).sum().backward()
    given = [parameter.grad for parameter in trained if parameter.grad is not None]
    assert first.isfinite().all() and torch.equal(first, flat)
    assert flat.any() or given
