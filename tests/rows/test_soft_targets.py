"""Soft targets go with their tokens: filled, moved and cut."""

from dataclasses import replace

import pytest
import torch
from against_dense import padded_batch
from builders import gathered

from sebp_edge.engine.sparse.rows.buckets import Bucket
from sebp_edge.engine.sparse.rows.soft_targets import SoftTargets
from sebp_edge.ops import Prefixes


def test_all_tensors_move_to_another_device():
    tokens = replace(gathered(padded_batch()), soft_targets=SoftTargets.unused(38, 3))
    prefixes = Prefixes.of(tokens.cu_seqlens, torch.tensor([-1, 0, -1, -1]))
    moved = replace(tokens, prefixes=prefixes).to("meta")
    assert all(part.is_meta for part in (*moved.soft_targets, *moved.prefixes))
    others = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    assert len(others) == 7 and all(tensor.is_meta for tensor in others)
    assert [id(tensor) for tensor in moved.tensors] == [
        *map(id, others),
        *map(id, (*moved.soft_targets, *moved.prefixes)),
    ]
    assert moved.sizes == gathered(padded_batch()).sizes


@pytest.mark.parametrize("sizes", [None, (257, 9, 40, 100)], ids=["exact", "much larger"])
def test_filler_shares_its_target_with_no_other(sizes):
    tokens = gathered(padded_batch(prompt=5))
    count = len(tokens.targets)
    soft = SoftTargets(torch.arange(3 * count).view(-1, 3), torch.rand(count, 3) / 3)
    taught = replace(tokens, soft_targets=soft)
    filled = taught.filled(Bucket(*sizes or tokens.sizes))
    real, (ids, shares) = filled.weights == 1, filled.soft_targets
    assert torch.equal(ids[real], soft.ids)
    assert torch.equal(shares[real], soft.shares)
    assert not shares[~real].any() and not ids[~real].any()
    assert ids.dtype == torch.int64 and shares.dtype == torch.float32
    assert filled.num_soft_targets == taught.num_soft_targets == 3
    assert taught.first_token().soft_targets is None and taught.first_token(5).num_soft_targets == 5


def test_tokens_without_soft_targets_have_none_after_any_change():
    tokens = gathered(padded_batch())
    for changed in (tokens, tokens.filled(Bucket(257, 9, 40, 100)), tokens.to("cpu"), tokens.first_token()):
        assert changed.soft_targets is None and changed.num_soft_targets == 0
