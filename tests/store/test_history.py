"""The history of an adapter: going back, renaming, numbers that are used once, and garbage."""

import dataclasses
import json
import os
import stat
from functools import partial

import pytest
import stored_adapter

from sebp_edge import AdapterStore
from sebp_edge.errors import AdapterError, OptionError

INTERRUPTED = {"verdict": None, "trained_on_all": False}


save = partial(stored_adapter.save, content=b"x" * 1000)


# ------------------------------------------------------------------------------------------------------------ rollback


def test_a_rollback_goes_back_through_the_versions_that_were_active(store):
    for number in range(1, 5):
        save(store, activate=number != 2)
    store.adapter("mine").activate(1)
    assert [store.adapter("mine").rollback().version for _ in range(2)] == [4, 3]
    assert store.adapter("mine").open().version == 3
    with pytest.raises(AdapterError, match=r"No version of the adapter 'mine' was active before version 3; activate "):
        store.adapter("mine").rollback()
    assert store.adapter("mine").active() == 3


def test_a_rollback_to_a_damaged_version_changes_nothing(store):
    damaged = save(store)
    save(store)
    (damaged.path / "sebp_edge.json").write_text("{")
    with pytest.raises(AdapterError, match="cannot be read"):
        store.adapter("mine").rollback()
    assert store.adapter("mine").active() == 2


def test_an_active_version_of_0_1_0_can_be_left_and_gone_back_to(store):
    """Its file has one number and no history."""
    save(store, activate=False)
    save(store, activate=False)
    (store.folder / "mine" / "active").write_text("1")
    with pytest.raises(AdapterError, match="was active before version 1"):
        store.adapter("mine").rollback()
    store.adapter("mine").activate(2)
    assert store.adapter("mine").rollback().version == 1


def test_removing_the_active_version_activates_the_one_before_it_or_none(store):
    save(store)
    save(store, activate=False)
    save(store)
    assert store.adapter("mine").remove(3) == store.adapter("mine").active() == 1
    assert store.adapter("mine").remove(1) is None
    assert (store.adapter("mine").versions(), store.adapter("mine").active()) == ([2], None)
    with pytest.raises(AdapterError, match=r"No version of the adapter 'mine' is active; choose one of \[2\]"):
        store.adapter("mine").open()


# ------------------------------------------------------------------------------------------------------------- numbers


def test_a_number_is_not_used_again_even_if_the_adapter_was_removed(store):
    for _ in range(3):
        save(store)
    store.adapter("mine").remove(3)
    assert save(store).version == 4
    store.adapter("mine").remove()
    assert save(store).version == 5
    assert save(store, "other").version == 1


