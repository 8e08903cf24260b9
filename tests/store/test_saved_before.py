"""Adapters that earlier versions saved still open.

`saved_by_0_1_0` was written by commit 61db621; its versions have no lists of documents. `saved_by_c0488cf` was written
by that commit, which packed the lists: version 1 knows the notes 0 to 23, and version 2 learnt on with 1 to 29.
"""

import json
import shutil
from pathlib import Path

import pytest
from builders import make_sentences, write_notes
from stored_adapter import save

from sebp_edge import AdapterStore, Personalizer, Recipe
from sebp_edge.errors import AdapterError

pytestmark = pytest.mark.usefixtures("unassessed")

SAVED = Path(__file__).parent / "saved_by_0_1_0"
SAVED_PACKED = Path(__file__).parent / "saved_by_c0488cf"
RECIPE = Recipe(name="test", description="", r=1, learning_rate=2e-2, epochs=3, batch_tokens=512, context_length=64)
# What greedy decoding wrote after "the ferry" when they were saved; the base model repeats " ferry".
CONTINUATION = " the" * 12


@pytest.fixture
def store(tmp_path):
    shutil.copytree(SAVED / "adapters", tmp_path / "adapters")
    return AdapterStore(tmp_path)


@pytest.fixture
def packed_store(tmp_path):
    shutil.copytree(SAVED_PACKED / "adapters", tmp_path / "adapters")
    return AdapterStore(tmp_path)


@pytest.fixture
def notes(tmp_path):
    """A folder with the notes that the packed store's version 2 learnt."""
    folder = write_notes(tmp_path / "notes", make_sentences(30))
    (folder / "note-00.md").unlink()
    return folder


def personalizer(store, **options):
    return Personalizer(SAVED / "model", device="cpu", store=store, **options)


def test_an_earlier_store_lists_its_names_versions_and_losses(store):
    assert store.names() == ["letters", "whole"]
    assert store.adapter("letters").versions() == [1, 2]
    assert store.adapter("letters").active() == 2
    record = store.adapter("letters").open(1).record
    assert (record.documents, record.examples, record.tokens) == (30, 30, 830)
    assert record.heldout_loss_before == 5.750364292751659
    assert record.heldout_loss_after == 5.682520422068509


@pytest.mark.parametrize(("name", "version"), [("letters", 1), ("letters", 2), ("whole", 1)])
def test_an_earlier_adapter_generates_what_it_did(store, name, version):
    text = personalizer(store).generate("the ferry", adapter=name, version=version, temperature=0, max_new_tokens=12)
    assert text == CONTINUATION


def test_without_an_earlier_adapter_the_base_model_writes_something_else(store):
    assert personalizer(store).generate("the ferry", temperature=0, max_new_tokens=12) == " ferry" * 12


def test_an_earlier_version_can_be_made_active_again(store):
    assert store.adapter("letters").activate(1).active
    assert store.adapter("letters").active() == 1


@pytest.mark.slow
def test_an_earlier_store_is_learnt_from_anew_since_its_documents_are_not_known(store, notes):
    adapter = store.adapter("letters")
    with pytest.raises(AdapterError, match="was saved before sebp-edge recorded its documents"):
        adapter.diff()
    with pytest.raises(AdapterError, match="It is not known which documents this adapter was made from"):
        personalizer(store).forget("note-05.md", notes, name="letters")
    result = personalizer(store, recipe=RECIPE).adapt(notes, name="letters", activate_anyway=True)
    assert (result.version, adapter.open(3).record.learnt_on_from) == (3, None)
    assert adapter.rollback().version == 2


