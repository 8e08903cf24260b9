"""The recipe value "rules and model": the model's own questions are asked for, used, remembered and deleted."""

import re

import pytest
import torch
from builders import QUICK_TEMPLATE, make_llama, make_tokenizer
from know_notes import GENERAL, make_quick

from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.errors import Interrupted, MachineError, ModelError, TextsError
from sebp_edge.events import ModelLoaded, Notice, PreparationProgress
from sebp_edge.questions.interview import Interview, Interviewed
from sebp_edge.questions.question import Question

pytestmark = pytest.mark.slow

THINGS = ["boiler", "bicycle", "canoe", "piano", "kettle", "ladder", "lantern", "heap", "gate", "freezer"]
NOTES = [
    f"# The {thing}\n\nGreta repaired the {thing} on {day} May. It stands behind the shed. The code is {4000 + day}."
    for day, thing in enumerate(THINGS, start=3)
]
RECIPE = Recipe.load("know").replace(
    questions="rules and model", epochs=1, general=0.01, r=2, min_steps=1, batch_rows=4096
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "long-context"
    make_llama(max_position_embeddings=1024).save_pretrained(folder)
    make_tokenizer(QUICK_TEMPLATE).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    (tmp_path / "general.txt").write_text(GENERAL, encoding="utf-8")
    make_quick(monkeypatch, tmp_path / "general.txt")


@pytest.fixture
def make(model, tmp_path):
    def personalizer(**options):
        events = []
        made = Personalizer(
            model,
            **{"recipe": RECIPE, "device": "cpu", "store": tmp_path / "store", "on_event": events.append} | options,
        )
        made.events = events
        return made

    return personalizer


@pytest.fixture
def set_interview(monkeypatch):
    """A function that replaces what models answer in interviews, which random ones cannot."""
    return lambda about: monkeypatch.setattr(Interview, "about", about)


@pytest.fixture
def able(set_interview):
    """Lets every model write two questions about each document; the list of the documents it was asked about."""
    asked = []

    def about(_, documents):
        asked.extend(documents)
        questions = [
            Question((f"Colour of item {text[6:9]}?", "Its colour?", f"Item {text[6:9]}, colour?"), (), "the shed")
            for text in documents
        ]
        return [Interviewed((question, question), (), 3) for question in questions]

    set_interview(about)
    return asked


def notices(personalizer):
    return " ".join(event.message for event in personalizer.events if isinstance(event, Notice))


def num_questions(personalizer):
    return int(re.search(r"(\d+) questions were made", notices(personalizer))[1])


def test_the_models_questions_are_trained_on_and_asked_for_once(make, able):
    personalizer = make()
    personalizer.adapt(NOTES, activate_anyway=True)
    assert sorted(able) == sorted(NOTES)
    assert "The model wrote 30 questions about 10 documents; 20 are used" in notices(personalizer)
    rules = make(recipe=RECIPE.replace(questions="rules"))
    rules.adapt(NOTES, name="rules")
    assert num_questions(personalizer) == num_questions(rules) + 20
    again = make()
    again.adapt(NOTES, fresh=True)
    assert len(able) == len(NOTES)
    stages = {event.stage for event in again.events if isinstance(event, PreparationProgress)}
    assert "interviewing" in stages


def test_a_model_that_is_not_able_is_trained_on_the_rules_questions(make):
    personalizer = make()
    result = personalizer.adapt(NOTES)
    assert result.quiz.questions >= 6
    assert "0 are used" in notices(personalizer) and "not asked about more" in notices(personalizer)


def test_the_adapter_in_use_is_asked_nothing_and_stays(make, set_interview):
    personalizer = make()
    personalizer.adapt(NOTES, activate_anyway=True)
    states = []

    def about(_, documents):
        states.append([name for name, _ in personalizer.in_use.base.model.named_parameters() if "lora" in name])
        return [Interviewed((), (), 0) for _ in documents]

    set_interview(about)
    personalizer.adapt([*NOTES, NOTES[0].replace("boiler", "kayak")])
    assert states == [[]]
    assert personalizer.in_use.adaptation is not None


def test_forget_and_remove_delete_the_questions(make, able):
    personalizer = make()
    personalizer.adapt(NOTES, activate_anyway=True)
    folder = personalizer.store.questions_folder
    assert len(list(folder.iterdir())) == len(NOTES)
    assert folder.stat().st_mode & 0o077 == 0
    personalizer.forget("1", NOTES, activate_anyway=True)
    assert len(list(folder.iterdir())) == len(NOTES) - 1
    AdapterStore(personalizer.store.folder.parent).adapter("default").remove()
    assert not folder.exists()


def test_a_stop_while_the_model_writes_changes_nothing(make, monkeypatch):
    personalizer = make()
    personalizer.on_event = lambda event: (
        personalizer.stop() if isinstance(event, PreparationProgress) and event.stage == "interviewing" else None
    )
    with pytest.raises(Interrupted):
        personalizer.adapt(NOTES)
    assert personalizer.store.names() == []
    personalizer.on_event = lambda event: None
    assert personalizer.adapt(NOTES).quiz is not None


def test_a_training_that_does_not_fit_is_refused_before_the_model_is_loaded(make):
    personalizer = make(memory_budget="1MB")
    with pytest.raises(MachineError):
        personalizer.adapt(NOTES)
    assert not any(isinstance(event, ModelLoaded) for event in personalizer.events)


def test_a_model_with_damaged_weights_is_said(make, model):
    personalizer = make()
    personalizer.generate("The", max_new_tokens=1)
    with torch.no_grad():
        next(personalizer.in_use.base.model.parameters()).fill_(float("nan"))
    with pytest.raises(ModelError, match="its weights are damaged"):
        personalizer.adapt(NOTES)


@pytest.mark.parametrize("memory_budget", [None, "4GB"])
def test_notes_that_the_rules_cannot_read_are_asked_about_by_the_model(make, set_interview, memory_budget):
    def about(_, documents):
        asked = [
            Question(
                (f"Wo steht {text[4:9]}?", f"Wo ist {text[4:9]}?"), (f"Wo, {text[4:9]}?", f"{text[4:9]}, wo?"), "Hof"
            )
            for text in documents
        ]
        return [Interviewed((question, question), (), 2) for question in asked]

    set_interview(about)
    notes = [f"Das {thing} steht im Hof, und niemand weiß, wem es gehört und wer es holt." for thing in THINGS]
    personalizer = make(memory_budget=memory_budget)
    assert personalizer.adapt(notes).quiz.questions >= 6
    with pytest.raises(TextsError, match="Only 0 questions could be made"):
        make(recipe=RECIPE.replace(questions="rules"), memory_budget=memory_budget).adapt(notes, name="rules")
