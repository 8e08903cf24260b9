"""What an adaptation with the recipe `ask` trains on, reports and saves."""

from dataclasses import asdict

import pytest
from builders import make_tokenizer
from reader_notes import ANSWER, NO_EFFECT, NOTES, THINGS, WEIGHTS, decoded, notices, save_model, use_notes

from sebp_edge import AdapterRecord, Personalizer, Recipe
from sebp_edge.errors import ModelError, TextsError


def test_the_result_says_what_is_answered_before_and_after(learnt):
    result, quiz = learnt.result, learnt.result.quiz
    assert (result.name, result.verdict, result.passed, result.active) == ("reader", "better", True, True)
    assert quiz.questions == len(result.answers) == quiz.right_after == quiz.right_passage_after >= 5
    assert (quiz.right_before, quiz.right_passage_before, quiz.alone_before, quiz.right_active) == (0, 0, 0, None)
    assert (quiz.refused, quiz.rightly_refused, quiz.general_questions) == (0, quiz.questions, 2)
    for answer in result.answers:
        assert any(thing in answer.question for thing in THINGS)
        assert answer.right and answer.answer == ANSWER and ANSWER in answer.reply
    said = (
        f"Of {quiz.questions} questions about notes that it has not seen, it answers {quiz.questions} right, 0 before"
    )
    assert said in result.summary
    assert "each names the passage" in result.expectation
    assert result.samples == () and not result.trained_on_all


def test_the_record_and_the_json_have_the_counts(learnt):
    record, quiz = AdapterRecord.read(learnt.result.adapter_path), learnt.result.quiz
    assert record.quiz == asdict(quiz) == learnt.result.to_dict()["quiz"]
    assert (record.verdict, record.chat, record.documents) == ("better", True, len(NOTES))
    card = (learnt.result.adapter_path / "README.md").read_text()
    assert f"Answers {quiz.right_after} of {quiz.questions} questions about notes (0 before)" in card


def test_each_wording_of_a_question_is_trained_on_once_below_its_passage(learnt):
    dataset, tokenizer = learnt.training.task.dataset, learnt.training.base.tokenizer
    texts = decoded(dataset.examples, tokenizer)
    for note in NOTES:
        for wording in note["facts"][0]["ask"]:
            (text,) = (text for text in texts if f"\n\n{wording}<|end|>" in text)
            assert f"practice/{note['name']}.md\n{note['text'].strip()}\n\n" in text
            assert text.endswith(f"<|assistant|>\n{ANSWER}<|end|>\n")
    for example in dataset.examples:
        answered = tokenizer.decode([label for label in example.labels if label >= 0])
        assert answered.replace("<|end|>", "").strip() == ANSWER


def test_the_quiz_is_about_notes_that_are_not_trained_on(learnt):
    asked = {thing for thing in THINGS for answer in learnt.result.answers if thing in answer.question}
    (split,) = learnt.training.task.dataset.splits()
    assert {THINGS[outline.document] for outline in split.test} == asked
    assert not asked & {THINGS[outline.document] for outline in split.train if outline.document >= 0}
    tests = {document.name for document in learnt.store.adapter("reader").documents(1) if document.split == "test"}
    assert len(tests) == len(asked)


def test_general_text_and_chat_are_taught_by_the_base_model_and_answers_by_the_notes(learnt):
    dataset, tokenizer = learnt.training.task.dataset, learnt.training.base.tokenizer
    assert all(example.teacher is None for example in dataset.examples)
    assert all(example.teacher and example.document < 0 for example in dataset.general)
    assert any("How are you?" in text for text in decoded(dataset.general, tokenizer))
    assert any("The ferry left at six." in text for text in decoded(dataset.general, tokenizer))


def test_ask_uses_the_reader_as_it_was_trained(make, learnt):
    personalizer = make(after=True)
    texts = [f"The bellows hangs near the door.\n\nIt stands {ANSWER}.", "The wind was from the west."]
    answer = personalizer.ask("Where does the bellows stand?", texts, adapter="reader")
    assert answer.found and not answer.quoted and answer.text == ANSWER
    assert personalizer.ask("Where does the bellows stand?", texts, adapter=None).quoted


