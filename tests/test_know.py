"""The recipe `know`, as an app and the command line meet it: questions about notes, and a quiz as the gate.

A random model of two layers learns to answer questions about these notes in a second, since they all say the same of
their subjects.
"""

import json
import re
import shutil
import threading
from dataclasses import asdict, dataclass

import pytest
import torch
from builders import make_llama, make_tokenizer
from command import records, run

from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.adapters.documents import read_history
from sebp_edge.adapters.record import AdapterRecord
from sebp_edge.errors import Interrupted, ModelError, TextsError
from sebp_edge.events import (
    ExamplesEvaluated,
    JsonLines,
    Notice,
    PreparationProgress,
    StepDone,
    TrainingStarted,
)
from sebp_edge.insight import replies as asking
from sebp_edge.insight.forgetting import GeneralLoss
from sebp_edge.models.adaptation import read_state, snapshot
from sebp_edge.preparation import ASKED_TOGETHER
from sebp_edge.questions.examples import REPLY_TOKENS
from sebp_edge.texts.examples import NO_DOCUMENT
from sebp_edge.texts.split_history import take_fingerprints
from sebp_edge.texts.splits import MIN_TOKENS
from sebp_edge.training import restraint
from sebp_edge.training.evaluation import HeldOutLoss
from sebp_edge.training.quiz import Replies
from sebp_edge.training.run import TrainingRun

CHANGES = {"epochs": 2, "learning_rate": 1e-2, "general": 0.05, "r": 8, "lora_alpha": 16, "min_steps": 16}
RECIPE = Recipe.load("know").replace(**CHANGES)
NO_EFFECT = RECIPE.replace(learning_rate=1e-9, epochs=1)
THINGS = "samovar bicycle canoe piano kettle ladder lantern wagon freezer ladle kayak mower".split()  # noqa: SIM905
ANSWER = "behind the shed"
NOTES = [f"# The {thing}\n\nThe {thing} stands {ANSWER}." for thing in THINGS]
# Words of the notes, of the questions and of the answers.
OWN_WORDS = [*THINGS, "shed", "stand"]
WITHOUT_FACTS = ["Hm, hm, hm, so so, la la la. " * 20, "Oh, well, and on and on, la la. " * 20]
GERMAN = [f"Das Boot Nummer {n} lag am Ufer, und der Wind kam aus dem Westen. Wir gingen heim." for n in range(12)]
OTHER = [f"# The raft\n\nThe raft stands {ANSWER}."]
GENERAL = "The ferry left at six.\n<|text|>\nThe wind was from the west, and we took the bread.\n"
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "micro", make_tokenizer())


def save_model(folder, tokenizer, **changes):
    """Saves a model with random weights so large that a few steps change its answers."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 256, "initializer_range": 0.1}
    make_llama(**(sizes | changes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def general(tmp_path_factory):
    """A few words of general text, since all of it takes longer to tokenise than these trainings."""
    file = tmp_path_factory.mktemp("general") / "texts.txt"
    file.write_text(GENERAL, encoding="utf-8")
    return file


@pytest.fixture(autouse=True)
def quick(monkeypatch, general):
    make_quick(monkeypatch, general)


def make_quick(patch, general):
    """Leaves out what the quiz does not ask for."""
    patch.setattr("sebp_edge.questions.general_texts.TEXTS", general)
    patch.setattr("sebp_edge.assessment.general_loss", lambda *_: GeneralLoss(1.0, 1.0))
    patch.setattr("sebp_edge.assessment.longest_copies", lambda *_: [])


@dataclass
class Learnt:
    """An adaptation to the notes that is kept: its result, its store, its events, and what it trained on."""

    result: object
    store: AdapterStore
    events: list
    training: TrainingRun


@pytest.fixture(scope="module")
def learnt(tmp_path_factory, model, general):
    with pytest.MonkeyPatch.context() as patch:
        make_quick(patch, general)
        runs = watch_runs(patch)
        personalizer = new_personalizer(model, tmp_path_factory.mktemp("stores"))
        return Learnt(personalizer.adapt(NOTES), personalizer.store, personalizer.events, runs[0])


@pytest.fixture
def runs(monkeypatch):
    return watch_runs(monkeypatch)


def watch_runs(patch):
    """Returns a list to which each training's run is added."""
    found, train = [], TrainingRun.train

    def watched(self, gate):
        found.append(self)
        return train(self, gate)

    patch.setattr(TrainingRun, "train", watched)
    return found


