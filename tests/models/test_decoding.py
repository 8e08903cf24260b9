"""Many prompts answered together: the tokens of each one alone, within the context, whatever the lengths."""

import functools
import itertools
import random
import weakref

import export_sources
import pytest
import torch
from builders import make_llama
from model_families import DECODERS, MODELS, WITH_STATES, make_model
from transformers import BloomConfig, FalconConfig, GenerationConfig

from sebp_edge import Recipe
from sebp_edge.engine.models import captured_step, decoding
from sebp_edge.engine.models.adaptation import attach, trainable
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.decoding import Decoder, end_ids_of
from sebp_edge.engine.models.generation import answer_all
from sebp_edge.engine.models.loading import load_base_model
from sebp_edge.engine.models.row_cache import RowCache, bytes_per_token
from sebp_edge.engine.models.sampling import NonFiniteLogits, Sampling
from sebp_edge.errors import CannotCapture, ModelError, TextsError
from sebp_edge.events import Notice

ENDS = [7, 8, 9, 10, 11, 12]
TOGETHER = {
    **MODELS,
    **WITH_STATES,
    **{name: lambda name=name: make_model(DECODERS[name]()) for name in ("gpt2", "opt")},
}


@torch.no_grad()
def make_longrope():
    """A model whose texts of more than 24 tokens have other angles, and whose attention shows that."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 24}
    model = make_llama(rope_parameters=rope | {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4})
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.mul_(1000)
    return model


TOGETHER |= {"longrope": make_longrope}
GEMMA_4 = ("gemma4", "gemma4-keys-as-values")
TOGETHER |= {name: lambda name=name: make_model(export_sources.FAMILIES[name]()) for name in GEMMA_4}
ALONE = {
    "a recurrent state": lambda: make_model(DECODERS["recurrent-gemma"]()),
    "positions from the mask": lambda: make_model(
        BloomConfig(vocab_size=320, hidden_size=32, n_layer=2, n_head=4, pad_token_id=2), "eager"
    ),
}


def tokens(draw, length):
    return [draw.randrange(13, 320) for _ in range(length)]


def make_prompts(seed=0):
    """Questions about notes after a common beginning, prompts of their own, a prefix of others, and duplicates."""
    draw = random.Random(seed)
    system, notes = tokens(draw, 9), [tokens(draw, length) for length in (27, 14, 1)]
    prompts = [system + note + tokens(draw, draw.randint(1, 7)) for note in notes for _ in range(5)]
    prompts += [tokens(draw, 1), tokens(draw, 2), tokens(draw, 44), system, prompts[3], prompts[3]]
    draw.shuffle(prompts)
    return prompts


@torch.no_grad()
def alone(model, prompts, max_new_tokens=10, ends=ENDS):
    """The tokens of transformers' own generation, one prompt at a time."""
    ends = sorted({*ends, *end_ids_of(model)})
    config = GenerationConfig(do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=ends or None, pad_token_id=2)
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        own, model.generation_config = model.generation_config, config
        new = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        model.generation_config = own
        new = new[0, len(prompt) :].tolist()
        found.append(new[:-1] if new[-1] in ends else new)
    return found


def decode(model, prompts, max_new_tokens=10, ends=ENDS, *, check=lambda: None):
    """The tokens of the project's decoder, all prompts together."""
    return Decoder(model).decode(prompts, ends, greedy(max_new_tokens), check=check)


def greedy(max_new_tokens):
    return Sampling(max_new_tokens, temperature=0)


def some_ends(model, prompts):
    """Tokens that end some of the prompts' texts early."""
    return sorted({new[at] for new, at in zip(alone(model, prompts[:6], ends=[]), (2, 5, 8, 1, 6, 9), strict=True)})


@functools.cache
def each_alone(family):
    """Prompts, tokens that end some of their texts, and the tokens of each prompt alone, for a model of this family."""
    model, prompts = TOGETHER[family]().eval(), make_prompts()
    ends = some_ends(model, prompts)
    return prompts, ends, alone(model, prompts, ends=ends)


@pytest.fixture(scope="module")
def model():
    return make_llama().eval()


@pytest.fixture(scope="module")
def tiny():
    return load_base_model(resolve("tiny"), Recipe.load("notes"), torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "opt", *WITH_STATES, "longrope", *GEMMA_4])
def test_the_tokens_are_those_of_each_prompt_alone(family):
    model, (prompts, ends, expected) = TOGETHER[family]().eval(), each_alone(family)
    assert Decoder(model).one_by_one is None
    found = decode(model, prompts, ends=ends)
    assert found == expected
    assert len({tuple(new) for new in found}) > 10
    assert len({len(new) for new in found}) > 1


