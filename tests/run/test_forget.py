"""Forgetting without a training: what is found, refused and removed, and what a kill at any instant leaves."""

import json
import os
import random
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from random_texts import words
from store_faults import OTHERS, WRITES, Weights, at_event, end_of, fork, record, state_of

from sebp_edge import Adapter, AdapterStore
from sebp_edge.errors import AdapterError, TextsError
from sebp_edge.lessons.split_history import take_fingerprints
from sebp_edge.lessons.splits import draw_splits
from sebp_edge.reading.readers import read_texts
from sebp_edge.run.forgetting import begin_forgetting, end_forgetting
from sebp_edge.store.version_documents import Entry, read_history, write_history
from sebp_edge.store.where import Where
from sebp_edge.values.reading import Reading
from sebp_edge.values.remembered import SplitHistory

# Every fourth file event is a kill here; 1 takes all.
STEP = 9
RECORD = {"recipe": {"name": "notes", "description": "", "method": "lora"}, "seed": 3}


@pytest.fixture
def store(tmp_path):
    return AdapterStore(tmp_path / "store")


@pytest.fixture
def notes(tmp_path):
    """A folder with eight texts."""
    folder = tmp_path / "notes"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.md").write_text(words(100, number))
    return folder


class Version(Weights):
    """Weights with a list of the documents of a reading."""

    def __init__(self, reading: Reading, history: SplitHistory):
        texts = {number: document.own_text for number, document in enumerate(reading.documents)}
        fingerprints = take_fingerprints(texts, history.salt)
        self.history = draw_splits(fingerprints, 0, history).history
        self.entries = {
            one.key: Entry(number + 1, 10, reading.documents[number].name) for number, one in fingerprints.items()
        }

    def save(self, folder: Path) -> None:
        super().save(folder)
        write_history(folder, self.history, self.entries)


def learn(store, texts, *, activate=True, where=None):
    """Saves a version of these texts, whose history continues the one before; `where` are its groups of texts."""
    history = SplitHistory(salt=b"salt")
    if "mine" in store.names():
        history = read_history(store.adapter("mine").version_folder(store.adapter("mine").versions()[-1]))
    reading = read_texts(texts)
    where = Where(texts=where or (reading.folders,))
    version = Version(reading, history)
    return store.adapter("mine").save(version, record(**RECORD), activate=activate, where=where).version


def call(store, documents, texts, *, activate=True, near=False, on_found=None):
    """Forgets; the new version is saved without a training."""

    def train(remaining):
        new = Version(remaining.reading, remaining.history)
        where = Where(texts=(remaining.reading.folders,))
        saved = store.adapter("mine").save(new, remaining.record, activate=False, where=where)
        return store.adapter(saved.name).activate(saved.version) if activate else saved

    reader = SimpleNamespace(read=read_texts)
    adapter, texts = store.adapter("mine"), texts if isinstance(texts, list | None) else [texts]
    found, completed = begin_forgetting(reader, adapter, documents, texts, with_near_duplicates=near)
    if found is None:
        return completed
    if on_found is not None:
        on_found(found)
    new = None if found.remaining is None else train(found.remaining)
    return end_forgetting(adapter, found, new, is_exact=True)


def known(store, version):
    return [document.label for document in store.adapter("mine").documents(version)]


def remembered(store, text):
    """The versions whose lists have this text, as their own document or as an earlier one."""
    found = []
    for version in store.adapter("mine").versions():
        history = read_history(store.adapter("mine").version_folder(version))
        (fingerprint,) = take_fingerprints({0: text}, history.salt).values()
        found += [version] if fingerprint.key in {document.key for document in history.documents} else []
    return found


