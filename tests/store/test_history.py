"""The history of an adapter: going back, renaming, numbers that are used once, garbage, and differences."""

import dataclasses
import json
import os
import stat

import pytest
from random_texts import words
from stored_adapter import RECORD, FakeAdaptation

from sebp_edge import AdapterRecord, AdapterStore
from sebp_edge.errors import AdapterError, OptionError, StorageError
from sebp_edge.lessons.split_history import take_fingerprints
from sebp_edge.lessons.splits import draw_splits
from sebp_edge.run.start import latest_history
from sebp_edge.store.history import Entry, write_history
from sebp_edge.store.lock import locked
from sebp_edge.values.remembered import SplitHistory

INTERRUPTED = {"verdict": None, "trained_on_all": False}


@pytest.fixture
def store(tmp_path):
    return AdapterStore(tmp_path)


def save(store, name="mine", *, activate=True, **values):
    return store.adapter(name).save(FakeAdaptation(b"x" * 1000), AdapterRecord(**RECORD | values), activate=activate)


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


def test_a_rollback_passes_over_versions_that_were_removed(store):
    for _ in range(3):
        save(store)
    store.adapter("mine").remove(2)
    assert store.adapter("mine").rollback().version == 1


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


def test_a_version_that_was_removed_cannot_be_activated(store):
    saved = save(store, activate=False)
    save(store)
    store.adapter("mine").remove(1)
    with pytest.raises(AdapterError, match=r"has no version 1; it has \[2\]"):
        store.adapter(saved.name).activate(saved.version)
    assert store.adapter("mine").active() == 2


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


def test_the_names_of_removed_adapters_are_not_kept(store):
    save(store, "private-diary")
    store.adapter("private-diary").remove()
    assert not any(b"private" in path.read_bytes() for path in store.folder.rglob("*") if path.is_file())
    assert not any("private" in path.name for path in store.folder.rglob("*"))


def test_the_store_is_readable_by_its_owner_alone_after_every_change(store):
    umask = os.umask(0)
    try:
        store.folder.mkdir(mode=0o777)
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


def test_another_process_that_never_ends_is_reported(store, monkeypatch):
    save(store)
    monkeypatch.setattr("sebp_edge.store.lock._WAIT_SECONDS", 0.05)
    with locked(store.folder), pytest.raises(StorageError, match="Another process has been changing the adapters in"):
        save(store)
    assert save(store).version == 2


# ---------------------------------------------------------------------------------------------------------------- diff


@pytest.fixture
def save_texts(store):
    history = SplitHistory(salt=b"salt")

    def save_them(texts):
        nonlocal history
        fingerprints = take_fingerprints(dict(enumerate(texts)), history.salt)
        history = draw_splits(fingerprints, 0, history).history
        saved = save(store)
        entries = {
            fingerprint.key: Entry(number + 1, 10 * number, f"{number}.md")
            for number, fingerprint in fingerprints.items()
        }
        write_history(saved.path, history, entries)
        return saved

    return save_them


def test_a_difference_names_what_came_went_and_changed(store, save_texts):
    texts = [words(100, number) for number in range(8)]
    save_texts(texts)
    edited = texts[3] + " and a sentence that was added"
    save_texts([*texts[:3], edited, *texts[5:], words(100, 99)])
    found = store.adapter("mine").diff(1, 2)
    assert found.unchanged == 6
    assert [(document.number, document.name) for document in found.went] == [(5, "4.md")]
    assert [(document.number, document.tokens) for document in found.came] == [(8, 70)]
    assert [(before.number, after.number) for before, after in found.changed] == [(4, 4)]
    assert [before["name"] for before, _ in found.to_dict()["changed"]] == ["3.md"]
    assert {document.split for document in (*found.came, *found.went)} <= {"train", "fold 1", "fold 2", "fold 3"}
    values = json.dumps(found.to_dict())
    assert not any(word in values for word in texts[3].split() if len(word) > 3)
    back = store.adapter("mine").diff(2, 1)
    assert ([each.number for each in back.came], [each.number for each in back.went]) == ([5], [8])
    same = store.adapter("mine").diff(1, 1)
    assert (same.came, same.went, same.changed, same.unchanged) == ((), (), (), 8)


