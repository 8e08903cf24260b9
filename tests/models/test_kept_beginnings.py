"""What prompts begin with is computed once for an owner, who tells of changes, and in each call for anybody else."""

import random
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from builders import make_llama
from model_families import DECODERS, MODELS, WITH_STATES, make_model

from sebp_edge import Recipe
from sebp_edge.basics.stopping import StopRequested
from sebp_edge.engine.models import decoding
from sebp_edge.engine.models.adaptation import attach, trainable
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.decoding import Decoder
from sebp_edge.engine.models.sampling import Sampling
from sebp_edge.events import silent
from sebp_edge.run.model_in_use import ModelInUse

COMMON = random.Random(3).choices(range(13, 320), k=20)


@pytest.fixture
def sizes():
    """A function that returns a list of how many tokens each pass of a model computes from now on."""
    hooks = []

    def record(model):
        found = []

        def add(module, args, given):
            found.append(given["input_ids"].shape[1])

        hooks.append(model.register_forward_pre_hook(add, with_kwargs=True))
        return found

    yield record
    for hook in hooks:
        hook.remove()


def write(decoder, prompt, **options):
    (found,) = decoder.decode([prompt], [], Sampling(**({"max_new_tokens": 5, "temperature": 0} | options)))
    return found


@pytest.mark.parametrize("family", MODELS)
def test_only_what_follows_is_computed_and_the_tokens_are_the_same(family, sizes):
    model = MODELS[family]().eval()
    prompts = [[*COMMON, *end] for end in ([20, 21], [20, 22, 23], [], [20] * 9)] + [COMMON[:7], [*COMMON[:7], 300]]
    expected = [write(Decoder(model), prompt) for prompt in prompts]
    decoder, found = Decoder(model, keeps=True), sizes(model)
    assert [write(decoder, prompt) for prompt in prompts] == expected
    firsts = [size for before, size in zip([1, *found], found, strict=False) if size > 1 or before > 1]
    assert found[0] == len(COMMON) + 2 and found[5] == 2
    assert sum(found) < sum(map(len, prompts)) + 4 * len(prompts) - len(COMMON), firsts


def test_a_continued_text_computes_only_the_new_turn(sizes):
    model = make_llama().eval()
    decoder, found = Decoder(model, keeps=True), sizes(model)
    turn = [*COMMON, *write(decoder, COMMON)]
    found.clear()
    write(decoder, [*turn, 30, 31, 32])
    assert found[0] == 4  # the last token of the first text was chosen, but not computed


@pytest.mark.parametrize("family", WITH_STATES)
def test_a_state_goes_on_from_shortly_before_the_end_of_the_last_prompt(family, sizes):
    model = WITH_STATES[family]().eval()
    prompts = [[*COMMON[:size], 20] for size in (1, 2, 9)] + [[*COMMON[:9], 20, 21, 22, 23]]
    prompts += [prompts[-1], [*COMMON[:4], 30], [*COMMON[:4], 30, *range(40, 140)]]
    expected = [write(Decoder(model), prompt) for prompt in prompts]
    logits = [model(torch.tensor([prompt])).logits[0, -2:] for prompt in prompts]
    decoder, found, firsts = Decoder(model, keeps=True), sizes(model), []
    for prompt, tokens, wanted in zip(prompts, expected, logits, strict=True):
        found.clear()
        assert write(decoder, prompt) == tokens
        firsts.append(sum(found) - max(0, len(tokens) - 1))
        torch.testing.assert_close(decoder.next_logits(prompt, 2), wanted, rtol=1e-4, atol=1e-5)
        write(decoder, prompt)
    # Logits of a text that is shorter than what is kept begin again.
    assert firsts == [2, 3, 10, 12, 9, 1, 105]


def test_a_state_outside_of_the_cache_is_not_kept(sizes):
    model = make_model(DECODERS["recurrent-gemma"]()).eval()
    decoder, found = Decoder(model, keeps=True), sizes(model)
    for _ in range(2):
        found.clear()
        assert write(decoder, COMMON) == write(Decoder(model), COMMON)
        assert found[0] == len(COMMON)


@pytest.mark.slow
def test_what_is_kept_is_used_if_threads_share_the_products(sizes):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        model = make_llama(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64).eval()
        decoder, found = Decoder(model, keeps=True), sizes(model)
        for end in ([20, 21], [22, 23, 24]):
            found.clear()
            write(decoder, [*COMMON, *end])
        assert found[0] == 3
    finally:
        torch.set_num_threads(before)


def test_a_value_changed_without_a_trace_is_used_by_the_next_call(sizes):
    model = make_llama().eval()
    decoder, draw = Decoder(model), random.Random()
    found = sizes(model)
    for _ in range(5):
        expected = write(Decoder(model), COMMON)
        found.clear()
        assert write(decoder, COMMON) == expected
        assert found[0] == len(COMMON)
        # Changes through `.data` leave the version of the weight as it was.
        token, column = draw.choice(COMMON), draw.randrange(model.config.hidden_size)
        model.get_input_embeddings().weight.data[token, column] += draw.uniform(-1000, 1000)


