"""Without a recipe, chats are learnt with "chat", other texts with "notes" or "tiny"; a version keeps its recipe."""

import json

import pytest
from builders import make_sentences
from command import run
from failing_memory import RECIPE

from sebp_edge import Personalizer, Recipe
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.errors import OptionError
from sebp_edge.events import Notice
from sebp_edge.reading.readers import read_texts
from sebp_edge.run.fitting_recipe import choose_recipe

QUICK = {"r": 4, "learning_rate": 2e-2, "epochs": 1, "batch_tokens": 200, "context_length": 256}


def conversations(number: int) -> list[dict]:
    """Records of one question and one answer each."""
    texts = iter(make_sentences(2 * number, words=60))
    roles = ("user", "assistant")
    return [{"messages": [{"role": role, "content": next(texts)} for role in roles]} for _ in range(number)]


def chosen(texts, asked=None, adapter=None, model="smollm2-135m") -> str:
    return choose_recipe(Recipe.load(asked), read_texts(texts), resolve(model), adapter).name


@pytest.mark.parametrize(("chats", "notes", "name"), [(3, 0, "chat"), (3, 2, "chat"), (2, 2, "notes"), (0, 3, "notes")])
def test_most_of_the_texts_decide(chats, notes, name):
    texts = [*conversations(chats), *make_sentences(notes, words=9)]
    assert chosen(texts) == name
    assert chosen(texts, "long") == "long"


def test_the_bundled_model_has_a_recipe_of_its_own_for_notes_only():
    assert chosen(make_sentences(2, words=9), model="tiny") == "tiny"
    assert chosen(make_sentences(2, words=9), "notes", model="tiny") == "notes"
    assert chosen(conversations(2), model="tiny") == "chat"


def test_the_bundled_models_own_recipe_is_said_to_fit_its_notes_and_needs_no_notice():
    events = []
    found = Personalizer("tiny", device="cpu", on_event=events.append).inspect(make_sentences(6, words=40))
    assert (found.recipe, found.fitting_recipe) == ("tiny", "tiny")
    assert not [event for event in events if isinstance(event, Notice)]


def test_changes_apply_to_the_recipe_that_is_chosen():
    changed = Recipe.load(None).replace(epochs=4, context_length=None)
    assert changed.or_bundled("chat") == Recipe.load("chat").replace(epochs=4)
    assert changed.replace(epochs=5).or_bundled("notes") == Recipe.load("notes").replace(epochs=5)
    with pytest.raises(OptionError, match="epochs must be a whole number above 0"):
        changed.replace(epochs=0)


@pytest.mark.slow
@pytest.mark.usefixtures("unassessed")
def test_a_version_keeps_its_recipe_unless_another_is_named_or_it_starts_over(make, tmp_path):
    notes, events = make_sentences(2, words=200), []  # too few to be judged
    store = make().store
    make(recipe=Recipe.load("long").replace(**QUICK)).adapt(notes, activate_anyway=True)
    quick = Recipe.load(None).replace(**QUICK)
    more = [*notes, *conversations(3)]
    personalizer = make(recipe=quick, on_event=events.append)
    assert personalizer.inspect(more).recipe == "long"
    assert [event.message for event in events if isinstance(event, Notice)] == [
        "The recipe is 'long'; --recipe NAME (recipe=) chooses another."
    ]
    result = personalizer.adapt(more, activate_anyway=True)
    assert (result.recipe, result.to_dict()["recipe"]) == ("long", "long")
    assert make(recipe=quick).adapt(more, fresh=True, activate_anyway=True).recipe == "chat"
    assert make(recipe=quick).adapt(more, out=tmp_path / "out").recipe == "chat"
    assert chosen(more, adapter=store.adapter("default")) == "chat"
    for other in (RECIPE, Recipe.load("full").replace(epochs=1)):  # not bundled, and none that can be learnt on from
        make(recipe=other).adapt(notes, fresh=True, activate_anyway=True)
        assert chosen(more, adapter=store.adapter("default")) == "chat"


@pytest.mark.slow
def test_plan_inspect_and_adapt_agree(model_folder, tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text("\n".join(map(json.dumps, conversations(5))))
    options = ["--model", model_folder, "--device", "cpu", "--json", "--context", "256"]
    planned, inspected, adapted = (
        [json.loads(line) for line in run(command, path, *options).stdout.splitlines()]
        for command in ("plan", "inspect", "adapt")
    )
    notice = "The recipe is 'chat'; --recipe NAME (recipe=) chooses another."
    assert planned[-1]["recipe"] == inspected[-1]["recipe"] == adapted[-1]["recipe"] == "chat"
    assert notice in [line.get("message") for line in inspected]
    said = [line.get("message") for line in adapted]
    assert said.count(notice) == 1
    assert said.index(notice) < [line["event"] for line in adapted].index("training_started")
    assert "fits these texts better" not in inspected[-1]["summary"]
    assert "recipe chat: LoRA" in " ".join(run("plan", path, "--device", "cpu", "--model", model_folder).stdout.split())


def test_a_plan_of_notes_says_their_recipe(model_folder):
    plan = Personalizer(model_folder, device="cpu").plan(make_sentences(30, words=20))
    assert plan.chosen.recipe == Recipe.load("notes").with_defaults().for_size(1)
