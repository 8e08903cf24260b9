"""What the base model replies to bundled questions is asked once, and kept for the same model and prompts."""

from dataclasses import replace

import pytest

from sebp_edge.ask.general_texts import chat_questions
from sebp_edge.basics.files import cache_folder
from sebp_edge.events import silent
from sebp_edge.run import replies
from sebp_edge.run.replies import reply_to

QUESTIONS = chat_questions(400)
TOKENS = 6


@pytest.fixture
def base(make):
    return make().in_use.load(silent)


@pytest.fixture
def asked(monkeypatch):
    """How many prompts the model has replied to, each time."""
    found, answer_all = [], replies.answer_all

    def watched(model, tokenizer, prompts, *others):
        found.append(len(prompts))
        return answer_all(model, tokenizer, prompts, *others)

    monkeypatch.setattr(replies, "answer_all", watched)
    return found


def replies_of(base, questions=QUESTIONS, tokens=TOKENS):
    return reply_to(base, tokens, lambda: None, questions)


def test_a_question_is_asked_once(base, asked):
    first = replies_of(base, QUESTIONS[:3])
    assert replies_of(base, QUESTIONS[:3]) == first and asked == [3]
    assert replies_of(base)[:3] == first
    assert asked == [3, len(QUESTIONS) - 3]
    (file,) = cache_folder().glob("replies-*.json")
    assert not any(question in file.read_text() for question in QUESTIONS)
    file.unlink()
    assert replies_of(base)[:3] == first


@pytest.mark.parametrize("other", ["fingerprint", "tokens"])
def test_of_another_model_or_length_it_is_asked_again(base, asked, other):
    replies_of(base)
    if other == "fingerprint":
        replies_of(replace(base, fingerprint="another"))
    else:
        replies_of(base, tokens=TOKENS + 1)
    assert asked == 2 * [len(QUESTIONS)]


def test_a_damaged_file_is_ignored_and_replaced(base, asked):
    found = replies_of(base)
    (file,) = cache_folder().glob("replies-*.json")
    whole = file.read_text()
    for content in ("", "{}", whole.replace('"replies"', '"others"'), whole[:-20]):
        file.write_text(content)
        assert replies_of(base) == found
        assert file.read_text() == whole