@pytest.mark.slow
def test_a_batch_with_a_repetition_penalty_is_that_of_each_prompt_alone(model):
    prompts, sampling = make_prompts(), Sampling(12, temperature=0, repetition_penalty=1.7)
    found = Decoder(model).decode(prompts, ENDS, sampling)
    assert found == [Decoder(model).decode([prompt], ENDS, sampling)[0] for prompt in prompts]
    for prompt, new in list(zip(prompts, found, strict=True))[:6]:
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "max_new_tokens": 12, "repetition_penalty": 1.7, "eos_token_id": ENDS}
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)[0].tolist()
        whole = whole[len(prompt) :]
        assert new == (whole[:-1] if whole[-1] in ENDS else whole)
    assert found != decode(model, prompts, 12)


@pytest.mark.parametrize(("on_cpu", "fill_tokens", "passes"), [(True, 4096, 3), (False, 4096, 1), (False, 269, 3)])
def test_a_gpu_fills_up_all_prompts_in_one_pass_if_they_fit(model, on_cpu, fill_tokens, passes, monkeypatch):
    draw, seen = random.Random(), []
    prompts = [[first, *tokens(draw, length)] for first, length in ((7, 90), (8, 70), (9, 5))]
    expected = decode(model, prompts)
    monkeypatch.setattr(decoding, "FILL_TOKENS", fill_tokens)
    decoder = Decoder(model)
    decoder._is_on_cpu = on_cpu
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, ids: seen.append(ids[0].shape))
    try:
        assert decoder.decode(prompts, ENDS, greedy(10)) == expected
    finally:
        hook.remove()
    assert len([shape for shape in seen if shape[1] > 1]) == passes


def fails(model, runs_out):
    """A hook that makes memory run out in the passes of these shapes, [rows, tokens], which it returns, too."""
    failed = []

    def before(_model, _inputs, named):
        if runs_out(*named["input_ids"].shape):
            failed.append(tuple(named["input_ids"].shape))
            raise torch.OutOfMemoryError("CUDA out of memory.")

    return model.register_forward_pre_hook(before, with_kwargs=True), failed


@pytest.mark.parametrize("family", ["llama", *WITH_STATES])
def test_smaller_batches_go_on_where_memory_ran_out(family):
    model, (prompts, ends, expected) = TOGETHER[family]().eval(), each_alone(family)
    steps, seen = itertools.count(), []
    # Within texts, too.
    hook, failed = fails(model, lambda rows, tokens: rows > 2 and tokens == 1 and next(steps) % 4 == 3)
    with hook:
        found = Decoder(model).decode(prompts, ends, greedy(10), on_token=lambda *each: seen.append(each))
    assert found == expected
    assert sorted(number for number, _ in seen) == [n for n, new in enumerate(found) for _ in new]
    assert len(failed) > 1


def test_a_single_prompt_that_does_not_fit_is_refused_by_the_machine():
    model = make_llama(max_position_embeddings=1024).eval()
    decoder, (hook, failed) = Decoder(model), fails(model, lambda rows, tokens: True)
    decoder._is_on_cpu = False
    with hook, pytest.raises(torch.OutOfMemoryError):
        decoder.decode([tokens(random.Random(0), 600)], ENDS, greedy(3))
    assert failed == [(1, 600)] * 3 + [(1, 512), (1, decoding.MIN_FILL_TOKENS)]


@pytest.mark.slow
def test_the_bundled_model_answers_as_alone(tiny):
    notes = ["The ferry to the island leaves at six from the west pier.", "Bread soup needs stale bread and beans."]
    questions = ["When does it leave?", "What does it need?"]
    prompts = [tiny.tokenizer(f"{note}\n\n{asked}")["input_ids"] for note in notes for asked in questions]
    found = decode(tiny.model, prompts, 9, [])
    assert found == alone(tiny.model, prompts, 9, ends=[tiny.tokenizer.eos_token_id])
    texts = answer_all(tiny.model, tiny.tokenizer, prompts, [], 9)
    assert texts == [tiny.tokenizer.decode(new, skip_special_tokens=True).strip() for new in found]


@pytest.mark.slow
def test_an_adapter_takes_part_and_is_not_remembered(tiny):
    prompts = [tiny.tokenizer(f"The ferry leaves at {hour}.")["input_ids"] for hour in ("six", "seven", "noon")]
    before = decode(tiny.model, prompts, 5, [])
    adapter = attach(tiny, Recipe.load("notes").replace(r=4), seed=0)
    with torch.no_grad():
        for parameter in trainable(adapter):
            parameter.add_(0.05)
    found = [decode(model, prompts, 5, []) for model in (adapter.model, tiny.model)]
    expected = alone(tiny.model, prompts, 5, ends=[])
    adapter.detach()
    assert found == [expected] * 2
    assert expected != before == decode(tiny.model, prompts, 5, [])


