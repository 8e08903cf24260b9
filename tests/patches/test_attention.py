"""Which attention blocks are replaced: the trial detects other rotary embeddings, in bf16 and at any width."""

import pytest
import torch
from against_dense import assert_same_gradients, dense_losses, gradients, padded_batch
from builders import make_llama, seeded
from model_families import MODELS, SIZES, WITH_STATES, make_model
from pairwise import pairwise
from transformers import AutoConfig, AutoModelForCausalLM

from sebp_edge.engine.sparse.hoist import ATTENTION, Hoisted, rows_attention
from sebp_edge.engine.sparse.patches import attention
from sebp_edge.engine.sparse.patches.attention import FusedAttention
from sebp_edge.engine.sparse.patches.counts import MAX_DQ_BYTES
from sebp_edge.errors import SparsityError
from sebp_edge.ops import attention as op
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


@pytest.mark.parametrize("family", MODELS)
def test_fused_attention_changes_no_loss_and_no_gradient(family):
    model = MODELS[family]().double()
    batch = padded_batch()
    plan = RowPlan.from_labels(batch["labels"])
    expected = dense_losses(model, batch)
    wanted = gradients(model, expected)
    with Hoisted(model) as hoisted:
        fused = FusedAttention(model)
        fused.attach()
        replaced = [block for block in model.modules() if "forward" in vars(block) and hasattr(block, "head_dim")]
        assert len(replaced) == (0 if family == "phi3" else model.config.num_hidden_layers)
        found = hoisted.row_losses(ActiveTokens.gather(batch["input_ids"], plan))
        gradient = gradients(model, found)
        fused.remove()
        assert not any("forward" in vars(block) for block in replaced)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert_same_gradients(wanted, gradient)


def test_heads_are_not_rotated_if_the_model_passes_no_angles(fits_flash_attention):
    model, batch = WITH_STATES["granite-hybrid"]().double(), padded_batch()
    expected = dense_losses(model, batch)
    with Hoisted(model) as hoisted:
        assert "forward" in vars(model.model.layers[1].self_attn)
        found = hoisted.row_losses(ActiveTokens.gather(batch["input_ids"], RowPlan.from_labels(batch["labels"])))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_a_part_of_each_head_is_rotated_by_the_model_itself(fits_flash_attention):
    config = AutoConfig.for_model("glm4_moe", **SIZES, first_k_dense_replace=2, partial_rotary_factor=0.5)
    model, batch = make_model(config).double(), padded_batch()
    expected = dense_losses(model, batch)
    with Hoisted(model) as hoisted:
        found = hoisted.row_losses(ActiveTokens.gather(batch["input_ids"], RowPlan.from_labels(batch["labels"])))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_a_modified_attention_block_is_not_replaced():
    model = make_llama()
    block = model.model.layers[0].self_attn

    class Doubled(type(block)):
        def forward(self, *args, **kwargs):
            out, weights = super().forward(*args, **kwargs)
            return 2 * out, weights

    block.__class__ = Doubled
    with Hoisted(model):
        fused = FusedAttention(model)
        fused.attach()
        assert "forward" not in vars(block)
        assert "forward" in vars(model.model.layers[1].self_attn)
        fused.remove()


def test_a_block_with_attention_dropout_is_not_replaced():
    with Hoisted(make_llama(attention_dropout=0.1)) as hoisted:
        fused = FusedAttention(hoisted.model)
        fused.attach()
        assert not any("forward" in vars(layer.self_attn) for layer in hoisted.model.model.layers)
        fused.remove()


def test_heads_are_grouped_with_the_keys_that_they_share():
    dq_bytes = op.dq_buffer_bytes(4096, 24, 128, num_sequences=64)
    assert dq_bytes == 4 * 3072 * (4096 + 64 * 128)
    assert op.dq_buffer_bytes(7, 2, 80, num_sequences=1) == 4 * 2 * 96 * (7 + 128)
    whole = [(slice(0, 24), slice(0, 8))]
    assert op._head_groups(24, 8, dq_bytes, None) == op._head_groups(24, 8, dq_bytes, dq_bytes) == whole
    groups = op._head_groups(24, 8, dq_bytes, dq_bytes // 2 - 1)
    assert groups == [(slice(0, 6), slice(0, 2)), (slice(6, 15), slice(2, 5)), (slice(15, 24), slice(5, 8))]
    assert len(op._head_groups(24, 8, dq_bytes, 1)) == 8


def test_attention_refuses_options_that_it_does_not_implement():
    query = torch.randn(1, 2, 3, 4)
    lengths = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(SparsityError, match="does not support s_aux"):
        rows_attention(None, query, query, query, None, cu_seq_lens_q=lengths, max_length_q=3, s_aux=torch.ones(2))
    with pytest.raises(SparsityError, match="does not support an attention mask"):
        rows_attention(None, query, query, query, torch.ones(1), cu_seq_lens_q=lengths, max_length_q=3)
