"""Plans and inspections count what the recipe `know` would ask."""

import re
from dataclasses import asdict

import pytest
from know_notes import GERMAN, NO_EFFECT, NOTES, OTHER, RECIPE, WITHOUT_FACTS, notices, trained_examples

from sebp_edge import Recipe
from sebp_edge.run.preparation import ASKED_TOGETHER


@pytest.mark.slow
def test_the_plan_counts_the_examples_of_questions(make, runs):
    personalizer = make(memory_budget="30GB")
    notes = make(recipe=Recipe(**asdict(RECIPE) | {"questions": None, "sparsity": None}), memory_budget="30GB")
    plan, of_notes = personalizer.plan(NOTES).chosen, notes.plan(NOTES).chosen
    assert plan.seconds > 2 * of_notes.seconds
    result = personalizer.adapt(NOTES)
    assert result.passed and result.predicted_peak_bytes is not None
    (training,) = runs
    assert sum(len(example.input_ids) for example in trained_examples(training)) > 3 * training.task.dataset.num_tokens


@pytest.mark.slow
def test_an_inspection_says_what_would_be_asked(make, runs):
    personalizer = make(after=True, recipe=NO_EFFECT)
    texts = [*NOTES, *OTHER, *WITHOUT_FACTS]
    found = personalizer.inspect(texts)
    assert re.fullmatch(r"\d+ questions .* in \d+ examples\. About 2 of the documents none .*", found.asked)
    assert found.plan is not None and found.refusal == ""
    assert found.beginning == f"All documents are learnt again, since version 1 {ASKED_TOGETHER}."
    assert found.expectations[0].startswith(
        "It will answer some questions about these notes rightly, and others wrongly,"
    )
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