@pytest.mark.parametrize("reason", ALONE)
def test_models_whose_rows_cannot_share_a_batch_are_decoded_one_by_one(reason):
    model, prompts, checks = ALONE[reason]().eval(), make_prompts()[:4], []
    assert reason in Decoder(model).one_by_one
    found = decode(model, prompts, 5, check=lambda: checks.append(1))
    assert found == alone(model, prompts, 5)
    assert len(checks) >= sum(map(len, found))


@pytest.mark.parametrize("family", [*TOGETHER, *ALONE])
def test_a_prompt_of_one_token_does_not_continue_the_text_before(family):
    draw = random.Random()
    for _ in range(2):
        model, prompt = (TOGETHER | ALONE)[family]().eval(), tokens(draw, 1)
        first = decode(model, [prompt], 6, [])
        decode(model, [tokens(draw, 5)], 6, [])
        assert decode(model, [prompt], 6, []) == first


@pytest.mark.parametrize("family", [*TOGETHER, *ALONE])
def test_the_logits_after_several_tokens_are_those_of_the_whole_text(family):
    model, draw, text = (TOGETHER | ALONE)[family]().eval(), random.Random(), []
    decoder = Decoder(model, keeps=True)
    for _ in range(8):
        text = text[: draw.randint(0, len(text))] + tokens(draw, draw.randint(1, 9))
        count = draw.randint(1, min(len(text), 4))
        with torch.no_grad():
            expected = model(torch.tensor([text]), use_cache=False).logits[0, -count:]
        torch.testing.assert_close(decoder.next_logits(text, count), expected, rtol=1e-4, atol=1e-4)
        if draw.random() < 0.5:
            decode_kept = decoder.decode([text], ENDS, greedy(3))
            assert decode_kept == decode(model, [text], 3)
        if len(text) > 80:
            text = []


