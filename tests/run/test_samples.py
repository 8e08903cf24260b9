"""Samples continue the beginnings of documents as training saw them, and show only what the model adds."""

import pytest
import torch
from builders import make_sentences
from failing_memory import RECIPE

from sebp_edge.basics.stopping import StopRequested
from sebp_edge.models.adaptation import attach, trainable
from sebp_edge.models.sampling import NonFiniteLogits
from sebp_edge.run.samples import MAX_WORDS, continue_each, find_beginnings
from sebp_edge.texts.documents import Completion, Conversation, Document
from sebp_edge.texts.examples import encode

QUESTION = {"role": "user", "content": "where is the map"}
ANSWER = {"role": "assistant", "content": "at home"}
LONG = "the ferry left at six " * 100


@pytest.fixture(autouse=True)
def short_assessment():
    """Samples have their real length here."""


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
        ("字" * 1000, "字" * 200),
        ("see https://example.org/" + "x" * 300 + " for more of what was said there then", "see"),
        ("one two three four five six seven eight nine ten", "one two three four five"),
        ("one two three four five\nsix seven eight nine ten and eleven", "one two three four five\nsix"),
        ("one two three four www.example.org six seven eight nine ten", "one two three"),
        (Completion("the ferry left", " at six"), "the ferry left"),
        (Conversation((QUESTION, ANSWER, QUESTION, ANSWER)), "where is the map"),
    ],
)
def test_the_beginning_of_a_document(base, content, text):
    base.model.config.max_position_embeddings = 2048
    (beginning,) = beginnings_of(base, content)
    assert beginning.text == text


@pytest.mark.parametrize("chat_template", [False, True])
@pytest.mark.parametrize(
    "content",
    [
        " ".join(["the ferry left at six"] * 8),
        Completion("the ferry left", " at six"),
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


def test_the_first_three_that_can_be_continued_are_taken_in_the_given_order(base):
    contents = [
        "the ferry left at six",
        Completion(LONG, "too long a prompt"),
        Completion("", "no prompt"),
        Conversation((ANSWER, QUESTION, ANSWER)),
        "the wind was from the west",
        "the bread and the soup",
        "the old map",
    ]
    found = beginnings_of(base, *contents, numbers=[6, 1, 2, 3, 5, 4, 0])
    assert [beginning.source for beginning in found] == ["document 6", "document 5", "document 4"]


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


def test_a_continuation_has_at_most_40_tokens_and_no_broken_character_at_its_end(base):
    for beginning in beginnings_of(base, *make_sentences(3)):
        tokens = []
        (text,) = continue_each(base, [beginning], lambda tokens=tokens: tokens.append(None))
        assert 0 < len(tokens) <= 40
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


def test_logits_that_are_not_finite_are_an_error(base):
    base.model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(NonFiniteLogits):
        continue_each(base, beginnings_of(base, "the ferry left at six"), lambda: None)
