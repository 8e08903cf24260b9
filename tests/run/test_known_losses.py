"""tested.json: what is known of test losses is not computed again, and nothing that it depends on may have changed."""

import json
import shutil
import zlib
from dataclasses import replace

import pytest
from learnt import NEW, OLD, RECIPE, WEIGHTS
from paused_jobs import bits

from sebp_edge import AdapterStore
from sebp_edge.engine.training.run import TrainingRun
from sebp_edge.run.known_losses import TESTED

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unassessed")]
TEXTS = [*OLD, *NEW[:2]]
FIGURES = (
    "verdict",
    "gain",
    "gain_over_active",
    "gain_over_best",
    "heldout_loss_before",
    "heldout_loss_after",
    "words",
)


@pytest.fixture
def scored(monkeypatch):
    """The documents that earlier versions are scored on during the test."""
    found, score = [], TrainingRun.score

    def watched(run, adaptation, chosen):
        found.extend(outline.document for outline in chosen)
        return score(run, adaptation, chosen)

    monkeypatch.setattr(TrainingRun, "score", watched)
    return found


def numbers_tested(result):
    """The numbers of the documents that a version is tested on."""
    listed = AdapterStore(result.adapter_path.parents[2]).adapter("default").documents(result.version)
    return {number for number, each in enumerate(listed) if each.split == "test" and not each.absent}


def file_of(personalizer, version=1):
    return personalizer.store.adapter("default").version_folder(version) / TESTED


def rewrite(path, change):
    """Writes a file again with its right checksum."""
    values = json.loads(path.read_text())
    values.pop("crc32")
    change(values)
    path.write_text(json.dumps(values | {"crc32": zlib.crc32(json.dumps(values).encode())}) + "\n")


def lower(values):
    """Makes a version better than it is, on all of its documents."""
    for losses in values["tested"]["judged"]:
        losses["nats"] = dict.fromkeys(losses["nats"], 1e-6)


def test_only_new_test_documents_are_scored_and_the_gate_says_the_same(make_quick, scored):
    known, unknown = make_quick("known", after=OLD), make_quick("unknown", after=OLD)
    file_of(unknown).unlink()
    texts = [*OLD, *NEW]
    found = known.adapt(texts, activate_anyway=True)
    new = numbers_tested(found) - set(range(len(OLD)))
    assert new and set(scored) == new
    scored.clear()
    expected = unknown.adapt(texts, activate_anyway=True)
    assert set(scored) == numbers_tested(expected) == numbers_tested(found)
    for name in FIGURES:
        one, other = getattr(found, name), getattr(expected, name)
        assert one == pytest.approx(other, rel=1e-6, abs=1e-9) if isinstance(one, float) else one == other, name
    assert bits(known.store, 2) == bits(unknown.store, 2)


def test_the_next_version_knows_what_this_one_was_tested_on(make_quick, scored):
    """All of it, also of the base model, if no document of the test is new."""
    personalizer = make_quick(after=OLD)
    first = personalizer.adapt([*OLD, *NEW[:5]], activate_anyway=True)
    scored.clear()
    changed = [*OLD, *NEW[:5]]
    trained = min({*range(len(OLD))} - numbers_tested(first))
    changed[trained] += " the ferry"
    second = personalizer.adapt(changed, activate_anyway=True)
    assert (second.learnt_on_from, numbers_tested(second), scored) == (2, numbers_tested(first), [])
    assert second.heldout_loss_before == first.heldout_loss_before
    assert second.record.compared_loss_before == first.heldout_loss_after


@pytest.mark.parametrize("what", ["base", "precision", "device", "torch", "sebp-edge", "weights"])
def test_figures_under_other_conditions_are_not_used(make_quick, scored, what):
    """Which say that the active version can hardly be matched."""
    personalizer = make_quick(after=OLD)
    rewrite(file_of(personalizer), lambda values: lower(values) or values.update({what: "another"}))
    result = personalizer.adapt(TEXTS)
    assert set(scored) >= {*numbers_tested(result)} - set(range(len(OLD), len(TEXTS)))
    assert result.verdict != "worse than active"