@pytest.mark.slow
def test_a_model_in_use_computes_everything_again_after_each_change(two_layer_folder, sizes):
    recipe = Recipe.load("notes").replace(r=4, load_in_4bit=False)
    in_use = ModelInUse(resolve(two_layer_folder), recipe, torch.device("cpu"))
    found = sizes(in_use.load(silent).model)

    def text(kept, **options):
        """Writes twice: first all tokens are computed, unless `kept`, then only the last one."""
        with in_use.generating(**{"with_adapter": True} | options) as (decoder, _):
            expected = write(Decoder(in_use.base.model), COMMON)
            for tokens in (1 if kept else len(COMMON), 1):
                found.clear()
                assert write(decoder, COMMON) == expected
                assert found[0] == tokens
        return expected

    plain = text(kept=False)
    assert text(kept=True) == text(kept=True, with_adapter=False) == plain
    others = []
    for seed in (0, 1):
        adapter = attach(in_use.base, recipe, seed)
        for parameter in trainable(adapter):
            parameter.data.add_(0.05 * (seed + 1))
        in_use.use_adapter(adapter, two_layer_folder, SimpleNamespace(prompts="text"))
        others.append(text(kept=False))
        assert text(kept=False, with_adapter=False) == plain
        assert text(kept=True) == others[-1]
        assert text(kept=True, with_adapter=False) == plain
        in_use.load(silent, recipe)  # for a training, which changes weights
        text(kept=False)
        in_use.detach_adapter()
        assert text(kept=False) == plain
    assert len({tuple(each) for each in (plain, *others)}) == 3
    in_use.release()
    assert not in_use._decoders


@pytest.mark.parametrize("family", ["llama", *WITH_STATES])
def test_a_pass_that_was_stopped_is_computed_again(family, monkeypatch):
    model, text = (MODELS | WITH_STATES)[family]().eval(), [*COMMON, 20, 21]
    decoder = Decoder(model, keeps=True)
    monkeypatch.setattr(decoding, "KEPT_SECONDS", 0.0)  # so that it is stopped between blocks
    expected = model(torch.tensor([text])).logits[0, -1:]
    for calls in range(4):
        write(decoder, [*COMMON, 30])
        stop = Mock(side_effect=[*[None] * calls, StopRequested])
        with pytest.raises(StopRequested):
            decoder.decode([text], [], Sampling(9, temperature=0), check=stop)
        torch.testing.assert_close(decoder.next_logits(text, 1), expected, rtol=1e-4, atol=1e-5)


def test_a_failed_call_and_a_batch_keep_nothing(sizes):
    model = make_llama().eval()
    decoder = Decoder(model, keeps=True)
    write(decoder, COMMON)
    with pytest.raises(ZeroDivisionError):
        decoder.decode([COMMON], [], Sampling(5, temperature=0), on_token=lambda number, token: 1 / 0)
    found = sizes(model)
    write(decoder, COMMON)
    assert found[0] == len(COMMON)
    decoder.decode([COMMON, COMMON[:5]], [], Sampling(2, temperature=0))
    assert decoder._cache is None


def test_what_is_kept_is_bounded(monkeypatch):
    model = make_llama().eval()
    decoder = Decoder(model, keeps=True)
    for length in (5, 50, 5, 40):
        write(decoder, (COMMON * 3)[:length])
        assert decoder._cache.columns <= 128
    monkeypatch.setattr(decoding, "MAX_KEPT_BYTES", 1000)
    decoder = Decoder(model, keeps=True)
    assert write(decoder, COMMON) == write(Decoder(model), COMMON)
    assert decoder._cache is None


@pytest.mark.parametrize("family", ["llama", *WITH_STATES])
def test_a_larger_cache_takes_over_what_is_kept(family, sizes):
    model = (MODELS | WITH_STATES)[family]().eval()
    model.config.max_position_embeddings = 1024
    decoder, long = Decoder(model, keeps=True), COMMON * 10
    found = sizes(model)
    write(decoder, long[:100])
    found.clear()
    assert write(decoder, long) == write(Decoder(model), long)
    assert found[0] == 100


def test_seeds_draw_the_same_in_any_batch_and_from_a_kept_beginning():
    model, decoder = make_llama().eval(), Decoder(make_llama().eval(), keeps=True)
    options = {"temperature": 1.3, "top_p": 0.95, "top_k": 50, "repetition_penalty": 1.1, "seed": 5}
    prompts = [COMMON, COMMON[:3], [*COMMON, 40, 41]]
    alone = [write(decoder, prompt, **options) for prompt in prompts]
    assert Decoder(model).decode(prompts, [], Sampling(5, **options)) == alone
    assert [write(decoder, prompt, **options) for prompt in prompts] == alone
    assert [write(decoder, prompt, **options | {"seed": 6}) for prompt in prompts] != alone