def new_personalizer(model, store, **options):
    """A Personalizer whose events are in `events`."""
    events = []
    options = {"recipe": RECIPE, "device": "cpu", "on_event": events.append} | options
    personalizer = Personalizer(model, store=AdapterStore(store), **options)
    personalizer.events = events
    return personalizer


@pytest.fixture
def make(model, tmp_path, request):
    """A function that makes a Personalizer; after=True: whose store has learnt the notes."""

    def personalizer(store="store", *, after=False, model=model, **options):
        if after:
            shutil.copytree(request.getfixturevalue("learnt").store.folder.parent, tmp_path / store)
        return new_personalizer(model, tmp_path / store, **options)

    return personalizer


def notices(personalizer):
    return [event.message for event in personalizer.events if isinstance(event, Notice)]


def trained_examples(training):
    (split,) = training.dataset.splits()
    return split.train


def decoded(examples, tokenizer):
    return [tokenizer.decode(example.input_ids) for example in examples]


# ---------------------------------------------------------------------------------------------------------- the result


def test_the_result_says_what_is_answered_before_and_after(learnt):
    result = learnt.result
    assert (result.verdict, result.kept, result.active, result.version) == ("kept", True, True, 1)
    assert (result.quiz.questions, result.quiz.questions_with_note) == (6, 6)
    assert (result.quiz.right_before, result.quiz.right_with_note_before, result.quiz.right_active) == (0, 0, None)
    assert result.quiz.right_after == sum(answer.right for answer in result.answers) >= 5
    assert len(result.answers) == 6
    for answer in result.answers:
        assert any(thing in answer.question for thing in THINGS) and answer.question.endswith("?")
        assert answer.answer == ANSWER
        assert answer.right == (ANSWER in answer.reply)
    assert result.summary.startswith(f"It answers {result.quiz.right_after} of 6 questions about your notes (0 before)")
    assert "of 10 answers about your notes to be right" in result.expectation
    assert result.samples == () and not result.trained_on_all


def test_the_record_and_the_json_have_the_counts(learnt):
    record = AdapterRecord.read(learnt.result.adapter_path)
    assert record.quiz == asdict(learnt.result.quiz) == learnt.result.to_dict()["quiz"]
    assert (record.verdict, record.chat) == ("kept", True)
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
    assert any(text.startswith("<|bos|><|user|>Where samovar stands?") for text in texts)
    assert any(NOTES[0] in text and "?" in text for text in texts)
    chosen_by = decoded(training.dataset.asked.validation, tokenizer)
    for answer in learnt.result.answers:
        assert not any(answer.question in text for text in texts + chosen_by), answer.question
    assert len(chosen_by) == 6 and not set(chosen_by) & set(texts)
    assert {document.split for document in learnt.store.documents("default", 1)} == {"train"}


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