def test_every_version_that_knew_the_document_is_replaced_by_one_of_the_others(store, notes):
    text = (notes / "3.md").read_text()
    learn(store, notes)
    learn(store, notes)
    seen = []
    receipt = call(store, ["3.md"], notes, on_found=seen.append)
    assert store.adapter("mine").versions() == [3]
    assert known(store, 3) == [f"{number}.md" for number in range(8) if number != 3]
    assert remembered(store, text) == []
    assert (receipt.versions_removed, receipt.replaced_by, receipt.active) == ((1, 2), 3, 3)
    (found,) = seen
    assert (found.versions, found.remaining.version, found.remaining.record.seed) == ((1, 2), 2, 3)
    saved = json.loads(Path(receipt.path).read_text())
    assert saved | {"path": receipt.path} == json.loads(json.dumps(receipt.to_dict()))
    assert saved["documents"] == [document.hash for document in found.documents]
    assert not any(word in Path(receipt.path).read_text() for word in [*text.split(), "3.md", str(notes)])
    assert "bit for bit" in receipt.exact
    assert "archives" in receipt.not_reached


@pytest.mark.parametrize("wanted", ["path", "relative path", "name", "hash", "deleted file", "moved file"])
def test_a_document_is_found_by_path_name_hash_or_content(store, notes, tmp_path, monkeypatch, wanted):
    learn(store, notes)
    monkeypatch.chdir(tmp_path)
    document = {
        "path": notes / "3.md",
        "relative path": "notes/3.md",
        "name": "3.md",
        "hash": store.adapter("mine").documents(1)[3].hash,
        "deleted file": notes / "3.md",
        "moved file": tmp_path / "elsewhere.txt",
    }[wanted]
    if wanted in ("deleted file", "moved file"):
        (notes / "3.md").rename(tmp_path / "elsewhere.txt")
    call(store, [document], notes)
    assert "3.md" not in known(store, 2)
    assert len(known(store, 2)) == 7


def test_a_file_of_the_same_name_elsewhere_is_not_meant(store, notes, tmp_path):
    learn(store, notes)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "3.md").write_text("Something else.")
    with pytest.raises(AdapterError, match=r"No version of the adapter 'mine' knows a document '.*other/3\.md'"):
        call(store, [tmp_path / "other" / "3.md"], notes)
    with pytest.raises(AdapterError, match=r"knows a document '3\.m'; did you mean '3\.md'"):
        call(store, ["3.m"], notes)
    assert store.adapter("mine").versions() == [1]


def test_a_file_of_records_means_all_of_them_and_a_text_without_a_name_is_a_number(store, notes):
    records = [json.dumps({"text": words(100, 50 + number)}) for number in range(3)]
    (notes / "r.jsonl").write_text("\n".join(records))
    strings = [words(100, 70 + number) for number in range(2)]
    learn(store, [*strings, notes])
    call(store, [notes / "r.jsonl", "2"], [*strings, notes])
    assert known(store, 2) == ["1", *(f"{number}.md" for number in range(8))]
    assert remembered(store, strings[1]) == []


def test_an_earlier_text_of_the_same_name_is_forgotten_too(store, notes):
    first = (notes / "3.md").read_text()
    learn(store, notes)
    (notes / "3.md").write_text(words(100, 1000))
    learn(store, notes)
    call(store, ["3.md"], notes)
    assert store.adapter("mine").versions() == [3]
    assert remembered(store, first) == remembered(store, words(100, 1000)) == []


def test_a_version_that_never_knew_it_stays_and_only_its_list_changes(store, notes):
    text = (notes / "3.md").read_text()
    learn(store, notes)
    (notes / "3.md").unlink()
    learn(store, notes)
    assert remembered(store, text) == [1, 2]
    weights = (store.adapter("mine").version_folder(2) / "adapter_model.safetensors").read_bytes()
    before = known(store, 2)
    seen = []
    receipt = call(store, ["3.md"], notes, on_found=seen.append)
    assert seen[0].remaining is None
    assert (receipt.versions_removed, receipt.replaced_by, receipt.active) == ((1,), None, 2)
    assert store.adapter("mine").versions() == [2]
    assert (store.adapter("mine").version_folder(2) / "adapter_model.safetensors").read_bytes() == weights
    assert known(store, 2) == before
    assert remembered(store, text) == []


