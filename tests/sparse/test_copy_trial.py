"""The trial on a small copy of a decoder detects how distant tokens interact."""

import copy

import pytest
import torch
from builders import SIZES, make_llama, seeded
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MixtralConfig,
    Olmo3Config,
    Phi3Config,
    PhimoeConfig,
    PreTrainedModel,
    Qwen3Config,
)

from sebp_edge.engine.models.small_copy import LONGEST, SCALED_FROM, VOCABULARY, WINDOW, small_copy
from sebp_edge.engine.sparse import copy_trial, hoist
from sebp_edge.engine.sparse.copy_trial import copy_mismatch
from sebp_edge.engine.sparse.rows.batches import Collator
from sebp_edge.engine.training.losses import RowLosses
from sebp_edge.events import Notice, silent
from sebp_edge.ops import sequence_attention_
from sebp_edge.values.example import Example, outlines

ROPE = {"rope_theta": 10000.0}
SLIDING = {"sliding_window": 4096, "layer_types": ["sliding_attention", "full_attention"]}
LONG_ROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
# Published sizes, which are beyond the reach of a short trial.
HOISTED = {
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=4096),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=8, **SLIDING),
    "olmo3": Olmo3Config(**SIZES, **SLIDING),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=8),
    "dynamic": LlamaConfig(**SIZES, rope_parameters=ROPE | {"rope_type": "dynamic", "factor": 4.0}),
    "longrope": Phi3Config(
        **SIZES | {"max_position_embeddings": 131072},
        original_max_position_embeddings=4096,
        rope_parameters=ROPE | LONG_ROPE | {"original_max_position_embeddings": 4096},
    ),
}


@pytest.fixture(autouse=True)
def nothing_tried():
    copy_trial._try_copy.cache_clear()


def make(config) -> PreTrainedModel:
    with seeded(0):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("family", HOISTED)
def test_families_that_pass_windows_and_lengths_to_attention_are_exact(family):
    assert copy_mismatch(make(HOISTED[family])) is None
    # With dynamic RoPE, beginnings are not shared: their gradients would differ.
    assert (copy_mismatch(make(HOISTED[family]), shares_prefixes=True) is None) == (family != "dynamic")


def test_a_copy_is_tried_once_wherever_its_model_is_loaded_from(monkeypatch):
    tried = []
    monkeypatch.setattr(copy_trial, "small_copy", lambda *given: tried.append(given) or small_copy(*given))
    for folder, epsilon, expected in (("here", 3e-6, 1), ("there", 3e-6, 1), ("there", 4e-6, 2)):
        model = make_llama(rms_norm_eps=epsilon)
        model.config._name_or_path = folder
        assert copy_mismatch(model) is None
        assert len(tried) == expected


def forgetting_prefixes(*states_and_lengths, prefixes):
    return sequence_attention_(*states_and_lengths)


@pytest.mark.slow
def test_attention_that_ignores_a_shared_prefix_is_detected_and_not_used(monkeypatch):
    model = make(HOISTED["llama"])
    monkeypatch.setattr(hoist, "sequence_attention_", forgetting_prefixes)
    assert "gradients of a small copy differ" in copy_mismatch(model, shares_prefixes=True)
    assert copy_mismatch(model) is None
    assert rows_computed(model) == 2 * 23


def test_a_micro_batch_computes_what_its_sequences_begin_with_once():
    assert rows_computed(make(HOISTED["llama"])) == 20 + 2 * 3


def rows_computed(model) -> int:
    """The rows of the embedding for two sequences of 24 tokens, of which the first 20 are the same."""
    ids = [[*range(1, 21), *range(start, start + 4)] for start in (30, 40)]
    examples = [Example(one, [-100] * 21 + one[21:], 0) for one in ids]
    computed = []
    with RowLosses(model, examples, Collator(96, 0), torch.device("cpu"), silent) as rows:
        hook = model.get_input_embeddings().register_forward_hook(lambda _, inputs, out: computed.append(out.shape[1]))
        rows(outlines(examples))
        hook.remove()
    return computed[-1]  # after trials


def test_a_window_that_only_the_mask_applies_is_detected_at_any_length():
    model = make(PhimoeConfig(**SIZES, num_local_experts=4, sliding_window=56))
    notices = []
    ids = [number % 300 for number in range(2, 82)]
    with RowLosses(model, [Example(ids, ids, 0)], Collator(96, 0), torch.device("cpu"), notices.append) as rows:
        assert rows.hoisted is None
    assert [type(notice) for notice in notices] == [Notice]
    assert "gradients of a small copy differ" in notices[0].message
    without = make(PhimoeConfig(**SIZES, num_local_experts=4, sliding_window=None))
    assert copy_mismatch(without) is None


class LengthScaledLlama(LlamaForCausalLM):
    """Scales logits by the number of input tokens."""

    def forward(self, input_ids=None, **inputs):
        output = super().forward(input_ids=input_ids, **inputs)
        output.logits = output.logits * (1 + input_ids.shape[1] / 100)
        return output


class NeedsMore(LlamaForCausalLM):
    def __init__(self, config, more):
        super().__init__(config)


def test_a_copy_is_of_the_models_own_subclass():
    model = LengthScaledLlama(make_llama().config)
    assert "differ" in copy_mismatch(model)


def test_a_class_that_cannot_be_copied_is_not_hoisted():
    reason = copy_mismatch(NeedsMore(make_llama().config, more=1))
    assert reason == "a small copy of the model failed on a trial batch (TypeError)."


def test_the_model_and_the_random_state_are_unchanged():
    model = make_llama()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    config = model.config.to_dict()
    assert copy_mismatch(model) is None
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config.to_dict() == config
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_windows_limits_and_experts_of_a_copy_are_small():
    for family in HOISTED:
        config = small_copy(HOISTED[family]).model.config
        assert (getattr(config, "sliding_window", None) or 0) <= WINDOW < SCALED_FROM < LONGEST, family
        assert config.max_position_embeddings <= LONGEST + 1
        assert (getattr(config, "num_local_experts", None) or 0) <= 4
        assert config.vocab_size == VOCABULARY
    assert small_copy(HOISTED["longrope"]).model.config.original_max_position_embeddings == SCALED_FROM


def test_a_trial_computes_in_one_thread():
    seen = set()

    class Observed(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            seen.add(torch.get_num_threads())
            return super().forward(*args, **kwargs)

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert copy_mismatch(Observed(HOISTED["llama"])) is None
        assert (seen, torch.get_num_threads()) == ({1}, 3)
    finally:
        torch.set_num_threads(before)