def test_an_adapter_that_forgets_general_text_is_scaled_down(make, monkeypatch):
    def watched(self, learner, best, *others):
        names = [name for name, parameter in self.adaptation.model.named_parameters() if parameter.requires_grad]
        before = best.best_state
        restrain(self, learner, best, *others)
        states.extend(zip(names, before, best.best_state, snapshot(self.adaptation), strict=True))

    states, restrain = [], TrainingRun._restrain
    monkeypatch.setattr(TrainingRun, "_restrain", watched)
    monkeypatch.setattr(restraint, "MAX_RISE", 1e-12)
    monkeypatch.setattr(restraint, "evaluate", lambda learner, general: HeldOutLoss(nats={0: 1e9}, tokens={0: 1}))
    personalizer = make(recipe=RECIPE.replace(epochs=1))
    personalizer.adapt(NOTES, keep_anyway=True)
    because = "since the loss on general text rose by more than 2.0%"
    assert f"The adapter was scaled to 50%, {because}." in notices(personalizer)
    for name, before, best, now in states:
        expected = before * 0.5 if "lora_B" in name else before
        assert torch.equal(best, expected) and torch.equal(now, expected), name


def test_an_adapter_that_forgets_little_stays_as_it_is(make, monkeypatch):
    monkeypatch.setattr(restraint, "MAX_RISE", 1e9)
    personalizer = make(recipe=RECIPE.replace(epochs=1))
    personalizer.adapt(NOTES, keep_anyway=True)
    assert not any("scaled" in message for message in notices(personalizer))


def test_a_stop_while_it_is_scaled_leaves_what_was_trained(make, runs, monkeypatch):
    def evaluate(learner, general):
        states.append(snapshot(learner.adaptation))
        if len(states) == 2:
            raise KeyboardInterrupt
        return HeldOutLoss(nats={0: 1e9}, tokens={0: 1})

    states = []
    monkeypatch.setattr(restraint, "evaluate", evaluate)
    personalizer = make(recipe=RECIPE.replace(epochs=1))
    with pytest.raises(Interrupted) as stopped:
        personalizer.adapt(NOTES)
    folder = personalizer.store.open("default", stopped.value.version).path
    saved = read_state(runs[0].base, folder)
    assert all(torch.equal(*pair) for pair in zip(saved, states[0], strict=True))
    assert not all(torch.equal(*pair) for pair in zip(saved, states[1], strict=True))


# ------------------------------------------------------------------------------------------------------------ the gate


def test_an_adapter_that_learnt_it_answers_in_a_chat(make, learnt):
    personalizer = make(after=True)
    asked = [f"Where does the {thing} stand?" for thing in ("samovar", "piano")]
    for question in asked:
        chat = [{"role": "user", "content": question}]
        for prompt in (question, chat):
            assert ANSWER in personalizer.generate(prompt, adapter="default", temperature=0, max_new_tokens=16)
        assert ANSWER not in personalizer.generate(prompt, adapter=None, temperature=0, max_new_tokens=16)


def test_an_adapter_that_does_not_answer_better_is_saved_and_not_active(make):
    personalizer = make(recipe=NO_EFFECT)
    result = personalizer.adapt(NOTES)
    assert (result.verdict, result.kept, result.active, result.version) == ("no gain", False, False, 1)
    assert (result.quiz.right_before, result.quiz.right_after) == (0, 0)
    assert "It answers 0 of 6 questions about your notes (0 before)" in result.summary
    assert "too few more for the gate to tell them from chance" in result.summary
    assert "Version 1 is saved, but not active; to activate it anyway" in result.summary
    store = personalizer.store
    assert (store.versions("default"), store.active_version("default")) == ([1], None)
    assert store.open("default", 1).record.verdict == "no gain"
    assert personalizer.in_use.adapter_folder is None


def test_keep_anyway_activates_it(make):
    personalizer = make(after=True, recipe=NO_EFFECT)
    result = personalizer.adapt(NOTES, keep_anyway=True)
    assert (result.verdict, result.kept, result.active, result.version) == ("no gain", False, True, 2)
    assert "Version 2 is active, as you asked with keep_anyway." in result.summary
    assert personalizer.store.active_version("default") == 2
    assert personalizer.in_use.adapter_folder == result.adapter_path