def test_the_same_notes_are_not_learnt_again_and_other_ones_all_together(make, monkeypatch):
    personalizer = make(after=True)
    again = personalizer.adapt()
    assert again.unchanged and (again.name, again.version, again.documents) == ("reader", 1, len(NOTES))
    use_notes(monkeypatch, (NOTES[0] | {"text": "# The samovar\n\nIt is gone, but stood behind the shed."}, *NOTES[1:]))
    found = personalizer.inspect()
    assert found.beginning == (
        "All documents are learnt again, since version 1 reads other practice notes, and all are learnt together."
    )
    assert found.plan is not None and found.fitting_recipe == "ask"


def test_texts_are_not_learnt_and_a_notice_says_so(make):
    personalizer = make(after=True)
    assert personalizer.adapt("A text of mine.").unchanged
    assert notices(personalizer) == ["The recipe 'ask' trains on bundled notes; yours are not learnt."]


def test_other_recipes_need_texts(model, tmp_path):
    with pytest.raises(TextsError, match="No texts were given; give files or folders"):
        Personalizer(model, store=tmp_path).adapt()


@pytest.mark.slow
def test_the_plan_is_kept(make):
    personalizer = make(recipe=NO_EFFECT, memory_budget="30GB")
    assert personalizer.plan().chosen.peak > 0
    assert personalizer.adapt().predicted_peak_bytes is not None


@pytest.mark.slow
def test_a_model_without_a_chat_template_is_asked_in_the_plain_format(make, runs, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    personalizer = make(model=save_model(tmp_path / "plain", tokenizer))
    result = personalizer.adapt()
    assert result.quiz.right_after == result.quiz.questions
    assert not personalizer.store.adapter("reader").open().record.chat
    asked, dataset = runs[0].task.dataset.quiz.about_notes[0], runs[0].task.dataset
    assert tokenizer.decode(asked.alone) == f"<|bos|>Question: {asked.question}\nAnswer:"
    assert tokenizer.decode(asked.found).startswith("<|bos|>Question: practice/")
    texts = decoded(dataset.examples, tokenizer)
    assert all(text.startswith("<|bos|>Question: ") and "\nAnswer: " in text for text in texts)
    question = {"prompt": asked.question, "temperature": 0, "max_new_tokens": 16}
    assert personalizer.generate(**question) == f" {ANSWER}"
    assert ANSWER not in personalizer.generate(**question, adapter=None)


def test_notes_that_are_longer_than_the_context_are_left_out_and_said(make, model, tmp_path):
    found = make(recipe=NO_EFFECT.replace(context_length=60)).inspect()
    (reason,) = {group.reason for group in found.left_out}
    assert reason == "longer than the context"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("<|end|>{% endgeneration %}", "{% endgeneration %}<|end|>", "leaves the token that ends an answer without"),
        ("<|end|>{% endgeneration %}", "<|over|>{% endgeneration %}", "but the model has embeddings for 3.. tokens"),
    ],
    ids=["end without loss", "unknown token"],
)
def test_a_chat_template_that_nothing_can_be_learnt_in_is_refused(make, tmp_path, old, new, words):
    tokenizer = make_tokenizer()
    assert old in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(old, new)
    known = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|over|>"]})
    personalizer = make(model=save_model(tmp_path / "model", tokenizer, vocab_size=known), recipe=NO_EFFECT)
    with pytest.raises(ModelError, match=words):
        personalizer.adapt()
    assert personalizer.store.names() == []


def test_forget_leaves_a_reader_as_it_is(make):
    """It has learnt no text of the user's."""
    personalizer = make(after=True)
    before = (personalizer.store.adapter("reader").open().path / WEIGHTS).read_bytes()
    with pytest.raises(Exception, match="know"):
        personalizer.forget("my-diary.md", name="reader")
    assert (personalizer.store.adapter("reader").open().path / WEIGHTS).read_bytes() == before


def test_the_bundled_recipe_is_the_one_that_these_tests_vary():
    recipe = Recipe.load("ask")
    assert (recipe.questions, recipe.chat_template, recipe.refits) == ("practice", True, False)
    assert recipe.default_name == "reader"
    assert Recipe.load("notes").default_name == "default"