def test_figures_under_the_same_conditions_are_used(make_quick):
    """So the tests above can fail."""
    personalizer = make_quick(after=OLD)
    rewrite(file_of(personalizer), lower)
    result = personalizer.adapt(TEXTS)
    assert (result.verdict, result.active) == ("worse than active", False)
    assert personalizer.store.adapter("default").active() == 1


def test_figures_of_other_weights_are_not_used(make_quick, scored):
    """Somebody has put another judged state in the place of the version's."""
    personalizer = make_quick(after=OLD)
    folder = personalizer.store.adapter("default").version_folder(1)
    shutil.copy(folder / WEIGHTS, folder / "judged" / "1" / WEIGHTS)
    result = personalizer.adapt(TEXTS)
    assert set(scored) == numbers_tested(result)


def test_a_text_that_is_encoded_otherwise_is_scored_again(make_quick, scored):
    """By a recipe with shorter examples, which learns on."""
    personalizer = make_quick(after=OLD, recipe=replace(RECIPE, context_length=12))
    result = personalizer.adapt(TEXTS, activate_anyway=True)
    assert result.learnt_on_from == 1
    assert set(scored) == numbers_tested(result)


def test_a_changed_test_document_is_scored_again_and_the_others_are_not(make_quick, scored):
    personalizer = make_quick(after=OLD)
    texts, first = [*OLD], AdapterStore(personalizer.store.folder.parent).adapter("default").documents(1)
    changed = next(number for number, each in enumerate(first) if each.split == "test")
    texts[changed] += " the ferry"
    result = personalizer.adapt(texts, activate_anyway=True)
    assert (result.changed, set(scored)) == (1, {changed})


def test_figures_of_another_number_of_states_are_not_used(make_quick, scored):
    personalizer = make_quick(after=OLD)
    rewrite(file_of(personalizer), lambda values: values["tested"]["judged"].append(values["tested"]["judged"][0]))
    result = personalizer.adapt(TEXTS, activate_anyway=True)
    assert set(scored) == numbers_tested(result)


def test_in_folds_a_document_is_known_by_the_state_that_never_saw_it(make_quick, scored, monkeypatch):
    monkeypatch.setattr("sebp_edge.run.preparation.MOST_IN_FOLDS", 100)
    known = make_quick("known")
    known.adapt(OLD[:22], activate_anyway=True)
    shutil.copytree(known.store.folder.parent, known.store.folder.parents[1] / "unknown")
    unknown = make_quick("unknown")
    file_of(unknown).unlink()
    found = known.adapt([*OLD[:22], NEW[0]], activate_anyway=True)
    assert (found.learnt_on_from, set(scored)) == (1, {22})
    scored.clear()
    expected = unknown.adapt([*OLD[:22], NEW[0]], activate_anyway=True)
    assert set(scored) == {*range(23)}
    assert found.gain_over_active == pytest.approx(expected.gain_over_active, rel=1e-6, abs=1e-9)
    assert bits(known.store, 2) == bits(unknown.store, 2)


NO_LOSSES = {"base": {}, "judged": [{"nats": {"a": "b"}, "tokens": {"a": 1}}]}


@pytest.mark.parametrize(
    "content", ["", "[1]", {}, {"tested": 1, "weights": 2}, {"tested": NO_LOSSES, "weights": ""}], ids=repr
)
def test_a_damaged_file_is_as_none(make_quick, scored, content):
    personalizer = make_quick(after=OLD)
    path = file_of(personalizer)
    if isinstance(content, str):
        path.write_text(content)
    else:
        rewrite(path, lambda values: values.clear() or values.update(content))
    result = personalizer.adapt(TEXTS, activate_anyway=True)
    assert set(scored) == numbers_tested(result)


def test_it_holds_no_text_and_no_name(make_quick):
    text = file_of(make_quick(after=OLD)).read_text()
    assert "note" not in text and not any(word in text for word in OLD[0].split() if len(word) > 3)
