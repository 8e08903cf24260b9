"""A learning rate that is chosen by short trainings: the best of those tried, exactly as if it had been stated."""

import math
import random
import shutil

import pytest
from builders import make_sentences
from paused_jobs import RECIPE, at_step, bits, personalizer, resume, verdict, write
from quick import skip_assessment

from sebp_edge import AdapterStore, Recipe
from sebp_edge.errors import Paused, RecipeError
from sebp_edge.events import Evaluated, ExamplesEvaluated, LearningRateChosen, TrainingStarted
from sebp_edge.texts.examples import Outline
from sebp_edge.texts.schedule import Schedule
from sebp_edge.training.rates import MIN_STEPS, MOST, ORDER, SHARE, USUAL, RateSearch, trials

AUTO = RECIPE.replace(learning_rate="auto", batch_tokens=25, epochs=2)


def search(loss_of, loss_before=math.inf):
    found = RateSearch(documents=7, loss_before=loss_before)
    while (rate := found.next_rate) is not None:
        found = found.with_tried(loss_of(rate))
    return found


@pytest.mark.parametrize("best", ORDER)
def test_the_best_rate_is_found_wherever_it_is(best):
    steepness = random.uniform(0.1, 10)
    found = search(lambda rate: steepness * abs(math.log(rate / best)))
    assert found.learning_rate == best
    assert len({each.learning_rate for each in found.tried}) == len(found.tried) <= MOST


@pytest.mark.parametrize("highest", [1e-9, *sorted(ORDER)])
@pytest.mark.parametrize("infinite", [math.inf, math.nan])
def test_rates_that_diverge_are_not_chosen_if_another_one_is_left(highest, infinite):
    found = search(lambda rate: -rate if rate <= highest else infinite)
    assert found.learning_rate == (min(ORDER) if highest < min(ORDER) else highest)
    assert all((each.loss is None) == (each.learning_rate > highest) for each in found.tried)


def test_the_summary_says_what_was_found():
    assert search(lambda rate: rate).summary == (
        "The learning rate is 0.0001, the best of 3 tried on 7 validation documents."
    )
    assert search(lambda rate: 3 + rate, loss_before=3.0).summary == (
        "The loss on 7 validation documents did not fall at any of the 3 learning rates tried; 0.0001 raised it least."
    )
    assert RateSearch().summary == (
        "The learning rate is 0.0005, the usual one: there are too few documents to try others."
    )


def schedules(num_documents, tokens, *, folds=1):
    """Schedules of a training and one on all documents, of equal documents with a batch each."""
    outlines = [Outline(each, each, tokens, tokens, tokens - 1) for each in range(num_documents)]
    batches = [[[outline] for outline in outlines] for _ in range(4)]
    return [
        *(Schedule(batches, outlines[:3], outlines[:2]) for _ in range(folds)),
        Schedule(batches, trains_on_all=True),
    ]


def test_tries_stay_within_their_share_of_the_tokens():
    number, tokens = random.randint(20, 400), random.randint(3, 300)
    trainings = schedules(number, tokens)
    tried = trials(trainings, AUTO)
    assert len(tried) == MOST
    share = sum(each.num_tokens for each in tried) / sum(each.num_tokens for each in trainings)
    assert SHARE - MOST * tokens / sum(each.num_tokens for each in trainings) < share <= SHARE
    assert tried[0].num_documents[0] == min(tried[0].num_batches, number)


def test_nothing_is_tried_with_a_stated_rate_nor_with_folds_nor_with_few_documents():
    assert trials(schedules(60, 30), RECIPE) == []
    assert trials(schedules(60, 30, folds=3), AUTO) == []
    fewest = next(number for number in range(1, 100) if trials(schedules(number, 30), AUTO))
    assert trials(schedules(fewest, 30), AUTO)[0].num_batches == MIN_STEPS


@pytest.mark.parametrize("changes", [{"method": "full"}, {"questions": "practice"}])
def test_only_an_adapter_to_texts_has_its_rate_chosen(changes):
    with pytest.raises(RecipeError, match=r"learning_rate 'auto' needs .*; give a number\."):
        Recipe(name="mine", description="", learning_rate="auto", **changes)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write(tmp_path_factory.mktemp("texts") / "notes", make_sentences(40)[:30])


@pytest.fixture(scope="module")
def whole(model, texts, tmp_path_factory):
    """An adaptation that has its rate chosen and is not interrupted: its result, its store and its events."""
    with pytest.MonkeyPatch.context() as patch:
        skip_assessment(patch)
        made = personalizer(model, AdapterStore(tmp_path_factory.mktemp("whole") / "store"), recipe=AUTO)
        return made.adapt(texts, activate_anyway=True), made.store, made.events


def tried(events):
    return [event.phase for event in events if isinstance(event, TrainingStarted) and "rate" in event.phase]