def test_a_document_that_was_rewritten_went_and_another_one_came(store, save_texts):
    texts = [words(100, number) for number in range(8)]
    save_texts(texts)
    save_texts([*texts[:7], words(100, 7000)])
    found = store.adapter("mine").diff(1, 2)
    assert (len(found.came), len(found.went), found.changed) == (1, 1, ())


def test_the_documents_of_a_version_are_listed_in_their_order(store, save_texts):
    save_texts([words(100, number) for number in range(8)])
    documents = store.adapter("mine").documents(1)
    assert [document.number for document in documents] == list(range(1, 9))
    assert [document.tokens for document in documents] == list(range(0, 80, 10))
    assert all(len(document.hash) == 16 for document in documents)


def test_versions_of_two_stores_are_not_compared_but_those_made_after_an_import_are(store, save_texts, tmp_path):
    save_texts([words(100, number) for number in range(8)])
    other = AdapterStore(tmp_path / "other")
    texts = dict(enumerate(words(100, number) for number in range(9)))

    def save_in_other(history):
        drawn = draw_splits(take_fingerprints(texts, history.salt), 0, history)
        saved = other.adapter("mine").save(FakeAdaptation(), AdapterRecord(**RECORD), activate=True)
        write_history(saved.path, drawn.history)
        return drawn.split_of or drawn.fold_of

    own = save_in_other(SplitHistory(salt=b"another"))
    store.adapter("mine").export_archive(tmp_path / "moved")
    imported = other.import_archive(tmp_path / "moved")
    with pytest.raises(
        AdapterError, match="Versions 1 and 2 of the adapter 'mine' cannot be compared: one of them came"
    ):
        other.adapter("mine").diff(1, 2)
    other.adapter("mine").activate(imported.version)
    history = latest_history(other.adapter("mine"))
    assert history.salt == b"salt"
    drawn = save_in_other(history)
    found = other.adapter("mine").diff(2, 3)
    assert (len(found.came), len(found.went), found.unchanged) == (1, 0, 8)
    kept = {document.key: document.fold for document in history.documents}
    keys = {number: each.key for number, each in take_fingerprints(texts, b"salt").items()}
    assert all(drawn[number] == kept[keys[number]] for number in range(8))
    assert own.keys() == drawn.keys()


def test_an_archive_has_names_of_documents_only_if_asked(store, save_texts, tmp_path):
    save_texts([words(100, number) for number in range(8)])
    store.adapter("mine").export_archive(tmp_path / "without")
    store.adapter("mine").export_archive(tmp_path / "with", with_names=True)
    other = AdapterStore(tmp_path / "other")
    found = [other.import_archive(tmp_path / name) for name in ("without", "with")]
    assert b"3.md" not in (tmp_path / "without").read_bytes()
    assert [document.name for document in other.adapter("mine").documents(1)] == [None] * 8
    assert [document.name for document in other.adapter("mine").documents(2)] == [f"{number}.md" for number in range(8)]
    assert [document.number for document in other.adapter("mine").documents(1)] == list(range(1, 9))
    assert [saved.version for saved in found] == [1, 2]
    (store.adapter("mine").version_folder(1) / "documents.json").write_text("damaged")
    with pytest.raises(AdapterError, match=r"documents\.json' cannot be read"):
        store.adapter("mine").export_archive(tmp_path / "third")


def test_versions_without_a_list_of_documents_cannot_be_compared(store, save_texts):
    save(store)
    save_texts([words(100, number) for number in range(8)])
    with pytest.raises(AdapterError, match="Version 1 of the adapter 'mine' was saved before sebp-edge recorded its"):
        store.adapter("mine").diff(1, 2)
    assert store.adapter("mine").documents(1) == []
    # Of a list without numbers and tokens, as an earlier sebp-edge wrote it, the hashes are compared.
    path = store.adapter("mine").version_folder(2) / "documents.json"
    values = json.loads(path.read_text())
    for document in values["documents"]:
        document |= {"number": None, "tokens": None}
    path.write_text(json.dumps(values))
    assert store.adapter("mine").diff(2, 2).unchanged == 8
    assert {document.number for document in store.adapter("mine").documents(2)} == {None}
    values["documents"][0]["tokens"] = "AAAA"
    path.write_text(json.dumps(values))
    with pytest.raises(AdapterError, match=r"documents\.json' cannot be read"):
        store.adapter("mine").diff(2, 2)


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