def test_the_store_is_readable_by_its_owner_alone_after_every_change(store):
    umask = os.umask(0)
    try:
        store.folder.mkdir(mode=0o777, parents=True)
        for name in ("mine", "日記"):
            save(store, name)
            save(store, name)
        store.adapter("mine").rollback()
        store.adapter("mine").rename("other")
        store.adapter("日記").remove(2)
        store.adapter("other").export_archive(store.folder / "x")
        store.import_archive(store.folder / "x")
    finally:
        os.umask(umask)
    for path in (store.folder, *store.folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


# -------------------------------------------------------------------------------------------------------------- rename


def test_a_renamed_adapter_keeps_its_versions_numbers_and_history(store):
    for _ in range(3):
        save(store)
    store.adapter("mine").remove(3)
    store.adapter("mine").rename("日記 2026")
    assert store.names() == ["日記 2026"]
    assert (store.adapter("日記 2026").versions(), store.adapter("日記 2026").active()) == ([1, 2], 2)
    assert store.adapter("日記 2026").rollback().version == 1
    assert save(store, "日記 2026").version == 4
    assert save(store, "mine").version == 4


def test_an_adapter_is_never_renamed_onto_another_one(store):
    save(store)
    other = save(store, "other")
    with pytest.raises(AdapterError, match="There already is an adapter 'other'; choose another name"):
        store.adapter("mine").rename("other")
    with pytest.raises(AdapterError, match="Invalid adapter name"):
        store.adapter("mine").rename("a/b")
    with pytest.raises(AdapterError, match="There is no adapter 'mien'; did you mean 'mine'"):
        store.adapter("mien").rename("new")
    assert store.names() == ["mine", "other"]
    assert other.path.is_dir()
    (store.folder / "left").mkdir()  # by a killed process
    store.adapter("mine").rename("left")
    assert store.names() == ["left", "other"]


# ------------------------------------------------------------------------------------------------------------------ gc


def gone(garbage):
    return [(one.version, one.reason) for one in garbage.versions]


def test_gc_keeps_the_active_version_the_one_before_it_and_the_newest(store):
    for number in range(1, 9):
        save(store, activate=number in (1, 2, 3))
    garbage = store.garbage(keep=3)
    assert gone(garbage) == [(1, "old"), (4, "old"), (5, "old")]
    assert garbage.size > 3 * 2000
    assert store.adapter("mine").versions() == list(range(1, 9))
    assert store.gc(garbage) == garbage
    assert (store.adapter("mine").versions(), store.adapter("mine").active()) == ([2, 3, 6, 7, 8], 3)
    assert gone(store.garbage(keep=3)) == []
    assert gone(store.garbage(keep=1)) == [(6, "old"), (7, "old")]
    with pytest.raises(OptionError, match="keep is 0; it must be 1 or more"):
        store.garbage(keep=0)


def test_an_interrupted_version_goes_once_there_is_a_newer_one_unless_it_is_active(store):
    save(store, activate=False, **INTERRUPTED)
    assert gone(store.garbage()) == []
    save(store, **INTERRUPTED)
    assert gone(store.garbage()) == [(1, "interrupted")]
    save(store, activate=False)
    assert gone(store.garbage()) == [(1, "interrupted")]
    # A record of 0.1.0 does not say whether the training was interrupted.
    other = save(store, "other", activate=False, verdict=None)
    save(store, "other")
    assert not other.record.is_interrupted
    assert gone(store.garbage()) == [(1, "interrupted")]


def test_gc_deletes_what_killed_processes_left_and_nothing_of_running_ones(store):
    save(store)
    left = [store.folder / ".saving-old", store.folder / "mine" / ".removed-1", store.folder / "empty"]
    running = store.folder / ".saving-running"
    for folder in (*left, running):
        folder.mkdir()
        if folder.name != "empty":
            (folder / "weights").write_bytes(b"x" * 500)
    for path in (left[0], left[0] / "weights"):
        os.utime(path, (1, 1))
    garbage = store.garbage()
    assert set(garbage.leftovers) == set(left)
    assert garbage.size == 1000
    store.gc(garbage)
    assert running.is_dir()
    assert not any(path.exists() for path in left)
    assert store.adapter("mine").versions() == [1]


def test_gc_keeps_what_was_activated_or_made_since_it_was_asked(store):
    for _ in range(6):
        save(store)
    garbage = store.garbage(keep=1)
    assert gone(garbage) == [(1, "old"), (2, "old"), (3, "old"), (4, "old")]
    store.adapter("mine").activate(2)
    save(store, activate=False)
    store.adapter("mine").remove(4)
    assert gone(store.gc(garbage)) == [(1, "old"), (3, "old")]
    assert store.adapter("mine").versions() == [2, 5, 6, 7]


def test_gc_keeps_a_version_whose_record_cannot_be_read(store):
    for _ in range(6):
        save(store)
    (store.folder / "mine" / "1" / "sebp_edge.json").write_text("{")
    assert [version for version, _ in gone(store.garbage(keep=1))] == [2, 3, 4]
    assert AdapterStore(store.folder / "nowhere").garbage().versions == ()


def test_a_record_keeps_its_provenance(store):
    values = {"explanation": "The test loss fell.", "compared_with": 1, "compared_loss_before": 3.2}
    values |= {"compared_loss_after": 3.1, "packages": {"torch": "2.11.0"}, "verdict": "better"}
    save(store, **values)
    record = store.adapter("mine").open().record
    assert dataclasses.asdict(record).items() >= values.items()
    path = store.adapter("mine").version_folder(1) / "sebp_edge.json"
    for damage in ({"packages": {"torch": 1}}, {"compared_with": -1}, {"compared_with": True}, {"explanation": 1}):
        path.write_text(json.dumps(dataclasses.asdict(record) | damage))
        with pytest.raises(AdapterError, match="cannot be read"):
            store.adapter("mine").open()
