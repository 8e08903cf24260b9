"""Inputs of layers that are kept for the backward pass are kept once, and keep nothing else alive."""

import weakref

import torch

from sebp_edge.engine.sparse.sparsify import KeptInputs
from sebp_edge.ops import detect


def test_kept_inputs_keep_no_input_alive():
    kept, rows = KeptInputs(), torch.tensor([1, 2])
    x = torch.randn(2, 5, 3)
    first = kept.keep(x, x, rows)
    assert kept.keep(x, x, rows) is first
    x.add_(1)
    assert torch.equal(kept.keep(x, x, rows), x.flatten(0, 1)[1:3])
    assert kept.keep(x, x, detect).data_ptr() == x.data_ptr()
    alive = weakref.ref(x)
    del x
    assert alive() is None
