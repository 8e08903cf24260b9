"""A learning rate that is chosen by short trainings: the best of those tried, exactly as if it had been stated."""

import math
import random

import pytest
from builders import make_sentences
from paused_jobs import RECIPE, at_step, bits, personalizer, resume, verdict, write

from sebp_edge import AdapterStore, Recipe
from sebp_edge.errors import Paused, RecipeError
from sebp_edge.events import LearningRateChosen, StepDone, TrainingStarted
from sebp_edge.texts.examples import Outline
from sebp_edge.texts.schedule import Schedule
from sebp_edge.training.rates import MIN_STEPS, MOST, ORDER, SHARE, USUAL, RateSearch, trials

AUTO = RECIPE.replace(learning_rate="auto", batch_tokens=40, epochs=4)


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
    with pytest.raises(RecipeError, match=r"learning_rate 'auto' needs .*; give a number."):
        Recipe(name="mine", description="", learning_rate="auto", **changes)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write(tmp_path_factory.mktemp("texts") / "notes", make_sentences(40)[:30])


def tried(events):
    return [event.phase for event in events if isinstance(event, TrainingStarted) and "rate" in event.phase]


@pytest.mark.slow
@pytest.mark.usefixtures("unassessed")
def test_the_adapter_is_as_if_the_chosen_rate_had_been_stated(model, texts, tmp_path):
    made = personalizer(model, AdapterStore(tmp_path / "auto"), recipe=AUTO)
    result = made.adapt(texts, activate_anyway=True)
    rates, (event,) = result.rates, [each for each in made.events if isinstance(each, LearningRateChosen)]
    assert 3 <= len(rates.tried) <= MOST
    assert rates.learning_rate == min(rates.tried, key=lambda each: each.loss).learning_rate
    assert rates.documents == 4
    assert rates.summary in result.summary and rates.summary == event.summary
    assert rates.summary in made.report("default").to_html()
    steps = [each for each in made.events if isinstance(each, StepDone)]
    cost = sum(1 for each in steps if "rate" in each.phase) / sum(each.phase == "train" for each in steps)
    assert 0 < cost < 1
    assert result.saved.record.recipe["learning_rate"] == rates.learning_rate
    stated = AUTO.replace(learning_rate=rates.learning_rate)
    other = personalizer(model, AdapterStore(tmp_path / "stated"), recipe=stated)
    expected = other.adapt(texts, activate_anyway=True)
    assert expected.rates is None
    assert tried(other.events) == []
    assert (bits(made.store), verdict(result)) == (bits(other.store), verdict(expected))


@pytest.mark.slow
@pytest.mark.usefixtures("unassessed")
@pytest.mark.parametrize(
    "at",
    [
        at_step("learning rate 0.0005", 1),
        at_step("learning rate 0.0002", 2),
        lambda event, _: isinstance(event, LearningRateChosen),
        at_step("train", 3),
    ],
    ids=["first try", "second try", "chosen", "training"],
)
def test_a_search_that_is_paused_goes_on_and_ends_as_one_that_was_not(model, texts, tmp_path, at):
    whole = personalizer(model, AdapterStore(tmp_path / "whole"), recipe=AUTO)
    expected = whole.adapt(texts, activate_anyway=True)
    store = AdapterStore(tmp_path / "store")
    paused = personalizer(model, store, at, recipe=AUTO)
    with pytest.raises(Paused):
        paused.adapt(texts, activate_anyway=True)
    resumed, result = resume(store)
    assert (bits(store), verdict(result)) == (bits(whole.store), verdict(expected))
    assert result.rates == expected.rates
    first, then, all_of_them = tried(paused.events), tried(resumed.events), tried(whole.events)
    is_over = any(isinstance(event, LearningRateChosen) for event in paused.events)
    assert first + then == all_of_them or (not is_over and first[:-1] + then == all_of_them)


@pytest.mark.slow
@pytest.mark.usefixtures("unassessed")
def test_a_later_version_keeps_the_rate_and_forgetting_does_too(model, texts, tmp_path):
    made = personalizer(model, AdapterStore(tmp_path / "store"), recipe=AUTO)
    rate = made.adapt(texts, activate_anyway=True).rates.learning_rate
    made.events.clear()
    more = [*texts.iterdir(), *write(tmp_path / "more", make_sentences(44)[40:]).iterdir()]
    result = made.adapt(more, activate_anyway=True)
    assert result.learnt_on_from == 1
    assert made.adapt(more).unchanged
    receipt = made.forget("note-03.md", activate_anyway=True)
    assert made.verify_forgotten().matches
    assert tried(made.events) == []
    record = made.store.adapter("default").open(receipt.replaced_by).record
    assert result.saved.record.recipe["learning_rate"] == record.recipe["learning_rate"] == rate


@pytest.mark.slow
@pytest.mark.usefixtures("unassessed")
def test_few_documents_have_the_usual_rate_and_say_so(model, tmp_path):
    made = personalizer(model, AdapterStore(tmp_path / "store"), recipe=AUTO)
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
    assert stated["seconds"] < auto["seconds"] < 1.3 * stated["seconds"]
    assert auto["peak"] == stated["peak"]
