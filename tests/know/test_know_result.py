"""What an adaptation with the recipe `know` reports, trains on and saves."""

from dataclasses import asdict

import pytest
import torch
from know_notes import ANSWER, NO_EFFECT, NOTES, OWN_WORDS, THINGS, decoded, notices, trained_examples

from sebp_edge.adapters.record import AdapterRecord
from sebp_edge.errors import Interrupted
from sebp_edge.events import JsonLines
from sebp_edge.models.adaptation import read_state, snapshot
from sebp_edge.texts.examples import NO_DOCUMENT
from sebp_edge.training import scale_down
from sebp_edge.training.evaluation import HeldOutLoss
from sebp_edge.training.run import TrainingRun


@pytest.mark.slow
def test_the_result_says_what_is_answered_before_and_after(learnt):
    result = learnt.result
    assert (result.verdict, result.passed, result.active, result.version) == ("better", True, True, 1)
    assert (result.quiz.questions, result.quiz.questions_with_note) == (6, 6)
    assert (result.quiz.right_before, result.quiz.right_with_note_before, result.quiz.right_active) == (0, 0, None)
    assert result.quiz.right_after == sum(answer.right for answer in result.answers) >= 5
    assert len(result.answers) == 6
    for answer in result.answers:
        assert any(thing in answer.question for thing in THINGS) and answer.question.endswith("?")
        assert answer.answer == ANSWER
        assert answer.right == (ANSWER in answer.reply)
    assert f"It answers {result.quiz.right_after} of 6 questions about your notes (0 before)" in result.summary
    assert "Expect fewer right answers to questions in your own words" in result.expectation
    assert result.samples == () and not result.trained_on_all


def test_the_record_and_the_json_have_the_counts(learnt):
    record = AdapterRecord.read(learnt.result.adapter_path)
    assert record.quiz == asdict(learnt.result.quiz) == learnt.result.to_dict()["quiz"]
    assert (record.verdict, record.chat) == ("better", True)
    card = (learnt.result.adapter_path / "README.md").read_text()
    assert f"Answers {record.quiz['right_after']} of 6 questions about the notes (0 before)" in card


def test_no_word_of_the_notes_is_saved_or_reported(learnt, tmp_path):
    with (tmp_path / "events.jsonl").open("w") as file:
        lines = JsonLines(file)
        for event in learnt.events:
            lines(event)
        lines.write(learnt.result.to_dict())
    files = [path for path in learnt.store.folder.parent.rglob("*") if path.is_file()]
    assert {"sebp_edge.json", "README.md"} < {path.name for path in files}
    texts = {path.name: path.read_bytes() for path in [*files, tmp_path / "events.jsonl"]}
    texts["repr"] = repr(learnt.result).encode()
    found = {(name, word) for name, text in texts.items() for word in OWN_WORDS if word.encode() in text}
    assert not found
    assert all(word in str(learnt.result.answers) for word in ("shed", "stand"))


def test_all_notes_are_trained_on_and_the_quiz_is_not(learnt):
    training, tokenizer = learnt.training, learnt.training.base.tokenizer
    examples = trained_examples(training)
    assert {example.document for example in examples} == {*range(len(NOTES)), NO_DOCUMENT}
    texts = decoded(examples, tokenizer)
    assert all(any(note in text and "?" not in text for text in texts) for note in NOTES)
    # The same is asked in keywords, alone and after the note.
    assert any(text.startswith("<|bos|><|user|>\nWhere samovar stands?") for text in texts)
    assert any(NOTES[0] in text and "?" in text for text in texts)
    chosen_by = decoded(training.task.dataset.questions.validation, tokenizer)
    for answer in learnt.result.answers:
        assert not any(answer.question in text for text in texts + chosen_by), answer.question
    assert len(chosen_by) == 6 and not set(chosen_by) & set(texts)
    assert {document.split for document in learnt.store.adapter("default").documents(1)} == {"train"}


@pytest.mark.slow
def test_notes_that_are_alike_do_not_train_on_the_quiz_of_each_other(make, runs):
    copies = [f"{note}\n\nSeen again on a walk." for note in NOTES]
    result = make(recipe=NO_EFFECT).adapt([*NOTES, *copies])
    asked = [answer.question for answer in result.answers]
    assert len(asked) == len(set(asked)) > 6
    texts = decoded(trained_examples(runs[0]), runs[0].base.tokenizer)
    assert not [question for question in asked if any(question in text for text in texts)]
    about = [thing for thing in THINGS if any(thing in question for question in asked)]
    assert all(sum(f"{thing} stands?" in text for text in texts) >= 2 for thing in about)


def test_general_text_is_taught_by_the_base_model_and_the_notes_by_themselves(learnt):
    for example in trained_examples(learnt.training):
        assert (example.teacher is not None) == (example.document == NO_DOCUMENT)


@pytest.mark.slow
def test_an_adapter_that_forgets_general_text_is_scaled_down(make, monkeypatch):
    def watched(self, learner, best, *others):
        names = [name for name, parameter in self.adaptation.model.named_parameters() if parameter.requires_grad]
        before = best.best_state
        scaled_down(self, learner, best, *others)
        states.extend(zip(names, before, best.best_state, snapshot(self.adaptation), strict=True))

    states, scaled_down = [], TrainingRun._scale_down
    monkeypatch.setattr(TrainingRun, "_scale_down", watched)
    monkeypatch.setattr(scale_down, "evaluate", lambda learner, general: HeldOutLoss(nats={0: 1e9}, tokens={0: 1}))
    personalizer = make()
    personalizer.adapt(NOTES, activate_anyway=True)
    because = "since the loss on general text rose by more than 2.0 %"
    assert f"The adapter was scaled to 50 %, {because}." in notices(personalizer)
    for name, before, best, now in states:
        expected = before * 0.5 if "lora_B" in name else before
        assert torch.equal(best, expected) and torch.equal(now, expected), name


@pytest.mark.slow
def test_an_adapter_that_forgets_little_stays_as_it_is(make):
    personalizer = make(recipe=NO_EFFECT)
    personalizer.adapt(NOTES, activate_anyway=True)
    assert not any("scaled" in message for message in notices(personalizer))


def test_a_stop_while_it_is_scaled_leaves_what_was_trained(make, runs, monkeypatch):
    def evaluate(learner, general):
        states.append(snapshot(learner.adaptation))
        if len(states) == 2:
            raise KeyboardInterrupt
        return HeldOutLoss(nats={0: 1e9}, tokens={0: 1})

    states = []
    monkeypatch.setattr(scale_down, "evaluate", evaluate)
    personalizer = make()
    with pytest.raises(Interrupted) as stopped:
        personalizer.adapt(NOTES)
    folder = personalizer.store.adapter("default").open(stopped.value.version).path
    saved = read_state(runs[0].base, folder)
    assert all(torch.equal(*pair) for pair in zip(saved, states[0], strict=True))
    assert not all(torch.equal(*pair) for pair in zip(saved, states[1], strict=True))