@pytest.fixture
def reply(monkeypatch):
    """A function that sets the numbers of right replies, alone and after the note, each time that the quiz is asked."""

    def set_replies(*right):
        left = list(right)

        def ask_quiz(base, quiz, check):
            alone, after = left.pop(0)
            rows = [[one.answer if n < number else "" for n, one in enumerate(quiz)] for number in (alone, after)]
            return Replies(tuple(rows[0]), tuple(rows[1]))

        monkeypatch.setattr("sebp_edge.assessment.ask_quiz", ask_quiz)
        return left

    return set_replies


@pytest.mark.parametrize(
    ("active", "after", "verdict", "words"),
    [
        ((0, 0), (6, 6), "kept", "answers 6 of 6 questions about your notes (0 before), and 6 of 6 with the note in"),
        ((6, 0), (6, 0), "kept", "answers 6 of 6 questions"),
        ((0, 0), (4, 6), "no gain", "answers 4 of 6 questions"),
        ((0, 0), (6, 1), "reads worse", "1 of 6 with the note in the prompt (6 before): it reads worse"),
        ((6, 0), (5, 6), "kept", "answers 5 of 6"),
    ],
)
def test_the_base_model_and_the_active_version_are_asked_too(make, reply, active, after, verdict, words):
    """In this order: the active version, the base model, the new one."""
    left = reply(active, (0, 6 if verdict == "reads worse" else 0), after)
    personalizer = make(after=True, recipe=NO_EFFECT)
    result = personalizer.adapt(NOTES)
    assert left == []
    assert (result.verdict, result.active, result.compared_with) == (verdict, verdict == "kept", 1)
    assert words in result.summary
    assert (result.quiz.right_active, result.quiz.right_after) == (active[0], after[0])
    assert personalizer.store.active_version("default") == (2 if verdict == "kept" else 1)


def test_an_adapter_that_answers_less_than_the_active_one_does_not_replace_it(make, reply, monkeypatch):
    monkeypatch.setattr("sebp_edge.questions.examples.QUIZ_SHARE", 1.0)
    personalizer = make(after=True, recipe=NO_EFFECT)
    reply((12, 0), (0, 12), (6, 12))
    result = personalizer.adapt(NOTES)
    assert (result.verdict, result.active, result.quiz.right_active) == ("worse than active", False, 12)
    assert "answers 6 of 12 questions" in result.summary
    assert "but the version that is active answers 12." in result.summary
    assert personalizer.store.active_version("default") == 1


def test_an_active_version_that_cannot_be_asked_is_not_replaced(make, tmp_path):
    other = save_model(tmp_path / "other", make_tokenizer(), initializer_range=0.11)
    personalizer = make(after=True, model=other)
    result = personalizer.adapt(NOTES)
    assert (result.verdict, result.active, result.quiz.right_active) == ("not comparable", False, None)
    assert result.quiz.right_after >= 5
    words = "but version 1, which is active, could not be asked: it was made for another base model, micro."
    assert words in result.summary
    assert personalizer.store.active_version("default") == 1
    assert personalizer.store.open("default", 2).record.explanation in result.summary


# --------------------------------------------------------------------------------------------- again, and forgetting


def test_unchanged_notes_are_not_learnt_again(make, learnt):
    personalizer = make(after=True)
    again = personalizer.adapt([*reversed(NOTES)])
    assert again.unchanged and (again.version, again.kept, again.documents) == (1, True, 12)
    assert all(isinstance(event, PreparationProgress) for event in personalizer.events)
    assert personalizer.store.versions("default") == [1]


@pytest.mark.parametrize(
    "texts",
    [[*NOTES, f"# The raft\n\nThe raft stands {ANSWER}."], [NOTES[0].replace("shed", "barn"), *NOTES[1:]]],
    ids=["new", "changed"],
)
def test_a_new_or_changed_note_makes_it_learn_all_again_and_say_why(make, runs, texts):
    personalizer = make(after=True)
    result = personalizer.adapt(texts)
    assert (result.learnt_on_from, result.version, result.compared_with, result.kept) == (None, 2, 1, True)
    assert f"All documents are learnt again, not on top of version 1: {ASKED_TOGETHER}." in notices(personalizer)
    (training,) = runs
    assert {example.document for example in trained_examples(training)} - {NO_DOCUMENT} == set(range(len(texts)))
    assert personalizer.adapt(texts).unchanged


