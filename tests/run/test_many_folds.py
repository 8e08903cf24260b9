"""From 20 documents on, six folds are judged if there is time, through later versions, stops and earlier stores."""

from dataclasses import replace

import pytest
from builders import dataset_of, make_examples
from learnt import NOTES, RECIPE, of_kind, roles
from paused_jobs import adapt, at_step, bits, verdict

from sebp_edge import AdapterStore
from sebp_edge.engine.memory.seconds import OVERHEAD_CPU
from sebp_edge.engine.sparse.rows.schedule import make_schedules
from sebp_edge.events import MemoryPlanned, TrainingStarted
from sebp_edge.lessons.splits import draw_splits
from sebp_edge.run.work_ahead import MOST_SECONDS_IN_FOLDS, RATE_FOR_FOLDS, most_tokens_in_folds

pytestmark = [pytest.mark.usefixtures("unassessed", "folds")]
PHASES = [*(f"fold {number}" for number in range(1, 7)), "all documents"]


@pytest.fixture
def folds(monkeypatch):
    """A function that sets up to how many documents are split into folds; they are up to 100."""

    def up_to(number):
        monkeypatch.setattr("sebp_edge.run.preparation.MOST_IN_FOLDS", number)

    up_to(100)
    return up_to


def phases(made):
    return [event.phase for event in of_kind(made, TrainingStarted)]


@pytest.mark.slow
def test_each_document_is_tested_once_and_later_versions_learn_on_in_the_same_folds(make_quick):
    first = make_quick(memory_budget="8GB")
    result = first.adapt(NOTES[:24], activate_anyway=True)
    assert phases(first) == PHASES
    (planned,) = of_kind(first, MemoryPlanned)
    assert "judged in 6 folds" in planned.description
    assert sorted(roles(first.store)) == sorted(4 * PHASES[:6])
    assert f"On {len(NOTES[:24])} documents that it was not trained on" in result.explanation
    saved = first.store.adapter("default").open()
    assert len(saved.judged_states()) == 6 and saved.record.trained_on_all
    later = make_quick()
    grown = later.adapt(NOTES[:27], activate_anyway=True)
    assert (grown.learnt_on_from, grown.new) == (1, 3)
    assert phases(later) == PHASES
    assert roles(later.store, 2)[:24] == roles(later.store, 1)
    assert grown.gain_over_active is not None


@pytest.mark.slow
def test_paused_in_a_later_fold_it_goes_on_bit_for_bit(model, tmp_path):
    found = []
    for number, at in enumerate([None, at_step("fold 5", 2)]):
        store = AdapterStore(tmp_path / f"store-{number}")
        result = adapt(model, store, NOTES[:20], at)
        found.append((bits(store), verdict(result), result.curves))
    assert found[0] == found[1]
    assert len(found[0][0]) == 7


@pytest.mark.slow
def test_a_version_that_was_judged_in_a_split_is_learnt_on_from_in_it(make_quick, folds):
    folds(0)
    make_quick().adapt(NOTES[:24], activate_anyway=True)
    folds(100)
    later = make_quick()
    assert later.inspect(NOTES[:27]).split[0].name == "train"
    assert later.adapt(NOTES[:27], activate_anyway=True).learnt_on_from == 1
    assert phases(later)[0] == "train"
    # Afresh, the two are compared on what neither was trained on: the split's test documents.
    afresh = make_quick()
    result = afresh.adapt(NOTES[:27], fresh=True, activate_anyway=True)
    assert phases(afresh) == PHASES
    assert result.compared_with == 2 and result.verdict != "not comparable"


@pytest.mark.slow
def test_a_version_in_folds_is_compared_with_one_in_a_split(make_quick, folds):
    make_quick().adapt(NOTES[:24], activate_anyway=True)
    folds(0)
    later = make_quick()
    assert "was trained on documents that are needed for tests now" in later.inspect(NOTES[:27]).beginning
    result = later.adapt(NOTES[:27], activate_anyway=True)
    assert phases(later)[0] == "train"
    assert result.learnt_on_from is None and result.compared_with == 1 and result.verdict != "not comparable"


@pytest.mark.slow
@pytest.mark.parametrize("most", [0, 100])
def test_a_version_without_a_document_has_the_splits_of_the_one_before(make_quick, folds, most):
    folds(most)
    made = make_quick()
    made.adapt(NOTES[:24], activate_anyway=True)
    before = roles(made.store)
    folds(100)
    made.forget(["5"], NOTES[:24], activate_anyway=True)
    assert roles(made.store, 2) == [*before[:4], *before[5:]]


def test_on_a_cpu_there_is_one_split_if_folds_would_take_long(make_quick, monkeypatch):
    made = make_quick()
    assert [part.name for part in made.inspect(NOTES[:24]).split] == PHASES[:6]
    monkeypatch.setattr("sebp_edge.run.work_ahead.MOST_SECONDS_IN_FOLDS", 1e-6)
    assert [part.name for part in made.inspect(NOTES[:24]).split] == ["train", "validation", "test"]
    assert "judged in 6 folds" in made.plan(NOTES[:24], gpu="24GB").chosen.description
    made.adapt(NOTES[:24], activate_anyway=True)
    assert phases(made)[0] == "train"


@pytest.mark.parametrize("epochs", [1, 4])
@pytest.mark.parametrize("rates", [1e-3, (1e-3, 2e-3)])
def test_the_time_of_folds_is_that_of_their_schedules_and_no_limit_on_a_gpu(epochs, rates):
    recipe = RECIPE.replace(epochs=epochs, learning_rate=rates)
    dataset = dataset_of(make_examples(36 * [50]))
    schedules = make_schedules(
        replace(dataset, draw=draw_splits(dataset.draw.fingerprints, 0, most_in_folds=100)), recipe, seed=0
    )
    assert len(schedules) == 7
    passes = sum(2 * each.num_tokens + each.num_evaluated[1] for each in schedules)
    tokens = most_tokens_in_folds(recipe, 10**8, on_gpu=False)
    operations = tokens * passes / dataset.num_tokens * 2 * 10**8
    assert OVERHEAD_CPU * operations / RATE_FOR_FOLDS == pytest.approx(MOST_SECONDS_IN_FOLDS)
    assert most_tokens_in_folds(recipe, 10**12, on_gpu=True) == float("inf")


def test_all_weights_are_judged_in_one_split(make_quick):
    made = make_quick(recipe=make_quick().recipe.replace(method="full"))
    assert [part.name for part in made.inspect(NOTES[:24]).split] == ["train", "validation", "test"]
