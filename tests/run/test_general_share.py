"""General text and the base model's own replies, which a training on texts may have a share of."""

import shutil

import pytest
from builders import make_tokenizer
from learnt import NEW, NOTES, OLD, RECIPE
from paused_jobs import RECIPE as IN_STEPS
from paused_jobs import THIRD_STEP, adapt, bits
from reader_notes import watch_runs

from sebp_edge import AdapterStore
from sebp_edge.ask.general_texts import CHAT_TOKENS
from sebp_edge.run import encoding, preparation
from sebp_edge.run.job import DECODING
from sebp_edge.run.work_ahead import REPLIES, Pace, phases_ahead
from sebp_edge.values.example import NO_DOCUMENT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unassessed")]

SHARE = 0.15


@pytest.fixture
def runs(monkeypatch):
    return watch_runs(monkeypatch)


@pytest.fixture
def asked(monkeypatch):
    """The questions that the base model was asked, a list each time."""
    found, reply_to = [], encoding.reply_to

    def replying(base, max_new_tokens, check, questions):
        found.append(questions)
        return reply_to(base, max_new_tokens, check, questions)

    monkeypatch.setattr(encoding, "reply_to", replying)
    return found


def tokens_of(epoch):
    """The tokens of an epoch's own examples, and of its general ones."""
    examples = [example for step in epoch for example in step.examples]
    general = [example for example in examples if example.document == NO_DOCUMENT]
    total = sum(example.num_tokens for example in examples)
    return total - sum(example.num_tokens for example in general), sum(example.num_tokens for example in general)


def assert_capped(run):
    for schedule in run.task.schedules:
        for epoch in schedule.epochs:
            own, general = tokens_of(epoch)
            assert 0 < general <= 2 * SHARE * own


def test_the_cap_holds_for_22_short_notes_and_few_questions_are_asked(make_quick, runs, asked):
    make_quick(recipe=RECIPE.replace(general=SHARE)).adapt(NOTES[:22])
    (run,), (questions,) = runs, asked
    assert_capped(run)
    assert 0 < len(questions) <= SHARE * run.task.dataset.num_tokens / CHAT_TOKENS
    general = run.task.dataset.general
    assert all(example.teacher is not None for example in general)
    assert {bool(example.num_tokens_before_loss) for example in general} == {False, True}  # texts and replies


def test_what_learns_on_keeps_the_share_of_what_it_trains_on(make_quick, runs, asked):
    made = make_quick(after=OLD, recipe=RECIPE.replace(general=SHARE))
    result = made.adapt([*OLD, *NEW], activate_anyway=True)
    assert result.learnt_on_from == 1
    assert_capped(runs[-1])
    made.adapt([*OLD, *NEW, f"{NEW[0]} {OLD[0]}"], activate_anyway=True)
    assert len(asked[1]) < len(asked[0])  # of one new note


def test_it_resumes_bit_for_bit_with_the_same_replies(model, notes, tmp_path, asked):
    recipe, found = IN_STEPS.replace(general=SHARE), []
    for name, at in (("whole", None), ("paused", THIRD_STEP)):
        store = AdapterStore(tmp_path / name)
        adapt(model, store, notes[30], at, recipe=recipe)
        found.append(bits(store))
    assert len(asked) == 3 and asked[0] == asked[1] == asked[2] != []
    assert found[0] == found[1]


def test_without_a_share_nothing_is_asked_or_added(make_quick, runs, asked):
    make_quick().adapt(NOTES[:22])
    assert asked == [] and runs[0].task.dataset.general == []
    for schedule in runs[0].task.schedules:
        assert all(tokens_of(epoch)[1] == 0 for epoch in schedule.epochs)


def test_a_model_whose_template_refuses_questions_is_asked_none(model, make_quick, runs, asked, tmp_path):
    folder = shutil.copytree(model, tmp_path / "refuses")
    make_tokenizer("{{ raise_exception('no') }}").save_pretrained(folder)
    make_quick(model=folder, recipe=RECIPE.replace(general=SHARE)).adapt(NOTES[:22])
    assert asked == [[]]
    assert not any(example.num_tokens_before_loss for example in runs[0].task.dataset.general)
    assert_capped(runs[0])


def test_the_plan_counts_replies_at_their_longest(make_quick, monkeypatch):
    """Before the model is loaded, and so before it has replied."""
    recipe, seen = RECIPE.replace(general=SHARE, context_length=128), []
    monkeypatch.setattr(preparation, "with_all_phases", lambda plan, *of, **_: seen.append(of) or plan)
    make_quick(recipe=recipe, memory_budget="8GB").plan(NOTES[:22])
    ((dataset, schedules),) = seen
    replies = [example.num_loss_tokens for example in dataset.general if example.num_tokens_before_loss]
    assert replies and min(replies) >= CHAT_TOKENS
    assert all(tokens_of(epoch)[1] > 0 for schedule in schedules for epoch in schedule.epochs)
    phases = {phase.name: phase for phase in phases_ahead(dataset, schedules, recipe, Pace(1.0), num_earlier=0)}
    assert phases[REPLIES].seconds[DECODING] > CHAT_TOKENS
