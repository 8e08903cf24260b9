"""Texts of which none is new: nothing is trained, and what a version was trained with is said."""

import dataclasses
import json
import subprocess
import sys

import pytest
from learnt import NEW, OLD, RECIPE, of_kind

from sebp_edge.events import JobProgress, JobStarted, NameInUse, PreparationProgress

pytestmark = pytest.mark.usefixtures("unassessed")


@pytest.mark.slow
def test_nothing_is_trained_or_saved_if_nothing_is_new(make_quick):
    personalizer = make_quick(after=OLD)
    path = personalizer.store.adapter("default").open(1).path
    again = personalizer.adapt([*reversed(OLD)])
    assert again.unchanged
    assert (again.version, again.adapter_path, again.active, again.passed) == (1, path, True, True)
    assert (again.documents, again.gone) == (30, 0)
    assert again.to_dict()["event"] == "result" and json.dumps(again.to_dict())
    assert personalizer.store.adapter("default").versions() == [1]
    assert all(isinstance(event, JobStarted | PreparationProgress | JobProgress) for event in personalizer.events)


def test_documents_that_are_gone_are_reported_and_still_known(make_quick):
    personalizer = make_quick(after=OLD)
    result = personalizer.adapt(OLD[2:])
    assert result.unchanged and result.gone == 2
    assert "knows 2 documents that are not among these texts; --sync" in result.summary
    assert personalizer.adapt(OLD).gone == 0


def test_other_epochs_are_said_if_nothing_is_new(make_quick):
    result = make_quick(after=OLD, recipe=RECIPE.replace(epochs=7, patience=2)).adapt(OLD)
    assert result.unchanged
    assert result.changes == (("epochs = 1", "epochs = 7"), ("patience = 1", "patience = 2"))
    assert result.summary.endswith(
        "It was trained with epochs = 1 and patience = 1, and this recipe has epochs = 7 and patience = 2; --fresh "
        "(fresh=True) learns all documents again with that."
    )


def test_a_recipe_of_another_name_and_margin_learns_the_same(make_quick):
    assert make_quick(after=OLD, recipe=dataclasses.replace(RECIPE, name="other", margin=0.005)).adapt(OLD).unchanged


def test_the_same_base_model_elsewhere_and_under_another_name_is_the_same(make_quick, model, tmp_path):
    for name in (model.name, "renamed"):
        moved = tmp_path / "moved" / name
        moved.mkdir(parents=True)
        for file in model.iterdir():
            (moved / file.name).write_bytes(file.read_bytes())
        personalizer = make_quick(f"store of {name}", after=OLD, model=moved)
        assert personalizer.adapt(OLD).unchanged
        assert of_kind(personalizer, NameInUse) == []


@pytest.mark.slow
def test_the_command_says_that_nothing_is_new_without_torch(adapted):
    code = (
        "import sys; from sebp_edge.cli import main\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'numpy', 'transformers'} & sys.modules.keys()), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *adapted], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Nothing is new in 24 documents: version 1 of the adapter 'default' has learnt all")
    assert done.stderr == "[]\n"


@pytest.mark.slow
def test_an_inspection_says_what_would_be_learnt_on(make_quick):
    assert make_quick("empty").inspect(OLD).beginning == ""
    personalizer = make_quick(after=OLD)
    nothing = personalizer.inspect(OLD)
    assert nothing.plan is None and nothing.summary.startswith("Nothing is new in 30 documents")
    found = personalizer.inspect([*OLD, NEW[0]])
    assert found.beginning.startswith("Learning on from version 1: 1 new and 0 changed documents, and ")
    assert found.beginning in found.summary and found.plan is not None
