"""Passes are compared block by block: rounding does not grow from one to the next, and what differs is found."""

import random

import pytest
import torch
from builders import SIZES, make_llama
from model_families import make_gemma4

from sebp_edge.engine.sparse.block_by_block import BlockByBlock
from sebp_edge.engine.sparse.hoist_if_exact import hoist_if_exact


def test_a_model_in_which_rounding_grows_from_block_to_block_is_hoisted():
    kinds = ["sliding_attention", "full_attention"] * 12
    model = make_gemma4(num_hidden_layers=24, layer_types=kinds).to(torch.bfloat16)
    sequences = [random.choices(range(7, SIZES["vocab_size"]), k=length) for length in (48, 31)]
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.q_norm.weight.mul_(2)  # sharper attention, whose rounding grows whatever the text is
        ids = torch.tensor(sequences[:1])
        rounded = model.base_model(input_ids=ids).last_hidden_state
        exact = model.float().base_model(input_ids=ids).last_hidden_state
    # More than is allowed of a block.
    assert (rounded - exact).abs().mean() > 0.1 * exact.abs().mean()
    hoisted, reason = hoist_if_exact(model.to(torch.bfloat16), sequences, 0)
    assert reason is None
    hoisted.remove()


@pytest.mark.parametrize("changed", [None, "embedding", "first block", "last block"])
def test_what_differs_is_found_where_it_is(changed):
    model, ids = make_llama().eval(), torch.arange(7, 20)[None]
    blocks = BlockByBlock(model, torch.arange(ids.shape[1]))
    first, last = model.model.layers[0], model.model.layers[-1]
    with torch.no_grad():
        with blocks.recording():
            expected = model.base_model(input_ids=ids).last_hidden_state
        if changed == "embedding":
            model.get_input_embeddings().weight.mul_(1.5)
        elif changed is not None:
            (first if changed == "first block" else last).mlp.down_proj.weight.mul_(-20)
        with blocks.repeating():
            found = model.base_model(input_ids=ids).last_hidden_state
    assert (blocks.difference is not None) == (changed in ("embedding", "first block"))
    # Of the last block nothing is read again.
    assert torch.equal(found, expected) == (changed != "last block")
    assert not any(block._forward_pre_hooks for block in model.model.layers)
