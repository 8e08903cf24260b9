"""General text and questions: what is trained on, and what is asked, are different."""

import pytest
from builders import QUICK_TEMPLATE, make_tokenizer

from sebp_edge.ask.general_texts import FOLDER, chat_examples, chat_questions, general_examples, general_questions
from sebp_edge.lessons.general_probe import read_probe
from sebp_edge.values.example import NO_DOCUMENT


@pytest.mark.slow
def test_general_text_is_bounded_drawn_by_the_seed_and_of_no_document():
    tokenizer = make_tokenizer(QUICK_TEMPLATE)
    none = general_examples(tokenizer, 128, 0, 0)
    some, again, other = (general_examples(tokenizer, 128, 2000, seed) for seed in (0, 0, 1))
    assert none == [] and some == again != other
    assert 2000 <= sum(len(example.input_ids) for example in some) < 2000 + 128
    assert {example.document for example in some} == {NO_DOCUMENT}


def test_general_text_is_not_in_the_probe():
    def runs(text):
        words = text.split()
        return {" ".join(words[begin : begin + 8]) for begin in range(len(words) - 7)}

    own = runs((FOLDER / "texts.txt").read_text(encoding="utf-8"))
    assert len(own) > 10_000
    for document in read_probe():
        assert not own & runs(document.content), document.source


def test_only_replies_have_loss_and_empty_ones_are_left_out():
    tokenizer = make_tokenizer()
    questions = chat_questions(10**6)
    replies = ["", *(f"reply {number}" for number, _ in enumerate(questions[1:]))]
    found = chat_examples(questions, replies, tokenizer, 256)
    assert {example.document for example in found} == {NO_DOCUMENT}
    answers = {tokenizer.decode([label for label in example.labels if label >= 0]) for example in found}
    assert len(answers) == len(replies) - 1 and all("?" not in answer for answer in answers)


def test_the_questions_of_the_quiz_are_enough_and_not_trained_on():
    asked = dict(general_questions())
    assert len(asked) >= 150 and all(all(answers) for answers in asked.values())
    trained_on = chat_questions(10**6)
    assert not asked.keys() & set(trained_on)
    assert len(set(trained_on)) == len(trained_on)


def test_few_tokens_have_room_for_few_replies_to_questions_of_all_kinds():
    every = chat_questions(10**6)
    assert [len(chat_questions(number)) for number in (0, 47, 48, 200)] == [0, 0, 1, 4]
    assert chat_questions(200) == every[:: len(every) // 4]
