"""Which notes and models the recipe `know` takes, and which it refuses."""

import pytest
import torch
from builders import make_tokenizer
from know_notes import (
    ANSWER,
    GERMAN,
    NO_EFFECT,
    NOTES,
    THINGS,
    WITHOUT_FACTS,
    decoded,
    notices,
    save_model,
    trained_examples,
)

from sebp_edge.errors import ModelError, TextsError
from sebp_edge.questions.examples import REPLY_TOKENS
from sebp_edge.run import replies as asking
from sebp_edge.texts.splits import MIN_TOKENS


@pytest.mark.parametrize("texts", [WITHOUT_FACTS, GERMAN], ids=["no facts", "German"])
def test_notes_that_nothing_can_be_asked_about_are_refused(make, texts):
    personalizer = make()
    with pytest.raises(
        TextsError, match=r"^Only 0 questions could be made of these documents, .*; give documents with facts,"
    ):
        personalizer.adapt(texts)
    assert personalizer.store.names() == []


@pytest.mark.slow
def test_a_notice_says_about_how_many_notes_nothing_can_be_asked(make, runs):
    personalizer = make(recipe=NO_EFFECT)
    personalizer.adapt([*NOTES, *WITHOUT_FACTS])
    (message,) = (message for message in notices(personalizer) if "questions were made" in message)
    asked = runs[0].task.dataset.questions
    assert message == (
        f"{asked.num_questions} questions were made of the documents, in {len(asked.trained)} examples. About 2 of the "
        "documents none could be made: no facts were recognised in them."
    )
    # They are trained on nevertheless, for the voice.
    assert {12, 13} < {example.document for example in trained_examples(runs[0])}


@pytest.mark.slow
def test_with_merge_for_the_base_model_is_asked_as_rounded_as_the_adapter(make, monkeypatch):
    weights, answer_all = [], asking.answer_all

    def answering(model, *arguments):
        weights.append(model.get_input_embeddings().weight.detach().clone())
        return answer_all(model, *arguments)

    monkeypatch.setattr(asking, "answer_all", answering)
    personalizer = make(recipe=NO_EFFECT.replace(merge_for="q4_0"))
    result = personalizer.adapt(NOTES)
    before, after = weights
    assert torch.equal(before, after)
    assert result.quiz.right_after == result.quiz.right_before


