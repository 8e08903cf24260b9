"""What came, went and changed between two versions, and what an archive tells of their documents."""

import json

import pytest
from random_texts import words
from stored_adapter import save

from sebp_edge import AdapterStore
from sebp_edge.errors import AdapterError
from sebp_edge.lessons.split_history import take_fingerprints
from sebp_edge.lessons.splits import draw_splits
from sebp_edge.run.start import latest_history
from sebp_edge.store.version_documents import Entry, write_history
from sebp_edge.values.remembered import SplitHistory


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
        saved = save(other)
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
    kept = {document.key: document.drawn_fold for document in history.documents}
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
