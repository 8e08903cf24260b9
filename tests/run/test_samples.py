"""Samples continue the beginnings of documents as training saw them, and show only what the model adds."""

from dataclasses import replace

import pytest
import torch
from builders import make_sentences
from failing_memory import RECIPE

from sebp_edge.basics.stopping import StopRequested
from sebp_edge.engine.models.adaptation import attach, trainable
from sebp_edge.engine.models.decoding import Decoder
from sebp_edge.lessons.examples import encode
from sebp_edge.run import samples
from sebp_edge.run.samples import MAX_CHARACTERS, MAX_WORDS, SAMPLING, choose, continue_each, find_beginnings
from sebp_edge.values.documents import Conversation, Document, PromptCompletion
from sebp_edge.values.training_facts import Sample

QUESTION = {"role": "user", "content": "where is the map"}
ANSWER = {"role": "assistant", "content": "at home"}
SENTENCES = "The ferry left. It came back at six."


@pytest.fixture
def set_length(monkeypatch):
    """A function that sets how many tokens a continuation has at most."""
    return lambda tokens: monkeypatch.setattr(samples, "SAMPLING", replace(SAMPLING, max_new_tokens=tokens))


@pytest.fixture(autouse=True)
def longer_than_in_other_tests(set_length):
    set_length(8)


def beginnings_of(base, *contents, numbers=None, chat_template=False):
    documents = [Document(f"document {number}", content) for number, content in enumerate(contents)]
    numbers = range(len(documents)) if numbers is None else numbers
    return find_beginnings(documents, numbers, base, chat_template=chat_template)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (make_sentences(1, words=60)[0], " ".join(make_sentences(1, words=60)[0].split()[:MAX_WORDS])),
        ("the ferry left\nat six", "the ferry"),
        ("one", "one"),
        ("字" * 1000, "字" * MAX_CHARACTERS),
        ("今日は雨でした。家にいました。" * 4, "今日は雨でした。家にいました。" * 2),
        ("see https://example.org/" + "x" * 300 + " for more of what was said there then", "see"),
        ("one two three four five six seven eight nine ten", "one two three four five"),
        ("one two three four five\nsix seven eight nine ten and eleven", "one two three four five"),
        ("one two three four www.example.org six seven eight nine ten", "one two three"),
        ("The ferry left. It came back at six. Then the wind was from the west, and we took the map home.", SENTENCES),
        ("The ferry left? It came\nback at six. " * 3, "The ferry left? It came\nback at six. The ferry left?"),
        ("# The ferry to the west\n\n" + "and so we took the bread " * 30, "# The ferry to the west"),
        ("1. the ferry and the soup\n2. the map that we took home", "1. the ferry and the soup"),
        (PromptCompletion("the ferry left", " at six"), "the ferry left"),
        (Conversation((QUESTION, ANSWER, QUESTION, ANSWER)), "where is the map"),
    ],
)
def test_the_beginning_of_a_document(base, content, text):
    base.model.config.max_position_embeddings = 2048
    (beginning,) = beginnings_of(base, content)
    assert beginning.text == text


def test_a_document_that_can_only_be_cut_within_an_address_is_left_out(base):
    assert beginnings_of(base, "https://example.org/" + "x" * 400, "the ferry left at six")[0].source == "document 1"


@pytest.mark.parametrize("chat_template", [False, True])
@pytest.mark.parametrize(
    "content",
    [
        " ".join(["the ferry left at six"] * 8),
        PromptCompletion("the ferry left", " at six"),
        Conversation((QUESTION, ANSWER, QUESTION, ANSWER)),
    ],
    ids=["text", "completion", "conversation"],
)
def test_a_beginning_has_the_tokens_of_the_training(base, content, chat_template):
    (beginning,) = beginnings_of(base, content, chat_template=chat_template)
    (example,), _ = encode([Document("", content)], base.tokenizer, 64, chat_template=chat_template)
    prompt = beginning.prompt.input_ids
    assert list(example.input_ids[: len(prompt)]) == prompt
    if not isinstance(content, str):
        assert set(example.labels[: len(prompt)]) == {-100} and example.labels[len(prompt)] != -100


def sample(base_text, after, beginning="the ferry"):
    return Sample("document", beginning, base_text, None, after)


def test_samples_have_continuations_that_differ():
    """From each other, and from the base model's if possible."""
    unlearnt = sample(" left at six and then", " left at six and then")
    one, same, other = (
        sample(" left at six", after) for after in (" on the map now", " on the map then", " and bread")
    )
    more = [sample("", f" the {word} soup") for word in ("old", "new", "red")]
    assert choose([unlearnt, one, same, other, *more]) == (one, other, more[0])
    assert choose([unlearnt, one]) == (one, unlearnt)
    assert choose([unlearnt, unlearnt]) == (unlearnt,)
    assert choose([sample("", ""), one]) == (one, sample("", ""))
    assert choose([]) == ()


def test_continuations_are_repeatable_and_belong_to_the_present_state_of_the_model(base):
    beginnings = beginnings_of(base, *make_sentences(3))
    expected = continue_each(base, beginnings, lambda: None)
    assert len(expected) == 3 and all(expected)
    adaptation = attach(base, RECIPE, 0)
    assert continue_each(base, beginnings, lambda: None) == expected
    with torch.no_grad():
        for parameter in trainable(adaptation):
            parameter += 0.3
    assert continue_each(base, beginnings, lambda: None) != expected
    with adaptation.disabled():
        assert continue_each(base, beginnings, lambda: None) == expected


@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_base_models_and_the_adapted_texts_replay_the_same_graph(base, method, plain_steps):
    beginnings = beginnings_of(base, *make_sentences(3))
    expected = continue_each(base, beginnings, lambda: None)
    adaptation = attach(base, RECIPE.replace(method=method), 0)
    with torch.no_grad():
        for parameter in trainable(adaptation):
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    changed = continue_each(base, beginnings, lambda: None)
    decoder = Decoder(base.model)
    decoder._captures = True
    with decoder.holding_graphs():
        for _ in range(2):
            with adaptation.without_effect():
                assert continue_each(base, beginnings, lambda: None, decoder) == expected
            assert continue_each(base, beginnings, lambda: None, decoder) == changed
    assert changed != expected
    assert len(plain_steps) == 1
    assert decoder._cache is None and decoder._captured is None


def test_a_continuation_has_at_most_40_tokens_and_no_broken_character_at_its_end(base, set_length):
    set_length(40)
    decoded = []

    class Recording(Decoder):
        def decode(self, *given, **more):
            decoded.extend(found := super().decode(*given, **more))
            return found

    for beginning in beginnings_of(base, *make_sentences(3)):
        (text,) = continue_each(base, [beginning], lambda: None, Recording(base.model))
        assert 0 < len(decoded.pop()) <= 40
        assert not text.endswith("\ufffd")


def test_beginnings_that_are_continued_together_get_the_texts_that_each_gets_alone(base):
    beginnings = beginnings_of(base, *make_sentences(3, words=9), "a key")
    assert continue_each(base, beginnings, lambda: None) == [
        text for each in beginnings for text in continue_each(base, [each], lambda: None)
    ]


def test_a_stop_ends_it_as_it_ends_a_training(base):
    calls = []

    def check():
        calls.append(None)
        if len(calls) == 3:
            raise StopRequested

    with pytest.raises(StopRequested):
        continue_each(base, beginnings_of(base, *make_sentences(3)), check)
    assert len(calls) == 3