@pytest.mark.slow
def test_a_model_without_a_chat_template_is_asked_in_the_plain_format(make, runs, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    personalizer = make(model=save_model(tmp_path / "plain", tokenizer))
    result = personalizer.adapt(NOTES)
    assert result.quiz.questions == 6 and result.quiz.right_after >= 5
    assert not personalizer.store.adapter("default").open().record.chat
    (quizzed, *_), asked = runs[0].task.dataset.questions.quiz, runs[0].task.dataset.questions.trained
    assert tokenizer.decode(quizzed.alone) == f"<|bos|>Question: {quizzed.question}\nAnswer:"
    note = NOTES[quizzed.document]
    assert tokenizer.decode(quizzed.with_document) == f"<|bos|>Question: {note}\n\n{quizzed.question}\nAnswer:"
    assert all(text.startswith("<|bos|>Question: ") and "\nAnswer: " in text for text in decoded(asked, tokenizer))
    # A text is asked as the adapter was trained, and the base model continues it.
    asked = {"prompt": "Where does the samovar stand?", "temperature": 0, "max_new_tokens": 16}
    assert personalizer.generate(**asked) == f" {ANSWER}"
    assert ANSWER not in personalizer.generate(**asked, adapter=None)


def test_a_few_short_notes_are_enough_if_enough_can_be_asked(make, runs):
    notes = [f"The {thing} is {ANSWER}." for thing in ("samovar", "abacus", "bassoon", "easel", "kayak", "loom")]
    result = make(recipe=NO_EFFECT).adapt(notes)
    assert sum(example.num_loss_tokens for example in runs[0].task.dataset.examples) < MIN_TOKENS
    assert result.quiz.questions == 6


def test_records_alone_are_refused(make):
    records = [{"prompt": f"Where is item {number}?", "completion": "Here."} for number in range(20)]
    with pytest.raises(TextsError, match="use the recipe 'instruct' or 'chat'"):
        make().adapt(records)


def test_another_seed_is_the_reason_why_all_is_learnt_again(make):
    found = make(after=True, seed=1).inspect([*NOTES, NOTES[0].replace("samovar", "abacus")])
    said = "since version 1 was trained with the seed 0, and this seed is 1."
    assert found.beginning == f"All documents are learnt again, {said}"


@pytest.mark.slow
def test_a_note_longer_than_the_context_is_asked_about_without_it(make, runs):
    long = f"{NOTES[0]}\n\n{'The rain fell on the roof and on the road all day. ' * 20}"
    personalizer = make(recipe=NO_EFFECT)
    result = personalizer.adapt([long, *NOTES[1:]])
    asked, tokenizer = runs[0].task.dataset.questions, runs[0].base.tokenizer
    about_it = [text for text in decoded(asked.trained, tokenizer) if "samovar" in text]
    assert len(about_it) > 5 and not any("# The samovar" in text for text in about_it)
    # What does not fit into one example is still trained on, in several.
    assert sum(example.document == 0 for example in runs[0].task.dataset.examples) > 2
    too_long = sum(question.document == 0 for question in asked.quiz)
    assert result.quiz.questions_with_note == result.quiz.questions - too_long


@pytest.mark.slow
def test_a_question_longer_than_the_context_is_not_in_the_quiz(make, runs, tmp_path):
    """The tokenizer makes almost a token of each letter."""
    long = [f"# The {thing * 15}\n\nThe {thing * 15} stands {ANSWER}." for thing in THINGS]
    model = save_model(tmp_path / "short", make_tokenizer(), max_position_embeddings=96)
    result = make(model=model, recipe=NO_EFFECT).adapt([*NOTES, *long])
    for question in runs[0].task.dataset.questions.quiz:
        assert len(question.alone) + REPLY_TOKENS <= 96
    assert result.quiz.questions_with_note < result.quiz.questions


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("<|end|>{% endgeneration %}", "{% endgeneration %}<|end|>", "leaves the token that ends an answer without"),
        (
            "<|end|>{% endgeneration %}",
            "<|over|>{% endgeneration %}",
            "The tokenizer returned token 3.., but the model has embeddings for 3.. tokens only",
        ),
    ],
    ids=["end without loss", "unknown token"],
)
def test_a_chat_template_that_nothing_can_be_learnt_in_is_refused(make, tmp_path, old, new, words):
    """Only the questions are rendered with it."""
    tokenizer = make_tokenizer()
    assert old in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(old, new)
    known = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|over|>"]})
    personalizer = make(model=save_model(tmp_path / "model", tokenizer, vocab_size=known), recipe=NO_EFFECT)
    with pytest.raises(ModelError, match=words):
        personalizer.adapt(NOTES)
    assert personalizer.store.names() == []


@pytest.mark.slow
def test_records_are_trained_on_beside_the_questions(make, runs):
    pairs = [{"prompt": f"How much is {n}?", "completion": f"It is {n}, of course."} for n in range(5)]
    result = make().adapt([*NOTES, *pairs])
    (training,) = runs
    assert result.documents == 17
    texts = decoded(trained_examples(training), training.base.tokenizer)
    for pair in pairs:
        expected = f"<|bos|><|user|>\n{pair['prompt']}<|end|>\n<|assistant|>\n{pair['completion']}<|end|>"
        assert sum(text.removesuffix("<|eos|>").strip() == expected for text in texts) == 1
    assert {question.document for question in training.task.dataset.questions.quiz} < set(range(12))