def test_forget_makes_bit_for_bit_what_fresh_makes_of_the_other_notes(make):
    forgetting, fresh = (make(store, after=True) for store in ("forgetting", "fresh"))
    salt = read_history(forgetting.store.open("default").path).salt
    receipt = forgetting.forget(f"{take_fingerprints({3: NOTES[3]}, salt)[3].key:016x}", NOTES)
    assert (receipt.versions_removed, receipt.replaced_by, receipt.active) == ((1,), 2, 2)
    assert forgetting.store.versions("default") == [2]
    without = [*NOTES[:3], *NOTES[4:]]
    expected = fresh.adapt(without, fresh=True)
    found = forgetting.store.open("default", 2)
    assert (found.path / WEIGHTS).read_bytes() == (expected.adapter_path / WEIGHTS).read_bytes()
    # The one that is forgotten was active, but nothing is compared with it.
    assert found.record.quiz == asdict(expected.quiz) | {"right_active": None}
    assert found.record.documents == expected.documents == 11
    assert forgetting.adapt(without).unchanged


# ---------------------------------------------------------------------------------------------------------------- stops


def is_asking(event, events):
    return isinstance(event, PreparationProgress) and event.stage == "asking"


def is_teaching(event, events):
    """The base model reads general text, before the training."""
    return isinstance(event, ExamplesEvaluated) and not any(isinstance(each, TrainingStarted) for each in events)


def is_training(event, events):
    return isinstance(event, StepDone) and event.step == 20


STOPPED = "Stopped; nothing was changed."
BEST_STATE = "Interrupted. The best state so far is saved as version 2 of the adapter 'default'; it is not active."


