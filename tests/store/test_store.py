"""The adapters in a folder: how they are named, found and saved, the salt of their hashes, and who can read them."""

import errno
import os
import re
import stat

import pytest
from stored_adapter import FakeAdaptation, listing, save, visible

from sebp_edge import AdapterStore
from sebp_edge.errors import AdapterError, OptionError, StorageError
from sebp_edge.store import salt as salt_module
from sebp_edge.store.lock import locked
from sebp_edge.store.names import check_name, folder_of, name_of
from sebp_edge.store.saved import save_to


def test_a_missing_adapter_or_version_is_named_with_the_known_ones(store):
    with pytest.raises(AdapterError, match="There is no adapter 'mine'; the store is empty"):
        store.adapter("mine").open()
    save(store)
    with pytest.raises(AdapterError, match=r"There is no adapter 'mien'; did you mean 'mine'\?"):
        store.adapter("mien").open()
    adapter = store.adapter("mine")
    for missing in (adapter.open, adapter.remove, adapter.activate):
        with pytest.raises(AdapterError, match=r"'mine' has no version 7; it has \[1\]"):
            missing(7)


def test_an_adapter_is_found_by_name_or_by_folder(store, record, tmp_path, monkeypatch):
    saved = save(store)
    out = save_to(FakeAdaptation(), record, tmp_path / "elsewhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.find("mine") == store.find("mine", 1) == saved
    assert store.find(out.path) == store.find(str(out.path)) == store.find("~/elsewhere") == out
    for missing in ("~nobody-of-that-name/x", str(tmp_path / "no"), "x/" * 3000, tmp_path / "no"):
        with pytest.raises(AdapterError, match="There is no adapter folder"):
            store.find(missing)
    (tmp_path / "empty").mkdir()
    with pytest.raises(AdapterError, match="is not an adapter of sebp-edge"):
        store.find(tmp_path / "empty")


@pytest.mark.parametrize("name", ["a", "default", "My-notes_2.1", "x" * 64, "2024", "console", "common.v2"])
def test_a_plain_name_is_the_name_of_its_folder(name):
    assert check_name(name) == folder_of(name) == name_of(name) == name


@pytest.mark.parametrize(
    "name", ["my notes", "日記", "日" * 26, "Anna's: 50% & more?", "é", "a..b", "x.", "a%20b", "CON", "nul", "com1.old"]
)
def test_any_other_name_has_a_folder_that_every_system_allows(store, name):
    folder = folder_of(name)
    assert re.fullmatch("[A-Za-z0-9_%-]{1,234}", folder)
    assert not re.match("(con|nul|com1)([.]|$)", folder, re.IGNORECASE)
    assert name_of(folder) == name
    saved = save(store, name)
    assert store.names() == [name]
    assert store.find(name) == saved
    assert saved.path == store.folder / folder / "1"
    store.adapter(name).remove()
    assert visible(store) == []


def test_a_name_is_the_same_however_its_accents_were_typed(store):
    save(store, "cafe\u0301")
    assert store.names() == ["caf\u00e9"]
    assert store.adapter("cafe\u0301").open().version == store.adapter("caf\u00e9").open().version == 1


@pytest.mark.parametrize("folder", ["%41", "a%20", "a b", "..", "%zz", "%E6", "%2E%2E", "a%2Fb", "x.", "CON", ".salt"])
def test_a_folder_that_the_store_did_not_name_is_no_adapter(store, folder):
    assert name_of(folder) is None


NO_NAMES = ["", ".", "..", "../x", "a/b", "a\\b", "/etc", ".hidden", "-x", "~x", "x" * 65, "日" * 27]
NO_NAMES += [" a", "a ", "a\n", "a\0", "a\x1b[0m", "a\ud800"]


@pytest.mark.parametrize("name", NO_NAMES)
def test_invalid_names_are_refused(store, name):
    for use in (check_name, store.adapter, lambda name: store.check_writable(name, None)):
        with pytest.raises(AdapterError, match="Invalid adapter name"):
            use(name)
    assert not store.folder.exists()


def test_the_salt_is_made_once_and_only_its_owner_can_read_it(store):
    salt = store.salt()
    assert len(salt) == 32
    assert store.salt() == AdapterStore(store.folder.parent).salt() == salt
    assert stat.S_IMODE((store.folder / ".salt").stat().st_mode) == 0o600
    assert store.names() == []
    assert AdapterStore(store.folder.parent / "other").salt() != salt


def test_a_salt_of_another_thread_is_not_replaced(store, monkeypatch):
    """Both find no salt; the other one is faster."""
    write = salt_module.write_atomically

    def write_after_the_other(path, text, **options):
        write(path, "0" * 32)
        write(path, text, **options)

    with monkeypatch.context() as patch:
        patch.setattr(salt_module, "write_atomically", write_after_the_other)
        assert store.salt() == b"0" * 32
        # A disk without hard links.
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(errno.EPERM, "no links")))
        assert AdapterStore(store.folder.parent / "other").salt() == b"0" * 32
    assert len(AdapterStore(store.folder.parent / "third").salt()) == 32


@pytest.mark.parametrize("content", [b"", b"x" * 32, b"0" * 100, b"\xff" * 32])
def test_a_damaged_salt_is_refused_with_what_to_do(store, content):
    store.salt()
    (store.folder / ".salt").write_bytes(content)
    with pytest.raises(StorageError, match=r"\.salt' is damaged, .* restore the file, or delete it"):
        store.salt()


def test_another_process_that_never_ends_is_reported(store):
    save(store)
    refused = pytest.raises(StorageError, match="Another process has been changing the adapters in")
    with locked(store.folder), refused, locked(store.folder, seconds=0.05):
        pass
    assert save(store).version == 2


def test_an_existing_path_is_never_overwritten(store, record, tmp_path):
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_text("mine")
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine too")
    before = listing(tmp_path)
    for out in (file, folder):
        with pytest.raises(OptionError, match="already exists"):
            store.check_writable("mine", out)
        with pytest.raises(StorageError, match="already exists"):
            save_to(FakeAdaptation(), record, out)
    assert listing(tmp_path) == before
