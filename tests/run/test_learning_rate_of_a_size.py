"""Of a recipe's two learning rates, the model's size decides; its record has that one, and later trainings keep it."""

import pytest
from builders import make_sentences, write_notes
from paused_jobs import personalizer

from sebp_edge import AdapterStore, Recipe
from sebp_edge.errors import OptionError
from sebp_edge.events import LearningOn, StepDone
from sebp_edge.recipe import SMALL
from sebp_edge.research import learning_rates

pytestmark = pytest.mark.usefixtures("unassessed")
OF_SMALL, OF_LARGER = 2e-2, 1e-3
RECIPE = Recipe(
    name="r",
    description="",
    r=4,
    learning_rate=(OF_SMALL, OF_LARGER),
    epochs=2,
    batch_tokens=200,
    context_length=64,
)


def rates_in(made, phase):
    return [event.learning_rate for event in made.events if isinstance(event, StepDone) and event.phase == phase]


@pytest.mark.parametrize("parameters, rate", [(SMALL - 1, OF_SMALL), (SMALL, OF_LARGER), (8e9, OF_LARGER)])
def test_the_size_decides(parameters, rate):
    sized = RECIPE.for_size(parameters)
    assert (sized.peak_rate, sized.learning_rate) == (rate, rate)
    assert sized.for_size(1) == sized


def test_a_loop_without_a_model_is_told_that_there_are_two():
    with pytest.raises(OptionError, match=r"one for larger ones; take one by recipe\.for_size"):
        next(learning_rates(RECIPE, 10))


@pytest.mark.parametrize("budget", [None, "8GB"])
def test_the_record_and_all_trainings_have_the_rate_of_a_small_model(model, notes, tmp_path, budget):
    made = personalizer(model, AdapterStore(tmp_path / "store"), recipe=RECIPE, memory_budget=budget)
    result = made.adapt(notes[30], activate_anyway=True)
    assert result.record.recipe["learning_rate"] == OF_SMALL
    assert max(rates_in(made, "train")) == max(rates_in(made, "all documents")) == OF_SMALL


def test_a_version_learns_on_at_a_share_of_its_rate(model, notes, tmp_path):
    store = AdapterStore(tmp_path / "store")
    personalizer(model, store, recipe=RECIPE).adapt(notes[30], activate_anyway=True)
    more = write_notes(tmp_path / "more", make_sentences(40))
    made = personalizer(model, store, recipe=RECIPE)
    result = made.adapt(more, activate_anyway=True)
    assert any(isinstance(event, LearningOn) for event in made.events)
    assert max(rates_in(made, "train")) == pytest.approx(OF_SMALL * RECIPE.learning_on_share)
    assert result.record.recipe["learning_rate"] == OF_SMALL


def test_where_the_loss_falls_in_no_epoch_nothing_is_learnt_and_the_result_says_so(model, notes, tmp_path):
    made = personalizer(model, AdapterStore(tmp_path / "store"), recipe=RECIPE.replace(learning_rate=1.0))
    result = made.adapt(notes[13])
    assert result.verdict == "no gain" and not result.active
    assert result.explanation.startswith("The loss on validation documents fell in no epoch")
    assert not result.activation and list(result.next_steps) == ["All figures"]
    assert not rates_in(made, "all documents")
    assert result.general_loss_after == result.general_loss_before