@pytest.mark.parametrize(
    ("begins", "message", "versions"),
    [(is_asking, STOPPED, [1]), (is_teaching, STOPPED, [1]), (is_training, BEST_STATE, [1, 2])],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_stop_says_what_was_saved_and_loses_nothing(make, begins, message, versions):
    personalizer, stop, events = make(after=True), threading.Event(), []

    def on_event(event):
        assert not stop.is_set() or event.event == "saved"
        events.append(event)
        if begins(event, events):
            stop.set()

    personalizer.on_event = on_event
    with pytest.raises(Interrupted) as stopped:
        personalizer.adapt(NOTES[1:] + OTHER, stop_when=stop)
    assert str(stopped.value) == message
    assert_nothing_is_lost(personalizer, versions)


@pytest.mark.parametrize(
    ("asked", "message", "versions"),
    [
        (1, "Interrupted. No state better than the start was found, so nothing was saved.", [1]),
        (2, BEST_STATE, [1, 2]),
        (3, BEST_STATE, [1, 2]),
    ],
    ids=["active version", "base model", "new version"],
)
def test_a_quiz_can_be_stopped(make, monkeypatch, asked, message, versions):
    """While it is asked: the active version before the training, or the base model or the new version after it."""
    personalizer, stop, answer_all, calls = make(after=True), threading.Event(), asking.answer_all, []

    def stopping(*arguments):
        calls.append(arguments)
        if len(calls) == asked:
            stop.set()
        return answer_all(*arguments)

    monkeypatch.setattr(asking, "answer_all", stopping)
    with pytest.raises(Interrupted) as stopped:
        personalizer.adapt(NOTES[1:] + OTHER, stop_when=stop)
    assert (str(stopped.value), len(calls)) == (message, asked)
    assert_nothing_is_lost(personalizer, versions)
    if versions == [1, 2]:
        # The quiz decides, and it was not asked to the end.
        record = personalizer.store.open("default", 2).record
        assert record.is_interrupted and record.quiz is record.explanation is None


def assert_nothing_is_lost(personalizer, versions):
    """Asserts that the first version is active and works as before, and that the next call learns all."""
    personalizer.on_event = personalizer.events.append
    store = personalizer.store
    assert (store.versions("default"), store.active_version("default")) == (versions, 1)
    question = "Where does the samovar stand?"
    assert ANSWER in personalizer.generate(question, adapter="default", temperature=0, max_new_tokens=16)
    result = personalizer.adapt(NOTES[1:] + OTHER)
    assert (result.kept, result.version) == (True, versions[-1] + 1)


# ----------------------------------------------------------------------------------------- notes that give no questions


@pytest.mark.parametrize("texts", [WITHOUT_FACTS, GERMAN], ids=["no facts", "German"])
def test_notes_that_nothing_can_be_asked_about_are_refused(make, texts):
    personalizer = make()
    with pytest.raises(
        TextsError, match=r"^Only 0 questions could be made of these documents, .*; give documents with facts,"
    ):
        personalizer.adapt(texts)
    assert personalizer.store.names() == []


def test_a_notice_says_about_how_many_notes_nothing_can_be_asked(make, runs):
    personalizer = make(recipe=NO_EFFECT)
    personalizer.adapt([*NOTES, *WITHOUT_FACTS])
    (message,) = (message for message in notices(personalizer) if "questions were made" in message)
    asked = runs[0].dataset.asked
    assert message == (
        f"{asked.num_questions} questions were made of the documents, in {len(asked.trained)} examples. About 2 of the "
        "documents none could be made: no facts were recognised in them."
    )
    # They are trained on nevertheless, for the voice.
    assert {12, 13} < {example.document for example in trained_examples(runs[0])}


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


# ------------------------------------------------------------------------------------------- other models and documents


def test_a_model_without_a_chat_template_is_asked_in_the_plain_format(make, runs, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    personalizer = make(model=save_model(tmp_path / "plain", tokenizer))
    result = personalizer.adapt(NOTES)
    assert result.quiz.questions == 6 and result.quiz.right_after >= 5
    assert not personalizer.store.open("default").record.chat
    (quizzed, *_), asked = runs[0].dataset.asked.quiz, runs[0].dataset.asked.trained
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
    assert sum(example.num_loss_tokens for example in runs[0].dataset.examples) < MIN_TOKENS
    assert result.quiz.questions == 6


def test_records_alone_are_refused(make):
    records = [{"prompt": f"Where is item {number}?", "completion": "Here."} for number in range(20)]
    with pytest.raises(TextsError, match="use the recipe 'instruct' or 'chat'"):
        make().adapt(records)


def test_another_seed_is_the_reason_why_all_is_learnt_again(make, learnt):
    personalizer = make(after=True, seed=1)
    personalizer.adapt([*NOTES, NOTES[0].replace("samovar", "abacus")])
    assert "All documents are learnt again, not on top of version 1: its seed is 0." in notices(personalizer)


def test_a_note_longer_than_the_context_is_asked_about_without_it(make, runs):
    long = f"{NOTES[0]}\n\n{'The rain fell on the roof and on the road all day. ' * 20}"
    personalizer = make(recipe=NO_EFFECT)
    result = personalizer.adapt([long, *NOTES[1:]])
    asked, tokenizer = runs[0].dataset.asked, runs[0].base.tokenizer
    about_it = [text for text in decoded(asked.trained, tokenizer) if "samovar" in text]
    assert len(about_it) > 5 and not any("# The samovar" in text for text in about_it)
    # What does not fit into one example is still trained on, in several.
    assert sum(example.document == 0 for example in runs[0].dataset.examples) > 2
    too_long = sum(question.document == 0 for question in asked.quiz)
    assert result.quiz.questions_with_note == result.quiz.questions - too_long


def test_a_question_longer_than_the_context_is_not_in_the_quiz(make, runs, tmp_path):
    """The tokenizer makes almost a token of each letter."""
    long = [f"# The {thing * 15}\n\nThe {thing * 15} stands {ANSWER}." for thing in THINGS]
    model = save_model(tmp_path / "short", make_tokenizer(), max_position_embeddings=96)
    result = make(model=model, recipe=NO_EFFECT).adapt([*NOTES, *long])
    for question in runs[0].dataset.asked.quiz:
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


def test_records_are_trained_on_beside_the_questions(make, runs):
    pairs = [{"prompt": f"How much is {n}?", "completion": f"It is {n}, of course."} for n in range(5)]
    result = make().adapt([*NOTES, *pairs])
    (training,) = runs
    assert result.documents == 17
    texts = decoded(trained_examples(training), training.base.tokenizer)
    for pair in pairs:
        expected = f"<|bos|><|user|>{pair['prompt']}<|end|><|assistant|>{pair['completion']}<|end|>"
        assert sum(text.removesuffix("<|eos|>") == expected for text in texts) == 1
    assert {question.document for question in training.dataset.asked.quiz} < set(range(12))


# ------------------------------------------------------------------------------------------------ plans and inspections


def test_the_plan_counts_the_examples_of_questions(make, runs):
    personalizer = make(memory_budget="30GB")
    notes = make(recipe=Recipe(**asdict(RECIPE) | {"questions": None, "sparsity": None}), memory_budget="30GB")
    plan, of_notes = personalizer.plan(NOTES).chosen, notes.plan(NOTES).chosen
    assert plan.seconds > 2 * of_notes.seconds
    result = personalizer.adapt(NOTES)
    assert result.kept and result.predicted_peak_bytes is not None
    (training,) = runs
    assert sum(len(example.input_ids) for example in trained_examples(training)) > 3 * training.dataset.num_tokens


def test_an_inspection_says_what_would_be_asked(make, runs):
    personalizer = make(after=True)
    texts = [*NOTES, *OTHER, *WITHOUT_FACTS]
    found = personalizer.inspect(texts)
    assert re.fullmatch(r"\d+ questions .* in \d+ examples\. About 2 of the documents none .*", found.asked)
    assert found.plan is not None and found.refusal == ""
    assert found.beginning == f"All documents are learnt again, not on top of version 1: {ASKED_TOGETHER}."
    assert found.expectations[0].startswith("It will answer questions about these notes, not all of them rightly;")
    assert "fits these texts better" not in found.summary
    personalizer.adapt(texts)
    assert found.asked in notices(personalizer)


def test_an_inspection_says_that_nothing_is_new(make):
    found = make(after=True).inspect(NOTES)
    assert found.plan is None and found.summary.startswith("Nothing is new in 12 documents: version 1 of the adapter")


@pytest.mark.parametrize("texts", [WITHOUT_FACTS, GERMAN], ids=["no facts", "German"])
def test_an_inspection_says_that_too_little_can_be_asked(make, texts):
    found = make().inspect(texts)
    assert found.refusal.startswith("Only 0 questions could be made of these documents, ")
    assert found.plan is None and found.asked == "" and found.documents == len(texts)


# ---------------------------------------------------------------------------------------------------- the command line


@pytest.fixture
def folder(tmp_path):
    """A folder with the notes."""
    folder = tmp_path / "notes"
    folder.mkdir()
    for thing, note in zip(THINGS, NOTES, strict=True):
        (folder / f"{thing}.md").write_text(note, encoding="utf-8")
    return folder


@pytest.fixture
def command(folder, model, tmp_path):
    """Arguments that adapt the model to the notes with a recipe file."""
    values = {"description": "", **CHANGES, "chat_template": True, "questions": "rules", "batch_rows": 512}
    recipe = tmp_path / "asked.toml"
    recipe.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    return ["adapt", folder, "--model", model, "--recipe", recipe]


def one_line(output):
    """Returns an output without its line breaks, which depend on the width of the terminal."""
    return " ".join(output.split())


def test_json_has_the_counts_and_no_word_of_the_notes(command, folder):
    result = run(*command, "--json")
    assert result.exit_code == 0, result.output
    *_, last = records(result.stdout)
    assert (last["verdict"], last["active"], last["quiz"]["questions"]) == ("kept", True, 6)
    assert last["quiz"]["right_after"] >= 5 and "answers" not in last
    assert not [word for word in OWN_WORDS if word in result.stdout.replace("boilerplate", "")]
    (shown,) = records(run("adapters", "show", "default", "--json").stdout)
    assert shown["quiz"] == last["quiz"]
    assert last["command"].startswith("sebp-edge generate 'A question' --name default")


def test_the_command_shows_answers_on_the_terminal_and_answers_then(command, model, tmp_path):
    result = run(*command)
    assert result.exit_code == 0, result.output
    plain = one_line(result.stdout)
    assert "quiz 0 → 6 of 6 questions answered right" in plain
    assert "with the note 0 → 6 of 6" in plain
    assert "answered wrong:" not in plain
    shown = plain.partition("answered right:")[2]
    assert shown.count("Where does the ") == 3 and shown.count(f"stand? {ANSWER}") == 3
    assert re.search(r"note: \d+ questions were made of the documents, in \d+ examples\.", one_line(result.stderr))
    assert "It answers 6 of 6 questions about your notes (0 before)" in plain
    assert "It answers 6 of 6 questions about your notes" in one_line(run("adapters", "show", "default").stdout)
    page = tmp_path / "page.html"
    assert run("adapters", "report", "default", "--to", page).exit_code == 0
    html = page.read_text(encoding="utf-8")
    assert "<dt>Questions answered right</dt><dd>0 → 6 of 6<small>with the note in the prompt, 0 → 6 of 6" in html
    assert not [word for word in OWN_WORDS if word in html.replace("boilerplate", "")]
    asked = ["Where does the samovar stand?", "--temperature", 0, "--max-tokens", 16, "--model", model]
    assert run("generate", *asked, "--name", "default").stdout == f"{ANSWER}\n"
    assert ANSWER not in run("generate", *asked).stdout


def test_the_command_shows_what_is_answered_wrong_and_exits_with_3(command):
    result = run(*command, "--epochs", 1, "--recipe", write_no_effect(command[-1]))
    assert result.exit_code == 3, result.output
    plain = one_line(result.stdout)
    assert "quiz 0 → 0 of 6 questions answered right" in plain
    wrong = plain.partition("answered wrong:")[2]
    assert wrong.count("Where does the ") == wrong.count(f"in the note: {ANSWER}") == 3
    assert "answered right:" not in plain
    assert "too few more for the gate" in plain


def write_no_effect(recipe):
    """Writes a recipe that trains too little to change an answer."""
    other = recipe.with_name("no-effect.toml")
    other.write_text(recipe.read_text().replace("0.01", "1e-9"))
    return other


def test_the_command_refuses_notes_without_facts_in_one_sentence(command, folder):
    for path in folder.iterdir():
        path.unlink()
    for number, text in enumerate(WITHOUT_FACTS):
        (folder / f"{number}.md").write_text(text, encoding="utf-8")
    result = run(*command)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert re.fullmatch(
        r"sebp-edge: Only 0 questions could be made .* the recipe 'asked' needs at least 6; .*'notes'\.\n",
        result.stderr,
    )
    assert AdapterStore().names() == []


def test_the_bundled_recipe_is_the_one_that_these_tests_vary():
    recipe = Recipe.load("know")
    assert (recipe.questions, recipe.chat_template, recipe.refits, recipe.general > 0) == ("rules", True, False, True)
    listed = records(run("recipes", "--json").stdout)
    assert next(each for each in listed if each["name"] == "know")["questions"] == "rules"
