"""Text out: repeatable with a seed, streamed piece by piece, within the model's context."""

import pytest
import torch

from sebp_edge.errors import ModelError
from sebp_edge.models.catalog import resolve
from sebp_edge.models.generation import generate_text
from sebp_edge.models.loading import load_base_model
from sebp_edge.recipe import Recipe


@pytest.fixture(scope="module")
def base(model_folder):
    return load_base_model(resolve(model_folder), Recipe.load("notes"), torch.device("cpu"))


def write(base, prompt="the ferry", **options):
    defaults = {"chat": False, "max_new_tokens": 24, "temperature": 1.0, "top_p": 0.9, "seed": 0, "on_text": None}
    return generate_text(base.model, base.tokenizer, prompt, **(defaults | options))


def test_a_seed_repeats_the_text_and_another_gives_another(base):
    assert write(base, seed=1) == write(base, seed=1) != write(base, seed=2)
    assert write(base, seed=None) != write(base, seed=None)


def test_temperature_zero_takes_the_likeliest_whatever_the_seed(base):
    assert write(base, temperature=0, seed=1) == write(base, temperature=0, seed=2)


def test_whole_numbers_do_for_temperature_and_top_p(base):
    assert write(base, temperature=1, top_p=1)


def test_the_process_random_state_is_left_alone(base):
    before = torch.get_rng_state()
    for seed in (5, None):
        write(base, seed=seed)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_pieces_are_the_text(base):
    pieces = []
    text = write(base, max_new_tokens=60, on_text=pieces.append)
    assert len(pieces) > 5
    assert "".join(pieces) == text


def test_the_text_is_only_what_is_new_and_no_longer_than_asked(base):
    steps = []
    hook = base.model.register_forward_hook(lambda *call: steps.append(call))
    text = write(base, max_new_tokens=3)
    hook.remove()
    assert "the ferry" not in text
    assert len(steps) == 3


def test_the_context_is_filled_and_never_exceeded(base):
    prompt = "the " * 60
    length = len(base.tokenizer(prompt)["input_ids"])
    assert length < 128 < length + 100
    write(base, prompt, max_new_tokens=100)
    with pytest.raises(ModelError, match="this model takes 1 to 127"):
        write(base, "the " * 200)


def test_a_special_token_spelt_out_in_a_prompt_is_text(base):
    seen = []
    hook = base.model.get_input_embeddings().register_forward_pre_hook(lambda layer, ids: seen.append(ids[0]))
    write(base, "<|eos|>", max_new_tokens=1)
    hook.remove()
    assert seen[0][0, 0] == base.tokenizer.bos_token_id
    assert base.tokenizer.eos_token_id not in seen[0]


def test_a_chat_is_put_into_the_template_and_a_model_without_one_continues(base, monkeypatch):
    seen = []
    hook = base.model.get_input_embeddings().register_forward_pre_hook(lambda layer, ids: seen.append(ids[0]))
    write(base, chat=True, max_new_tokens=1)
    monkeypatch.setattr(base.tokenizer, "chat_template", None)
    write(base, chat=True, max_new_tokens=1)
    hook.remove()
    prompts = [base.tokenizer.decode(ids[0]) for ids in seen]
    assert prompts == ["<|bos|><|user|>the ferry<|end|><|assistant|>", "<|bos|>the ferry"]