@pytest.mark.slow
def test_the_adapter_is_as_if_the_chosen_rate_had_been_stated(model, texts, whole, tmp_path):
    result, store, _ = whole
    rates = result.rates
    assert rates.learning_rate == min(rates.tried, key=lambda each: each.loss).learning_rate
    assert result.saved.record.recipe["learning_rate"] == rates.learning_rate
    stated = personalizer(
        model, AdapterStore(tmp_path / "store"), recipe=AUTO.replace(learning_rate=rates.learning_rate)
    )
    expected = stated.adapt(texts, activate_anyway=True)
    assert (expected.rates, tried(stated.events)) == (None, [])
    assert (bits(store), verdict(result)) == (bits(stated.store), verdict(expected))


@pytest.mark.slow
def test_the_result_the_page_and_an_event_say_what_was_tried(whole):
    result, store, events = whole
    rates, (event,) = result.rates, [each for each in events if isinstance(each, LearningRateChosen)]
    assert tried(events) == [f"learning rate {each.learning_rate:g}" for each in rates.tried]
    assert rates.documents == event.documents == 4
    assert rates.summary == event.summary
    assert rates.summary in result.summary
    assert rates.summary in store.adapter("default").report().to_html()
    assert result.to_dict()["rates"]["tried"][0] == {"learning_rate": USUAL, "loss": rates.tried[0].loss}
    # No event of a try is about test documents.
    chosen = events.index(event)
    assert {each.split for each in events[:chosen] if isinstance(each, Evaluated)} == {"validation"}


@pytest.mark.slow
@pytest.mark.usefixtures("unassessed")
@pytest.mark.parametrize(
    "at",
    [
        lambda event, _: isinstance(event, ExamplesEvaluated),
        at_step("learning rate 0.0002", 2),
        lambda event, _: isinstance(event, LearningRateChosen),
    ],
    ids=["before", "second try", "chosen"],
)
def test_a_search_that_is_paused_ends_as_one_that_was_not(model, texts, whole, tmp_path, at):
    expected, whole_store, whole_events = whole
    store = AdapterStore(tmp_path / "store")
    paused = personalizer(model, store, at, recipe=AUTO)
    with pytest.raises(Paused):
        paused.adapt(texts, activate_anyway=True)
    resumed, result = resume(store)
    assert (bits(store), verdict(result)) == (bits(whole_store), verdict(expected))
    assert result.rates == expected.rates
    # The try that was interrupted begins again, and none that was done.
    done = tried(paused.events)
    if not any(isinstance(event, LearningRateChosen) for event in paused.events):
        done = done[:-1]
    assert done + tried(resumed.events) == tried(whole_events)


@pytest.mark.slow
@pytest.mark.usefixtures("unassessed")
def test_a_later_version_keeps_the_rate_and_forgetting_does_too(model, texts, whole, tmp_path):
    first, store, _ = whole
    store = AdapterStore(shutil.copytree(store.folder.parent, tmp_path / "store"))
    made = personalizer(model, store, recipe=AUTO)
    more = [*texts.iterdir(), *write(tmp_path / "more", make_sentences(44)[40:]).iterdir()]
    result = made.adapt(more, activate_anyway=True)
    assert result.learnt_on_from == 1
    assert made.adapt(more).unchanged
    receipt = made.forget(str(texts / "note-03.md"), more, activate_anyway=True)
    assert made.verify_forgotten(texts=more).verified
    assert tried(made.events) == []
    record = store.adapter("default").open(receipt.replaced_by).record
    assert result.saved.record.recipe["learning_rate"] == record.recipe["learning_rate"] == first.rates.learning_rate


@pytest.mark.slow
@pytest.mark.usefixtures("unassessed")
def test_few_documents_have_the_usual_rate_and_say_so(model, tmp_path):
    made = personalizer(model, AdapterStore(tmp_path / "store"), recipe=AUTO.replace(epochs=1))
    result = made.adapt(write(tmp_path / "notes", make_sentences(13)))
    assert (result.rates, tried(made.events)) == (RateSearch(), [])
    assert result.saved.record.recipe["learning_rate"] == USUAL


def test_a_plan_says_what_the_search_costs(model, texts, tmp_path):
    plans = [
        personalizer(model, AdapterStore(tmp_path / "store"), recipe=each).plan(texts)
        for each in (AUTO, AUTO.replace(learning_rate=USUAL))
    ]
    auto, stated = (plan.to_dict() for plan in plans)
    assert (stated["trials"], stated["trials_share"]) == (0, 0)
    assert auto["trials"] == MOST
    assert 0 < auto["trials_share"] <= SHARE
    assert stated["seconds"] < auto["seconds"]
    # The rest of the process grows meanwhile.
    assert auto["footprint"]["activations"] == stated["footprint"]["activations"]
