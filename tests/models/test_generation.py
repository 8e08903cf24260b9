"""Text generation: repeatable with a seed, streamed, within the model's context, and by our options only."""

import copy
import json
import shutil
import threading

import pytest
import torch

from sebp_edge import Personalizer
from sebp_edge.engine.models.decoding import Decoder
from sebp_edge.engine.models.generation import generate_text
from sebp_edge.engine.models.sampling import Sampling
from sebp_edge.errors import Interrupted, ModelError, OptionError, TextsError
from sebp_edge.events import silent


@pytest.fixture(scope="module")
def writer(model_folder):
    return Personalizer(model_folder, device="cpu")


@pytest.fixture
def model(writer):
    return writer.in_use.load(silent).model


def write(writer, prompt="the ferry", **options):
    return writer.generate(prompt, **({"max_new_tokens": 24, "temperature": 1.0, "top_p": 1.0, "seed": 0} | options))


@pytest.mark.slow
def test_a_seed_repeats_the_text_and_another_gives_another(writer):
    assert write(writer, seed=1) == write(writer, seed=1) != write(writer, seed=2)
    assert write(writer, seed=None) != write(writer, seed=None)


def test_temperature_zero_takes_the_most_likely_token_for_any_seed(writer):
    assert write(writer, temperature=0, seed=1) == write(writer, temperature=0, seed=2)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.8, "seed": 1}, {"repetition_penalty": 1.3}])
def test_the_probability_of_a_text_is_that_of_its_tokens_one_after_another(writer, model, options):
    tokenizer, drawn = writer.in_use.load(silent).tokenizer, []
    prompt = tokenizer("the ferry").input_ids
    sampling = Sampling(**({"max_new_tokens": 5, "temperature": 0} | options))
    found = generate_text(model, tokenizer, prompt, [], sampling, decoder=Seen(model, drawn))
    ids = torch.tensor([prompt + drawn])
    with torch.no_grad():
        logits = copy.deepcopy(model).double()(ids).logits
    logarithms = logits[0, len(prompt) - 1 : -1].log_softmax(dim=1)
    expected = logarithms.gather(1, torch.tensor(drawn)[:, None]).sum().exp()
    assert found.new_tokens == len(drawn) == 5
    assert found.probability == pytest.approx(float(expected), rel=1e-4)


class Seen(Decoder):
    """A decoder that also says which tokens it chose."""

    def __init__(self, model, drawn):
        super().__init__(model)
        self._drawn = drawn

    def decode(self, *arguments, **options):
        (tokens,) = super().decode(*arguments, **options)
        self._drawn += tokens
        return [tokens]


def test_a_repetition_penalty_reduces_repetition(writer):
    def most_often(text):
        return max(text.count(character) for character in text)

    plain, penalised = (write(writer, temperature=0, repetition_penalty=penalty) for penalty in (1, 10))
    assert most_often(penalised) < most_often(plain)


def test_the_process_random_state_is_unchanged(writer):
    before = torch.get_rng_state()
    for seed in (5, None):
        write(writer, seed=seed)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_streamed_parts_make_up_the_text(writer):
    parts = []
    text = write(writer, max_new_tokens=60, on_text=parts.append)
    assert len(parts) > 5
    assert all(parts)
    assert "".join(parts) == text


def test_a_stop_string_ends_the_text_and_is_never_streamed(writer, model):
    whole = write(writer, max_new_tokens=60)
    for begin in (0, 3, 10):
        stop, parts, steps = whole[begin : begin + 6], [], []
        with model.register_forward_hook(lambda *call: steps.append(call)):  # noqa: B023
            text = write(writer, max_new_tokens=60, stop=[stop], on_text=parts.append)
        assert text == "".join(parts) == whole[: whole.index(stop)]
        assert len(steps) < 60


def test_the_text_excludes_the_prompt_and_is_no_longer_than_requested(writer, model):
    steps = []
    with model.register_forward_hook(lambda *call: steps.append(call)):
        text = write(writer, max_new_tokens=3)
    assert "the ferry" not in text
    assert len(steps) == 3


