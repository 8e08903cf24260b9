"""Adapters that earlier versions saved still open: `saved_by_0_1_0` was written by commit 61db621."""

import json
import shutil
from pathlib import Path

import pytest
from stored_adapter import RECORD, FakeAdaptation

from sebp_edge import AdapterStore, Personalizer
from sebp_edge.adapters.record import FORMAT, AdapterRecord
from sebp_edge.errors import AdapterError

SAVED = Path(__file__).parent / "saved_by_0_1_0"
# What greedy decoding wrote after "the ferry" when they were saved; the base model repeats " ferry".
CONTINUATION = " the" * 12


@pytest.fixture
def store(tmp_path):
    shutil.copytree(SAVED / "adapters", tmp_path / "adapters")
    return AdapterStore(tmp_path)


def personalizer(store):
    return Personalizer(SAVED / "model", device="cpu", store=store)


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


def test_an_adapter_of_a_newer_format_is_refused_with_what_to_do(store):
    path = store.adapter("letters").open(1).path / "sebp_edge.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": FORMAT + 1}))
    with pytest.raises(AdapterError, match=f"newer sebp-edge, in format {FORMAT + 1}.*Upgrade"):
        store.adapter("letters").open(1)


def test_a_new_adapter_states_its_format_in_its_record(store):
    saved = store.adapter("letters").save(FakeAdaptation(), AdapterRecord(**RECORD), activate=False)
    assert saved.version == 3
    assert json.loads((saved.path / "sebp_edge.json").read_text())["format"] == FORMAT
