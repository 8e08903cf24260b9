"""An adapter's versions: their numbers, which one is active, and what is in them."""

import dataclasses

import pytest
from stored_adapter import save, visible

from sebp_edge.errors import AdapterError


def test_each_save_is_a_new_version_and_the_activated_one_is_opened(store):
    saved = [save(store, activate=number != 2) for number in range(3)]
    assert [each.version for each in saved] == store.adapter("mine").versions() == [1, 2, 3]
    assert store.adapter("mine").active() == 2
    assert store.adapter("mine").open() == dataclasses.replace(saved[1], active=True)
    assert store.adapter("mine").open(3) == saved[2]
    assert not store.adapter("mine").open(1).active
    assert store.names() == ["mine"]
    assert saved[0].path == store.folder / "mine" / "1"


def test_removing_a_version_leaves_the_others_and_removing_all_leaves_nothing(store):
    for _ in range(3):
        save(store)
    store.adapter("mine").remove(1)
    assert (store.adapter("mine").versions(), store.adapter("mine").active()) == ([2, 3], 3)
    assert store.adapter("mine").remove(3) == 2
    assert (store.adapter("mine").versions(), store.adapter("mine").active()) == ([2], 2)
    assert store.adapter("mine").remove(2) is None
    assert store.names() == visible(store) == []
    save(store, "other")
    save(store, "other")
    store.adapter("other").remove()
    assert visible(store) == []


def test_a_version_is_activated_only_after_the_one_that_it_was_compared_with(store):
    first, second, third = (save(store, activate=False) for _ in range(3))
    assert store.adapter(first.name).activate_after(first.version, None) == (dataclasses.replace(first, active=True), 1)
    # Nothing was active when these were made; the second one saw the first one become active.
    assert store.adapter(third.name).activate_after(third.version, None) == (third, 1)
    assert store.adapter(second.name).activate_after(second.version, 1) == (dataclasses.replace(second, active=True), 2)
    assert store.adapter(third.name).activate_after(third.version, 1) == (third, 2)
    assert store.adapter("mine").active() == 2
    # With nothing active, there is nothing to compare with.
    for version in (1, 2):
        store.adapter("mine").remove(version)
    assert store.adapter(third.name).activate_after(third.version, 1)[0].active


def test_the_two_newest_versions_are_compared_by_default(store):
    for number in range(1, 4):
        saved = save(store, activate=number == 1)
        (saved.path / "documents.json").write_text('{"format": 3, "salt": "00", "documents": []}')
    store.adapter("mine").remove(2)
    for found in (store.adapter("mine").diff(), store.adapter("mine").diff(new=3), store.adapter("mine").diff(1)):
        assert (found.old, found.new) == (1, 3)
    store.adapter("mine").remove(3)
    with pytest.raises(AdapterError, match=r"'mine' has no version before version 1 to compare it with; it has \[1\]"):
        store.adapter("mine").diff()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '"text"'])
def test_a_damaged_version_is_refused_and_can_be_removed(store, content):
    save(store)
    damaged = save(store)
    (damaged.path / "sebp_edge.json").write_text(content)
    with pytest.raises(AdapterError, match="cannot be read"):
        store.adapter("mine").open()
    assert store.adapter("mine").open(1).version == 1
    store.adapter("mine").remove(2)
    assert store.adapter("mine").versions() == [1]


def test_unknown_keys_of_a_record_are_ignored(store):
    saved = save(store)
    text = (saved.path / "sebp_edge.json").read_text()
    (saved.path / "sebp_edge.json").write_text(text.replace("{", '{"what_is_this": 1,', 1))
    assert store.adapter("mine").open().record == saved.record


def test_a_record_can_name_a_model_folder_that_is_not_utf8(store):
    saved = save(store, base_model="caf\udce9")
    assert saved.record == store.adapter("mine").open().record
    assert saved.record.base_model == "caf\udce9"


def test_the_judged_states_of_a_version_are_its_own_or_those_beside_it(store):
    saved = save(store)
    assert saved.judged_states() == [saved.path]
    folder = saved.path / "judged"
    for number in range(1, 4):
        (folder / str(number)).mkdir(parents=True)
    (folder / "x").mkdir()
    assert saved.judged_states() == [folder / "1", folder / "2", folder / "3"]
    (folder / "1").rmdir()
    with pytest.raises(AdapterError, match=r"A judged state is missing in '.*judged', which has \[2, 3\]"):
        saved.judged_states()


def test_a_number_that_is_taken_by_a_file_is_skipped(store):
    taken = save(store, content=b"theirs")
    (store.folder / "mine" / "2").write_text("a file of another program")
    assert save(store, content=b"ours").version == 3
    assert (taken.path / "adapter_model.safetensors").read_bytes() == b"theirs"
