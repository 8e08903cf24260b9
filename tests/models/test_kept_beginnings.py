"""What prompts begin with is computed once, and again as soon as tokens, weights, adapter or settings are others."""

import random

import pytest
import torch
from builders import make_llama
from model_families import MODELS

from sebp_edge.models.adaptation import attach, trainable
from sebp_edge.models.catalog import resolve
from sebp_edge.models.decoding import Decoder
from sebp_edge.models.loading import load_base_model
from sebp_edge.models.model_state import ModelState
from sebp_edge.models.sampling import Sampling
from sebp_edge.recipe import Recipe

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
    decoder, found = Decoder(model), sizes(model)
    assert [write(decoder, prompt) for prompt in prompts] == expected
    firsts = [size for before, size in zip([1, *found], found, strict=False) if size > 1 or before > 1]
    assert found[0] == len(COMMON) + 2 and found[5] == 2
    assert sum(found) < sum(map(len, prompts)) + 4 * len(prompts) - len(COMMON), firsts


def test_a_continued_text_computes_only_the_new_turn(sizes):
    model = make_llama().eval()
    decoder, found = Decoder(model), sizes(model)
    turn = [*COMMON, *write(decoder, COMMON)]
    found.clear()
    write(decoder, [*turn, 30, 31, 32])
    assert found[0] == 4  # the last token of the first text was chosen, but not computed


def test_what_is_kept_is_used_if_threads_share_the_products(sizes):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        model = make_llama(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64).eval()
        decoder, found = Decoder(model), sizes(model)
        for end in ([20, 21], [22, 23, 24]):
            found.clear()
            write(decoder, [*COMMON, *end])
        assert found[0] == 3
    finally:
        torch.set_num_threads(before)


def by_weight(model):
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(1.5)


def by_data(model):
    model.model.layers[0].self_attn.k_proj.weight.data.copy_(model.model.layers[1].self_attn.k_proj.weight.data)


def by_another_tensor(model):
    layer = model.model.layers[0].mlp.down_proj
    layer.weight = torch.nn.Parameter(2 * layer.weight.detach())


def by_hook(model):
    model.model.layers[0].register_forward_hook(lambda module, args, out: 2 * out)


def by_forward(model):
    layer = model.model.layers[0].mlp
    plain = layer.forward
    layer.forward = lambda x: 2 * plain(x)


@pytest.mark.parametrize("change", [by_weight, by_data, by_another_tensor, by_hook, by_forward])
def test_a_changed_model_computes_everything_again(change, sizes):
    model = make_llama().eval()
    decoder = Decoder(model)
    found = sizes(model)
    for expected in (len(COMMON), 1):
        found.clear()
        write(decoder, COMMON)
        assert found[0] == expected
    change(model)
    found.clear()
    assert write(decoder, COMMON) == write(Decoder(model), COMMON)
    assert found[0] == len(COMMON)


def test_another_adapter_a_disabled_one_and_a_removed_one_compute_everything_again(model_folder, sizes):
    base = load_base_model(resolve(model_folder), Recipe.load("notes"), torch.device("cpu"))
    decoder, prompt = Decoder(base.model), COMMON
    plain, found = write(decoder, prompt), sizes(base.model)
    texts = []
    for seed in (0, 1):
        adapter = attach(base, Recipe.load("notes").replace(r=4), seed=seed)
        with torch.no_grad():
            for parameter in trainable(adapter):
                parameter.add_(0.05 * (seed + 1))
        for _ in range(2):
            found.clear()
            texts.append(write(decoder, prompt))
            assert texts[-1] == write(Decoder(base.model), prompt)
        assert found[0] == 1
        with adapter.disabled():
            assert write(decoder, prompt) == plain
        found.clear()
        assert write(decoder, prompt) == texts[-1]
        assert found[0] == len(prompt)
        adapter.detach()
        assert write(decoder, prompt) == plain
    assert len({tuple(text) for text in (plain, *texts)}) == 3


def test_full_weights_exchanged_in_place_are_noticed(model_folder):
    base = load_base_model(resolve(model_folder), Recipe.load("notes"), torch.device("cpu"))
    adaptation = attach(base, Recipe.load("notes").replace(method="full"), seed=0)
    before = ModelState(base.model)
    assert before == ModelState(base.model)
    with adaptation.disabled():
        assert before != ModelState(base.model)


def test_a_failed_call_and_a_batch_keep_nothing(sizes):
    model = make_llama().eval()
    decoder = Decoder(model)
    write(decoder, COMMON)
    with pytest.raises(ZeroDivisionError):
        decoder.decode([COMMON], [], Sampling(5, temperature=0), on_token=lambda number, token: 1 / 0)
    found = sizes(model)
    write(decoder, COMMON)
    assert found[0] == len(COMMON)
    decoder.decode([COMMON, COMMON[:5]], [], Sampling(2, temperature=0))
    assert decoder._cache is None


def test_what_is_kept_is_bounded():
    model = make_llama().eval()
    decoder = Decoder(model, max_kept_bytes=1000)
    assert write(decoder, COMMON) == write(Decoder(model), COMMON)
    assert decoder._cache is None
    decoder = Decoder(model)
    for length in (5, 50, 5, 40):
        write(decoder, (COMMON * 3)[:length])
        assert decoder._cache.columns <= 128


def test_a_larger_cache_takes_over_what_is_kept(sizes):
    model = make_llama(max_position_embeddings=1024).eval()
    decoder, long = Decoder(model), COMMON * 10
    found = sizes(model)
    write(decoder, long[:100])
    found.clear()
    assert write(decoder, long) == write(Decoder(model), long)
    assert found[0] == 100


def test_seeds_draw_the_same_in_any_batch_and_from_a_kept_beginning():
    model, decoder = make_llama().eval(), Decoder(make_llama().eval())
    options = {"temperature": 1.3, "top_p": 0.95, "top_k": 50, "repetition_penalty": 1.1, "seed": 5}
    prompts = [COMMON, COMMON[:3], [*COMMON, 40, 41]]
    alone = [write(decoder, prompt, **options) for prompt in prompts]
    assert Decoder(model).decode(prompts, [], Sampling(5, **options)) == alone
    assert [write(decoder, prompt, **options) for prompt in prompts] == alone
    assert [write(decoder, prompt, **options | {"seed": 6}) for prompt in prompts] != alone