@pytest.mark.slow
def test_a_pruned_version_is_listed_and_its_weights_are_refused_in_one_sentence(store, notes, tmp_path):
    """It had compressed weights, and a table in its recipe."""
    adapter, table = store.adapter("whole"), {"pattern": "2:4", "layers": ["up_proj"]}
    folder = adapter.open(1).path
    (folder / "model.safetensors").rename(folder / "compressed.safetensors")
    values = json.loads((folder / "sebp_edge.json").read_text())
    values["recipe"]["sparsity"] = table
    (folder / "sebp_edge.json").write_text(json.dumps(values))
    assert (adapter.versions(), adapter.active(), adapter.open(1).record.recipe["sparsity"]) == ([1], 1, table)
    assert "2:4" in adapter.report(1).to_html()

    user = personalizer(store, recipe=RECIPE)
    message = "The model in '1' is pruned to N:M, which this sebp-edge cannot load; adapt again with --fresh"
    with pytest.raises(AdapterError, match=message):
        user.generate("the ferry", adapter="whole")
    with pytest.raises(AdapterError, match=message):
        user.export("whole", tmp_path / "out", format="merged")
    result = user.adapt(notes, name="whole", fresh=True, activate_anyway=True)
    reason = "it was saved before sebp-edge recorded which documents are for test"
    assert (result.version, result.not_comparable) == (2, reason)


@pytest.mark.parametrize("value", [True, False])
def test_a_version_of_a_recipe_that_knew_fp8_is_listed_shown_and_generates_what_it_did(store, value):
    adapter = store.adapter("letters")
    path = adapter.open(2).path / "sebp_edge.json"
    values = json.loads(path.read_text())
    values["recipe"]["load_in_fp8"] = value
    path.write_text(json.dumps(values))
    assert (adapter.versions(), adapter.active(), adapter.open(2).record.recipe["load_in_fp8"]) == ([1, 2], 2, value)
    assert "load_in_fp8" in adapter.report(2).to_html()
    text = personalizer(store).generate("the ferry", adapter="letters", temperature=0, max_new_tokens=12)
    assert text == CONTINUATION


def test_a_store_with_packed_lists_tells_what_its_versions_know(packed_store):
    adapter = packed_store.adapter("letters")
    assert (packed_store.names(), adapter.versions(), adapter.open().version) == (["letters"], [1, 2], 2)
    assert [(one.name, one.number, one.tokens) for one in adapter.documents(1)[:2]] == [
        ("note-00.md", 1, 28),
        ("note-01.md", 2, 28),
    ]
    assert [one.name for one in adapter.documents(2) if one.absent] == ["note-00.md"]
    found = adapter.diff()
    assert [one.name for one in found.came] == [f"note-{number}.md" for number in range(24, 30)]
    assert ([one.name for one in found.went], found.changed, found.unchanged) == (["note-00.md"], (), 23)
    assert adapter.report().training.learnt_on.version == 1
    assert adapter.rollback().version == adapter.active() == 1


@pytest.mark.slow
def test_a_version_with_a_packed_list_is_learnt_on_from(packed_store, notes):
    adapter, learner = packed_store.adapter("letters"), personalizer(packed_store, recipe=RECIPE)
    assert learner.adapt(notes, name="letters").unchanged
    (notes / "note-30.md").write_text(make_sentences(31)[30], encoding="utf-8")
    assert learner.adapt(notes, name="letters", activate_anyway=True).version == 3
    assert adapter.open().record.learnt_on_from == 2
    before, after = ({one.name: one.split for one in adapter.documents(version)} for version in (2, 3))
    assert after == before | {"note-30.md": after["note-30.md"]}
    assert json.loads((adapter.open().path / "documents.json").read_text())["documents"][0].keys() >= {"hash", "split"}


@pytest.mark.slow
def test_a_store_with_packed_lists_forgets(packed_store, notes):
    adapter = packed_store.adapter("letters")
    receipt = personalizer(packed_store).forget("note-28.md", notes, name="letters", activate_anyway=True)
    assert (receipt.versions_removed, adapter.versions()) == ((2,), [1, 3])
    assert "note-28.md" not in {one.name for one in adapter.documents(3)}
    # Version 1 does not know the note, and its list stays readable.
    assert len(adapter.documents(1)) == 24


def test_an_adapter_of_a_newer_format_is_refused_with_what_to_do(store):
    path = store.adapter("letters").open(1).path / "sebp_edge.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(AdapterError, match=r"newer sebp-edge, in format 99.*Upgrade"):
        store.adapter("letters").open(1)


def test_a_new_adapter_states_its_format_in_its_record(store):
    saved = save(store, "letters", activate=False)
    assert saved.version == 3
    assert json.loads((saved.path / "sebp_edge.json").read_text())["format"] == 1
