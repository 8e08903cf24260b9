"""Notes that are learnt again, and forgotten."""

from dataclasses import asdict

import pytest
from know_notes import ANSWER, NOTES, WEIGHTS, notices, trained_examples

from sebp_edge.adapters.history import read_history
from sebp_edge.events import PreparationProgress
from sebp_edge.run.preparation import ASKED_TOGETHER
from sebp_edge.texts.examples import NO_DOCUMENT
from sebp_edge.texts.split_history import take_fingerprints

pytestmark = pytest.mark.slow


def test_unchanged_notes_are_not_learnt_again(make, learnt):
    personalizer = make(after=True)
    again = personalizer.adapt([*reversed(NOTES)])
    assert again.unchanged and (again.version, again.passed, again.documents) == (1, True, 12)
    assert all(isinstance(event, PreparationProgress) for event in personalizer.events)
    assert personalizer.store.adapter("default").versions() == [1]


@pytest.mark.parametrize(
    "texts",
    [[*NOTES, f"# The raft\n\nThe raft stands {ANSWER}."], [NOTES[0].replace("shed", "barn"), *NOTES[1:]]],
    ids=["new", "changed"],
)
def test_a_new_or_changed_note_makes_it_learn_all_again_and_say_why(make, runs, texts):
    personalizer = make(after=True)
    result = personalizer.adapt(texts)
    assert (result.learnt_on_from, result.version, result.compared_with, result.passed) == (None, 2, 1, True)
    assert f"All documents are learnt again, since version 1 {ASKED_TOGETHER}." in notices(personalizer)
    (training,) = runs
    assert {example.document for example in trained_examples(training)} - {NO_DOCUMENT} == set(range(len(texts)))
    assert personalizer.adapt(texts).unchanged


def test_forget_makes_bit_for_bit_what_fresh_makes_of_the_other_notes(make):
    forgetting, fresh = (make(store, after=True) for store in ("forgetting", "fresh"))
    salt = read_history(forgetting.store.adapter("default").open().path).salt
    receipt = forgetting.forget(f"{take_fingerprints({3: NOTES[3]}, salt)[3].key:016x}", NOTES)
    assert (receipt.versions_removed, receipt.replaced_by, receipt.active) == ((1,), 2, 2)
    assert forgetting.store.adapter("default").versions() == [2]
    without = [*NOTES[:3], *NOTES[4:]]
    expected = fresh.adapt(without, fresh=True)
    found = forgetting.store.adapter("default").open(2)
    assert (found.path / WEIGHTS).read_bytes() == (expected.adapter_path / WEIGHTS).read_bytes()
    # The one that is forgotten was active, but nothing is compared with it.
    assert found.record.quiz == asdict(expected.quiz) | {"right_active": None}
    assert found.record.documents == expected.documents == 11
    assert forgetting.adapt(without).unchanged
