"""Which attention blocks are replaced: the trial detects other rotary embeddings, in bf16 and at any width."""

import pytest
import torch
from against_dense import padded_batch
from builders import make_llama, seeded
from pairwise import pairwise
from transformers import AutoConfig, AutoModelForCausalLM

from sebp_edge.engine.sparse.hoist import ATTENTION, Hoisted
from sebp_edge.engine.sparse.patches import attention
from sebp_edge.engine.sparse.patches.attention import FusedAttention
from sebp_edge.engine.sparse.patches.counts import MAX_DQ_BYTES
from sebp_edge.research import ActiveTokens, RowPlan

# Families that rotate halves of heads, as ours does, and those that rotate neighbours or a part of a head.
ALIKE, OTHERS = ("llama", "mistral", "qwen3", "gemma"), ("cohere", "cohere2", "glm", "glm4", "ernie4_5", "helium")


@pairwise(head_size=[16, 64], dtype=[torch.float32, torch.bfloat16], family=[*ALIKE, *OTHERS])
def test_a_block_is_replaced_only_if_it_rotates_heads_as_ours_does(family, dtype, head_size):
    sizes = {"vocab_size": 128, "hidden_size": 4 * head_size, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_size, "pad_token_id": 0}
    with seeded(0):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes), dtype=dtype).eval()
    model.set_attn_implementation(ATTENTION)
    replaced = len(dict(FusedAttention(model).replacements()))
    assert replaced == (2 if family in ALIKE else 0)


@pytest.mark.parametrize(("is_chunked", "expected"), [(False, None), (True, MAX_DQ_BYTES)])
def test_heads_run_in_groups_if_blocks_are_chunked(is_chunked, expected, fits_flash_attention, monkeypatch):
    limits, attend = [], attention.sequence_attention_

    def recording(*given):
        limits.append(given[-2])
        return attend(*given)

    monkeypatch.setattr(attention, "sequence_attention_", recording)
    batch = padded_batch()
    with Hoisted(make_llama(), chunked_blocks=is_chunked) as hoisted:
        limits.clear()
        hoisted.row_losses(ActiveTokens.gather(batch["input_ids"], RowPlan.from_labels(batch["labels"])))
    assert len(limits) >= 2
    assert set(limits) == {expected}
