"""An adaptation tries its recipe's learning rates; its record has the chosen one, and later trainings keep it."""

import pytest
from builders import make_sentences
from paused_jobs import at_step, bits, personalizer, resume, write

from sebp_edge import AdapterStore, Recipe
from sebp_edge.errors import Paused
from sebp_edge.events import Evaluated, LearningOn, StepDone

pytestmark = pytest.mark.usefixtures("unassessed")
LOW, HIGH = 1e-3, 2e-2
RECIPE = Recipe(name="r", description="", r=4, learning_rate=(LOW, HIGH), epochs=2, batch_tokens=200, context_length=64)


def rates_in(made, phase):
    return [event.learning_rate for event in made.events if isinstance(event, StepDone) and event.phase == phase]


@pytest.mark.slow
@pytest.mark.parametrize("rates", [(LOW, HIGH), (HIGH, 100 * HIGH)], ids=["last is best", "first is best"])
@pytest.mark.parametrize("pause", ["within the first", "after the first", "within the second", "after the second"])
def test_a_training_paused_in_its_trials_goes_on_bit_for_bit(model, notes, tmp_path, rates, pause):
    recipe, found, step = RECIPE.replace(learning_rate=rates), [], None
    for number in range(2):
        store = AdapterStore(tmp_path / f"store-{number}")
        made = personalizer(model, store, step and at_step("train", step), recipe=recipe)
        if step is None:
            result = made.adapt(notes[30], activate_anyway=True)
            epoch = sum(event.epoch == 1 for event in made.events if isinstance(event, StepDone)) // 4
            steps = {"within the first": 1, "after the first": epoch, "within the second": epoch + 1}
            step = steps.get(pause, 2 * epoch)
        else:
            with pytest.raises(Paused):
                made.adapt(notes[30], activate_anyway=True)
            _, result = resume(store)
        found.append((bits(store), result.heldout_loss_after, result.curves))
    assert found[0] == found[1]


def test_the_record_and_the_training_on_all_documents_have_the_chosen_rate(model, notes, tmp_path):
    store = AdapterStore(tmp_path / "store")
    made = personalizer(model, store, recipe=RECIPE)
    result = made.adapt(notes[30], activate_anyway=True)
    assert result.record.recipe["learning_rate"] == HIGH
    assert max(rates_in(made, "all documents")) == HIGH
    tried = [event.learning_rate for event in made.events if isinstance(event, Evaluated) and event.learning_rate]
    assert tried == [LOW, HIGH]


def test_a_version_learns_on_at_a_share_of_the_rate_that_was_chosen(model, notes, tmp_path):
    store = AdapterStore(tmp_path / "store")
    recipe = RECIPE.replace(learning_rate=(LOW, HIGH))
    personalizer(model, store, recipe=recipe).adapt(notes[30], activate_anyway=True)
    more = write(tmp_path / "more", make_sentences(40))
    made = personalizer(model, store, recipe=recipe)
    result = made.adapt(more, activate_anyway=True)
    assert any(isinstance(event, LearningOn) for event in made.events)
    assert max(rates_in(made, "train")) == pytest.approx(HIGH * recipe.learning_on_share)
    assert result.record.recipe["learning_rate"] == HIGH


@pytest.mark.slow
def test_each_fold_chooses_without_its_test_documents_and_the_last_training_has_the_median(model, notes, tmp_path):
    made = personalizer(model, AdapterStore(tmp_path / "store"), recipe=RECIPE)
    result = made.adapt(notes[13], activate_anyway=True)
    tried = [(event.phase, event.learning_rate) for event in made.events if isinstance(event, Evaluated)]
    folds = sorted({phase for phase, _ in tried if phase.startswith("fold")})
    assert [(phase, rate) for phase, rate in tried if rate] == [(fold, rate) for fold in folds for rate in (LOW, HIGH)]
    assert max(rates_in(made, "all documents")) == result.record.recipe["learning_rate"] == HIGH


@pytest.mark.slow
def test_a_training_of_all_weights_tries_no_rate(model, notes, tmp_path):
    made = personalizer(model, AdapterStore(tmp_path / "store"), recipe=RECIPE.replace(method="full"))
    result = made.adapt(notes[30], activate_anyway=True)
    assert not any(event.learning_rate for event in made.events if isinstance(event, Evaluated))
    assert max(rates_in(made, "train")) == result.record.recipe["learning_rate"] == LOW


def test_where_the_loss_falls_at_no_rate_nothing_is_learnt_and_the_result_says_so(model, notes, tmp_path):
    store = AdapterStore(tmp_path / "store")
    made = personalizer(model, store, recipe=RECIPE.replace(learning_rate=(1.0, 2.0)))
    result = made.adapt(notes[13])
    assert result.verdict == "no gain" and not result.active
    assert result.explanation.startswith("The loss on validation documents fell at no learning rate")
    assert not rates_in(made, "all documents")
    assert result.general_loss_after == result.general_loss_before