def test_the_context_is_filled_and_never_exceeded(writer, tokenizer):
    prompt = "the " * 60
    length = len(tokenizer(prompt)["input_ids"])
    assert length < 128 < length + 100
    write(writer, prompt, max_new_tokens=100)
    with pytest.raises(TextsError, match="expected 1 to 127 for this model"):
        write(writer, "the " * 200)


@pytest.mark.parametrize("temperature", [0, 1])
def test_non_finite_weights_are_refused(model_folder, temperature):
    writer = Personalizer(model_folder, device="cpu")
    writer.in_use.load(silent).model.model.norm.weight.data[0] = torch.nan
    with pytest.raises(ModelError):
        write(writer, temperature=temperature)


def test_interrupting_returns_the_text_so_far(writer):
    parts, stop = [], threading.Event()

    def stop_at_the_fifth(part):
        parts.append(part)
        if len(parts) == 5:
            stop.set()

    with pytest.raises(Interrupted) as stopped:
        write(writer, max_new_tokens=60, on_text=stop_at_the_fifth, stop_when=stop)
    assert stopped.value.text == "".join(parts)
    assert len(parts) in (5, 6)  # half a character may have been pending
    assert write(writer, max_new_tokens=60).startswith(stopped.value.text.rstrip("\ufffd"))
    assert parts[0] not in str(stopped.value)


# Each of them changes what transformers writes.
CONFIGS = [
    {"num_beams": 3, "stop_strings": ["e"], "min_new_tokens": 9},
    {"num_return_sequences": 2, "do_sample": True, "top_k": 1, "repetition_penalty": 5.0},
    {"return_dict_in_generate": True, "output_scores": True, "max_length": 1, "forced_eos_token_id": 9},
    {"cache_implementation": "static", "prompt_lookup_num_tokens": 3},
    {"eos_token_id": [-1, 10**6]},
    {"suppress_tokens": list(range(300))},
]


@pytest.mark.parametrize("options", CONFIGS, ids=str)
def test_only_the_tokens_of_a_folders_generation_config_are_used(model_folder, writer, tmp_path, options):
    folder = shutil.copytree(model_folder, tmp_path / "changed")
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1} | options))
    other = Personalizer(folder, device="cpu")
    before = other.in_use.load(silent).model.generation_config
    for temperature in (0, 1):
        assert write(other, temperature=temperature) == write(writer, temperature=temperature)
    assert other.in_use.load(silent).model.generation_config is before


def test_a_folders_generation_config_has_the_tokens_that_end_a_text(model_folder, writer, model, tmp_path):
    taken = []
    with model.get_input_embeddings().register_forward_pre_hook(lambda _, ids: taken.append(ids[0][0, -1])):
        whole = write(writer)
    token = int(taken[5])
    folder = shutil.copytree(model_folder, tmp_path / "changed")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, token]}))
    text = write(Personalizer(folder, device="cpu"))
    assert whole.startswith(text)
    assert len(text) < len(whole)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1, but is 0"),
        ({"max_new_tokens": 1.5}, "max_new_tokens must be a whole number"),
        ({"temperature": -1}, "temperature must be 0, or a number from 0.001 to 100, but is -1"),
        ({"temperature": 1e-9}, "temperature must be 0, or a number from 0.001"),
        ({"temperature": float("inf")}, "temperature must be"),
        ({"temperature": 10**400}, "temperature must be"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"temperature": "hot"}, "temperature must be .* but is 'hot'"),
        ({"top_p": 0}, "top_p must be a number above 0 and at most 1, but is 0"),
        ({"top_p": 2}, "top_p must be"),
        ({"top_p": True}, "top_p must be"),
        ({"top_k": 0}, "top_k must be a whole number of at least 1, but is 0"),
        ({"top_k": 2.0}, "top_k must be a whole number"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number from 0.1 to 10, but is 0"),
        ({"repetition_penalty": None}, "repetition_penalty must be"),
        ({"stop": "end"}, "stop must be a list of strings, but is a str"),
        ({"stop": ["end", ""]}, "stop must be a list of non-empty strings"),
        ({"stop": [b"end"]}, "stop must be a list of non-empty strings"),
        ({"seed": -1}, "The seed must be a whole number"),
    ],
    ids=str,
)
def test_an_option_out_of_range_is_refused_with_its_range(writer, options, words):
    with pytest.raises(OptionError, match=words):
        write(writer, **options)
