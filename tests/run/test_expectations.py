"""What to expect is said in two sentences, for each kind of texts and each size of model."""

import pytest

from sebp_edge import Recipe
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.run.expectations import expectation, mostly_of_people, what_the_kind_can_do
from sebp_edge.values.documents import Conversation
from sebp_edge.values.model_reference import ModelReference

OTHER = ModelReference("mine", "local", "/secret/folder/mine")
SIZES = (135_000_000, 600_000_000, 3_000_000_000)


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("size", [8_000_000, 134_515_008, 499_999_999, 596_000_000, 1_711_000_000, 3_213_000_000])
def test_it_is_two_sentences(size, is_chat):
    text = expectation(OTHER, size, is_chat=is_chat)
    # A decimal point is inside of a number.
    assert sum(part.strip() != "" for part in text.replace("1.7", "").replace("3.2", "").split(".")) == 2
    assert "/secret" not in text


def test_notes_give_style_and_conversations_give_answers():
    assert "style and vocabulary" in expectation(OTHER, 10**9, is_chat=False)
    assert "answers in the format" in expectation(OTHER, 10**9, is_chat=True)


def test_each_size_has_its_own_limits():
    texts = {expectation(OTHER, size, is_chat=False).partition(" (")[2].partition(") ")[2] for size in SIZES}
    assert len(texts) == len(SIZES)


def test_the_size_is_said():
    assert "(135 million parameters)" in expectation(OTHER, 134_515_008, is_chat=False)
    assert "(3.21 billion parameters)" in expectation(OTHER, 3_213_000_000, is_chat=False)


def test_a_reader_names_its_passages():
    text = expectation(OTHER, 10**9, is_chat=True, has_quiz=True)
    assert text == what_the_kind_can_do([], Recipe.load("ask"), has_template=True)
    assert "each names the passage that it was read in" in text


def test_the_bundled_model_is_a_demonstrator():
    assert "'tiny' is a demonstrator" in expectation(resolve("tiny"), 8_000_000, is_chat=False)


def test_chats_of_people_give_their_owners_way_to_write():
    chat = Conversation(
        (
            {"role": "user", "author": "Bob", "content": "Soup?"},
            {"role": "assistant", "author": "Anna", "content": "Yes."},
        )
    )
    records = [Conversation(({"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}))]
    assert mostly_of_people([chat, *records, chat])
    assert not (mostly_of_people([chat, *records]) or mostly_of_people(records))
    text = expectation(OTHER, 10**9, is_chat=True, of_people=True)
    assert text.startswith("It writes as you do in chats, but do not rely on it for what was said or is true.")
    for has_template in (False, True):
        kind = what_the_kind_can_do([chat], Recipe.load("notes"), has_template=has_template)
        assert kind == "It will answer messages as you do. It will not know what was not said in them."
