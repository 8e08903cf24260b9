"""A decoder is hoisted if its losses stay the same; otherwise the reason is returned and the model is unchanged."""

import functools
import itertools
import random
import re

import pytest
import torch
from builders import make_llama
from peft import LoraConfig, get_peft_model
from transformers import NemotronConfig, NemotronForCausalLM, OPTConfig, OPTForCausalLM

from sebp_edge.basics.stopping import StopRequested
from sebp_edge.engine.sparse import hoist_if_exact as module
from sebp_edge.engine.sparse.hoist_if_exact import hoist_if_exact, pad_right
from sebp_edge.engine.sparse.patches.loss import Head
from sebp_edge.research import ActiveTokens

SEQUENCES = [list(range(5, 60)), list(range(9, 40)), [3, 4]]


def test_an_exact_decoder_is_hoisted_with_the_given_options():
    model = make_llama()
    hoisted, reason = hoist_if_exact(model, SEQUENCES, 2, checkpoints=1)
    with hoisted:
        assert reason is None
        assert hoisted.row_losses(ActiveTokens.gather(*pad_right(SEQUENCES, 2))).isfinite().all()
        assert "forward" in vars(model.model.layers[0])
    assert not any("forward" in vars(part) for part in model.modules())


def test_a_trial_is_ended_at_any_layer_and_leaves_the_model_as_it_was():
    model, calls, end = make_llama(), itertools.count(1), None
    max_logits = 4 * 320 * 2  # for two rows of words

    def check():
        if next(calls) == end:
            raise StopRequested

    hoisted, _ = hoist_if_exact(model, SEQUENCES, 2, max_logits=max_logits, check=check)
    with hoisted:
        trial = next(calls)
        chunks = list(hoisted.row_logits(ActiveTokens.gather(*pad_right(SEQUENCES, 2))))
        assert max(map(len, chunks)) == 2 and next(calls) - trial > len(chunks)
    # Another model, since one that has passed is not tried again.
    model, end, calls = make_llama(), random.randrange(1, trial), itertools.count(1)
    with pytest.raises(StopRequested):
        hoist_if_exact(model, SEQUENCES, 2, max_logits=max_logits, check=check)
    assert trial > 2 * sum(isinstance(part, torch.nn.Linear) for part in model.modules())  # padded, then on active rows
    assert not any("forward" in vars(part) for part in model.modules())
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.slow
def test_a_model_that_has_passed_with_its_adapter_and_without_is_not_tried_again():
    calls = []
    model = get_peft_model(make_llama(), LoraConfig(r=2, target_modules="all-linear"))

    def num_checks():
        calls.clear()
        hoisted, reason = hoist_if_exact(model, SEQUENCES, 2, check=lambda: calls.append(0))
        assert reason is None
        hoisted.remove()
        return len(calls)

    for expected in (True, False):
        assert bool(num_checks()) == expected
        with model.disable_adapter():
            assert bool(num_checks()) == expected
        assert not num_checks()
    model.base_model.model.model.layers[0].self_attn.is_causal = False  # whatever it has passed as before
    assert hoist_if_exact(model, SEQUENCES, 2)[0] is None


def test_a_decoder_whose_blocks_pass_no_keywords_on_says_so_in_words():
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    model = NemotronForCausalLM(NemotronConfig(**sizes, num_hidden_layers=2, num_key_value_heads=2, pad_token_id=0))
    hoisted, reason = hoist_if_exact(model, SEQUENCES, 2)
    assert hoisted is None
    assert "its blocks pass no keywords on" in reason
    assert "_" not in reason


def test_a_decoder_that_calls_a_part_of_its_base_model_is_hoisted():
    sizes = {"vocab_size": 97, "hidden_size": 32, "ffn_dim": 48, "num_attention_heads": 4, "word_embed_proj_dim": 32}
    model = OPTForCausalLM(OPTConfig(**sizes, num_hidden_layers=2, max_position_embeddings=64)).eval()
    hoisted, reason = hoist_if_exact(model, SEQUENCES, 1)
    assert reason is None
    hoisted.remove()


def test_every_token_except_the_first_has_a_loss():
    input_ids, plan = pad_right(SEQUENCES, 2)
    assert input_ids.shape == (3, 56)
    assert plan.targets.tolist() == [token for ids in SEQUENCES for token in ids[1:]]
    assert (input_ids[2, 2:] == 2).all()


@pytest.fixture
def compute_losses(monkeypatch):
    """A function that sets what computes losses on active rows."""
    return functools.partial(monkeypatch.setattr, Head, "losses")


@pytest.mark.parametrize(
    ("losses", "reason"),
    [
        (lambda *_: torch.ones(77), r"its results on active rows differ from the padded ones by \d+\.\d\d %\."),
        (lambda *_: [][0], r"the model failed on active rows \(IndexError\)\."),
    ],
)
def test_a_decoder_that_is_not_exact_is_not_changed(losses, reason, compute_losses, monkeypatch):
    model = make_llama()
    monkeypatch.setattr(module, "copy_mismatch", lambda decoder: None)
    compute_losses(losses)
    hoisted, found = hoist_if_exact(model, SEQUENCES, 2)
    assert hoisted is None
    assert re.fullmatch(reason, found)
    assert not any("forward" in vars(part) for part in model.modules())
    assert model.config._attn_implementation == "sdpa"


def test_running_out_of_memory_is_raised(compute_losses):
    model = make_llama()
    compute_losses(lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("no more")))
    with pytest.raises(torch.OutOfMemoryError):
        hoist_if_exact(model, SEQUENCES, 2)
    assert not any("forward" in vars(part) for part in model.modules())