def test_logits_that_are_kept_are_not_computed_again(model):
    decoder, text, sizes = Decoder(model, keeps=True), tokens(random.Random(), 30), []
    hook = model.register_forward_pre_hook(
        lambda *given: sizes.append(given[2]["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        first = decoder.next_logits(text, 3)
        assert torch.equal(decoder.next_logits(text[:-1], 2), first[:2])
        decoder.next_logits([*text, 40], 2)
        decoder.next_logits([*text[:10], 40], 1)
    finally:
        hook.remove()
    assert sizes == [30, 1, 1]


def test_attention_without_masks_and_chunked_attention_are_named(model):
    falcon = FalconConfig(vocab_size=320, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, alibi=True)
    assert "positions from the mask" in Decoder(make_model(falcon, "eager")).one_by_one
    chunked = make_llama()
    chunked.config.attention_chunk_size = 8
    assert "other masks" in Decoder(chunked).one_by_one
    other = make_llama()
    other.config._attn_implementation = "flash_attention_2"
    assert "flash_attention_2" in Decoder(other).one_by_one


@pytest.mark.slow
def test_a_shared_prefix_is_computed_once_and_ended_rows_leave(model):
    draw, sizes = random.Random(5), []
    note = tokens(draw, 60)
    prompts = [[*note, *tokens(draw, 5)] for _ in range(16)]
    ends = [new[at % 8] for at, new in enumerate(alone(model, prompts, ends=[])[:13])]
    hook = model.register_forward_pre_hook(
        lambda module, args, given: sizes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    try:
        found = decode(model, prompts, 30, ends)
    finally:
        hook.remove()
    assert sizes[:2] == [(1, 60), (16, 4)]
    steps = sizes[2:]
    assert all(columns == 1 for _, columns in steps)
    longest = max(map(len, found))
    assert len(steps) == min(longest + 1, 30)
    for at, (rows, _) in enumerate(steps):
        alive = sum(len(new) >= at for new in found)
        assert alive <= rows < max(2 * alive, 2)
    assert steps[-1][0] < 16


def test_the_context_is_filled_and_never_exceeded(model):
    limit = model.config.max_position_embeddings
    prompts = [tokens(random.Random(1), length) for length in (limit - 1, limit - 3, 4)]
    found = decode(model, prompts, 10, [])
    assert [len(new) for new in found] == [1, 3, 10]
    for wrong in ([], [20] * limit):
        with pytest.raises(TextsError, match=f"has {len(wrong)} tokens; expected 1 to {limit - 1} for this model"):
            decode(model, [[20], wrong], 10)
    with pytest.raises(ModelError, match="token 320"):
        decode(model, [[20], [320]], 10)


def test_non_finite_logits_are_refused():
    model = make_llama().eval()
    model.model.norm.weight.data[0] = torch.nan
    with pytest.raises(NonFiniteLogits):
        decode(model, make_prompts(), 4)
    with pytest.raises(NonFiniteLogits):
        Decoder(model).next_logits([20, 21], 1)
    model.model.norm.weight.data[0] = torch.inf
    with pytest.raises(NonFiniteLogits):
        decode(model, make_prompts(), 4)


def test_check_ends_the_call_at_any_block_and_the_cache_is_freed(model):
    calls, end = [], random.randrange(1, 12)

    def check():
        calls.append(1)
        if len(calls) == end:
            raise KeyboardInterrupt

    decoder, passes, prompts = Decoder(model), [], make_prompts()
    hook = model.register_forward_pre_hook(lambda *call: passes.append(1))
    with pytest.raises(KeyboardInterrupt):
        decoder.decode(prompts, [], greedy(10), check=check)
    hook.remove()
    assert len(calls) == end
    assert len(passes) == 1 + (end - 1) // (1 + model.config.num_hidden_layers)
    assert decoder._cache is None
    assert decode(model, prompts[:1]) == alone(model, prompts[:1])


def test_the_cache_is_within_its_bytes_and_freed_at_once(model, monkeypatch):
    caches, most = [], 20 * 58 * bytes_per_token(model)

    class Recorded(RowCache):
        def __init__(self, rows, columns, config):
            super().__init__(rows, columns, config)
            self.num_columns, self.num_rows = columns, rows
            assert all(cache() is None for cache in caches)
            caches.append(weakref.ref(self))
            assert rows * columns * bytes_per_token(model) <= most

        def __del__(self):
            held.append(sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers))
            expected.append(self.num_rows * (self.num_columns + 1) * bytes_per_token(model))

    held, expected = [], []
    monkeypatch.setattr(decoding, "RowCache", Recorded)
    monkeypatch.setattr(decoding, "MAX_CACHE_BYTES", most)
    decode(model, make_prompts() * 3)
    assert len(caches) > 1
    assert all(cache() is None for cache in caches)
    assert held == expected


def test_a_model_that_cannot_be_captured_is_answered_eagerly_with_a_notice(model, monkeypatch):
    notices = []

    class Refusing:
        def __init__(self, device, cache, step):
            pass

        def __call__(self, last, positions):
            raise CannotCapture("it waits for the GPU.")

    monkeypatch.setattr(decoding, "CapturedSteps", Refusing)
    monkeypatch.setattr(decoding, "max_decoded", lambda **_: 4)
    decoder = Decoder(model, on_event=notices.append)
    decoder._captures = True
    prompts, ends, expected = each_alone("llama")
    assert decoder.decode(prompts, ends, greedy(10)) == expected
    assert notices == [Notice("Texts are generated without CUDA graphs, which is slower: it waits for the GPU.")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "column_step", "cells"),
    [("gemma3", 1, 0), ("llama", 7, 0), ("gemma3", 128, 0), ("gemma3", 1, 9999), ("qwen3.5", 7, 0)],
)
def test_rows_and_columns_that_only_fill_up_change_nothing(family, column_step, cells, plain_steps, monkeypatch):
    monkeypatch.setattr(captured_step, "COLUMN_STEP", column_step)
    monkeypatch.setattr(captured_step, "CELLS_OF_ONE_SIZE", cells)
    prompts, ends, expected = each_alone(family)
    monkeypatch.setattr(decoding, "max_decoded", lambda **_: 9)
    decoder = Decoder(TOGETHER[family]().eval())
    decoder._captures = True
    assert decoder.decode(prompts, ends, greedy(10)) == expected
    assert max(step.num_rows for step in plain_steps) <= 9
    assert decoder._cache is None and decoder._captured is None


@pytest.mark.gpu
@pytest.mark.parametrize("family", [name for name in (*MODELS, *WITH_STATES) if name != "gemma2"])
@pytest.mark.parametrize("max_rows", [3, 64])
def test_captured_steps_give_the_tokens_of_eager_ones(family, max_rows, monkeypatch):
    captures, notices = [], []

    class Counted(captured_step._StepGraph):
        def __init__(self, *given):
            super().__init__(*given)
            captures.append(1)

    monkeypatch.setattr(captured_step, "_StepGraph", Counted)
    model, prompts = TOGETHER[family]().eval().cuda(), make_prompts()
    monkeypatch.setattr(decoding, "max_decoded", lambda **_: max_rows)
    eager, captured = (Decoder(model, on_event=notices.append) for _ in range(2))
    eager._captures = False
    expected = eager.decode(prompts, ENDS, greedy(10))
    assert captures == []
    assert captured.decode(prompts, ENDS, greedy(10)) == expected
    assert 1 <= len(captures) < 10
    assert notices == []