def test_near_duplicates_are_said_and_forgotten_if_asked(store, notes):
    text = (notes / "3.md").read_text()
    (notes / "copy.md").write_text(f"{text} One more sentence.")
    learn(store, notes)
    seen = []
    store_of_both = store.folder.parent
    shutil.copytree(store_of_both, store_of_both.with_name("second"))
    receipt = call(store, ["3.md"], notes, on_found=seen.append)
    assert [document.label for document in seen[0].near_duplicates] == ["copy.md"]
    assert receipt.near_duplicates == tuple(document.hash for document in seen[0].near_duplicates)
    assert "copy.md" in known(store, 2)
    second = AdapterStore(store_of_both.with_name("second"))
    receipt = call(second, ["3.md"], notes, near=True)
    assert len(receipt.documents) == 2
    assert known(second, 2) == [f"{number}.md" for number in range(8) if number != 3]


def test_changed_or_missing_others_are_refused_with_their_names(store, notes):
    learn(store, notes)
    (notes / "1.md").write_text("Changed.")
    (notes / "2.md").unlink()
    with pytest.raises(
        TextsError, match=r"of the 7 other documents of version 1, 2 are not .* \(1\.md, 2\.md\)\. Give"
    ):
        call(store, ["3.md"], notes)
    assert store.adapter("mine").versions() == [1]


def test_forgetting_everything_is_refused(store, notes):
    learn(store, notes)
    with pytest.raises(TextsError, match=r"No other document would remain .* remove the adapter"):
        call(store, [f"{number}.md" for number in range(8)], notes)


def test_documents_that_came_since_are_left_out(store, notes):
    learn(store, notes)
    (notes / "new.md").write_text(words(100, 500))
    seen = []
    call(store, ["3.md"], notes, on_found=seen.append)
    assert seen[0].remaining.num_new == 1
    assert "new.md" not in known(store, 2)


def test_a_version_of_which_nothing_is_known_goes_too(store, notes):
    store.adapter("mine").save(Weights(), record(), activate=False)
    learn_after = Version(read_texts(notes), SplitHistory(salt=b"salt"))
    store.adapter("mine").save(learn_after, record(**RECORD), activate=True)
    seen = []
    receipt = call(store, ["3.md"], notes, on_found=seen.append)
    assert seen[0].unlisted == (1,)
    assert receipt.versions_removed == (1, 2)


def test_if_nothing_is_known_of_the_active_version_it_is_refused(store, notes):
    store.adapter("mine").save(Weights(), record(), activate=True)
    with pytest.raises(AdapterError, match="It is not known which documents this adapter was made from"):
        call(store, ["3.md"], notes)


def test_what_was_learnt_meanwhile_by_another_process_stops_the_removal(store, notes):
    learn(store, notes)
    with pytest.raises(AdapterError, match="Nothing was removed: version 2 of the adapter 'mine' was saved meanwhile"):
        call(store, ["3.md"], notes, on_found=lambda found: learn(store, notes))
    assert 1 in store.adapter("mine").versions()


def test_what_later_versions_have_learnt_and_the_active_one_has_not_is_said(store, notes):
    learn(store, notes)
    (notes / "new.md").write_text(words(100, 500))
    (notes / "5.md").write_text(words(100, 501))
    (notes / "6.md").unlink()
    learn(store, notes)
    store.adapter("mine").rollback()
    (notes / "5.md").write_text(words(100, 5))
    (notes / "6.md").write_text(words(100, 6))
    seen = []
    receipt = call(store, ["3.md"], notes, on_found=seen.append)
    assert {document.label for document in seen[0].lost} == {"new.md", "5.md"}
    assert (receipt.versions_removed, receipt.lost) == ((1, 2), 2)


# --------------------------------------------------------------------------------------------------------------- where


def paths(store, version):
    return [[folder.path for folder in group] for group in store.adapter("mine").wheres()[version].texts]


def test_texts_are_read_where_each_version_was_made(store, notes, tmp_path):
    learn(store, notes)
    other = tmp_path / "other"
    other.mkdir()
    for number in range(20, 24):
        (other / f"{number}.md").write_text(words(100, number))
    learn(store, [other, notes], where=(read_texts(other).folders, read_texts(notes).folders))
    call(store, ["3.md", "22.md"], None)
    assert known(store, 3) == ["20.md", "21.md", "23.md", "0.md", "1.md", "2.md", "4.md", "5.md", "6.md", "7.md"]
    assert paths(store, 3) == [[str(other), str(notes)]]


def test_places_of_which_nothing_is_known_any_more_are_remembered_no_longer(store, notes, tmp_path):
    diary, copy = tmp_path / "diary.md", tmp_path / "copy"
    diary.write_text(words(100, 900))
    shutil.copytree(notes, copy)
    learn(store, [diary, notes], where=(read_texts([diary, notes]).folders, read_texts(copy).folders))
    call(store, [diary], None)
    assert [str(path) for (path,) in paths(store, 2)] == [str(notes)]
    assert known(store, 2) == [f"{number}.md" for number in range(8)]


def test_a_place_that_has_other_texts_now_is_named(store, notes):
    learn(store, notes)
    (notes / "5.md").write_text("Changed.")
    with pytest.raises(
        TextsError,
        match=rf"Nothing was forgotten: of the 7 other documents of version 1, 1 is not in '{notes}' as they were then "
        r"\(5\.md\)\. Restore them, give another place that has them with --texts \(texts=\), or first learn",
    ):
        call(store, ["3.md"], None)
    for path in notes.iterdir():
        path.unlink()
    with pytest.raises(TextsError, match=rf"7 are not in '{notes}' as they were then"):
        call(store, ["3.md"], None)
    notes.rmdir()
    with pytest.raises(TextsError, match=rf"expected in '{notes}', which is not there any more; give their new place"):
        call(store, ["3.md"], None)
    assert store.adapter("mine").versions() == [1]


# --------------------------------------------------------------------------------------------------------------- kills


@pytest.mark.slow
def test_a_kill_at_any_instant_loses_no_adapter_and_the_same_call_completes_it(store, notes, tmp_path):
    for note in notes.iterdir():
        note.write_text(words(30, int(note.stem)))
    text = (notes / "3.md").read_text()
    learn(store, notes)
    learn(store, notes)
    gone = tmp_path / "gone"
    gone.mkdir()
    for number in (0, 1, 2, 4, 5, 6, 7):
        shutil.copy(notes / f"{number}.md", gone)
    learn(store, gone, activate=False)  # remembers the document only
    template, work = tmp_path / "template", store.folder.parent
    work.rename(template)
    kills = 0
    for number in range(random.randint(1, STEP), 1000, STEP):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(template, work)

        def child(number=number):
            at_event(number, lambda: os.kill(os.getpid(), signal.SIGKILL), (*WRITES, *OTHERS))
            call(store, ["3.md"], notes)

        code = end_of(fork(child))
        state_of(store)  # asserts that every version is whole
        assert store.adapter("mine").active() is not None
        receipts = list((store.folder / "mine").glob("forgotten-*.json"))
        if receipts:
            assert remembered(store, text) == []
        if code == 0:
            break
        kills += 1
        try:
            call(store, ["3.md"], notes)
        except AdapterError:
            assert receipts
        (receipt,) = (store.folder / "mine").glob("forgotten-*.json")
        assert json.loads(receipt.read_text())["documents"]
        assert remembered(store, text) == []
        assert 3 in store.adapter("mine").versions()
        assert store.adapter("mine").open().version > 3
        state_of(store)
        assert not (store.folder / "mine" / ".forgetting").exists()
    assert kills > 60 // STEP


def test_a_removal_that_was_interrupted_does_not_remove_what_was_learnt_since(store, notes, monkeypatch):
    learn(store, notes)

    def interrupted(*_):
        raise OSError(28, "full")

    with monkeypatch.context() as patch:
        patch.setattr(Adapter, "erase", interrupted)
        with pytest.raises(OSError, match="full"):
            call(store, ["3.md"], notes)
    learnt_again = learn(store, notes)
    receipt = call(store, ["5.md"], notes)
    assert receipt.versions_removed == (2, learnt_again)
    assert [path.name for path in sorted((store.folder / "mine").glob("forgotten-*"))] == [
        "forgotten-1.json",
        "forgotten-2.json",
    ]


def test_a_damaged_note_of_what_to_remove_is_refused_with_what_to_do(store, notes):
    learn(store, notes)
    path = store.folder / "mine" / ".forgetting"
    path.write_text('{"receipt": {"path": "../x"}}')
    with pytest.raises(AdapterError, match=r"\.forgetting', which says what is still to be forgotten, cannot be read"):
        call(store, ["3.md"], notes)
    path.unlink()
