"""Adapters are written whole or not at all, whatever happens to the process or the disk."""

import errno
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from stored_adapter import listing, process, save

from sebp_edge import AdapterStore
from sebp_edge.errors import StorageError


def test_check_writable_leaves_nothing_behind(store, tmp_path):
    store.check_writable("mine", None)
    assert list(store.folder.iterdir()) == []
    store.check_writable("mine", tmp_path / "new" / "out")
    assert not (tmp_path / "new").exists()
    save(store)
    before = listing(tmp_path)
    store.check_writable("mine", None)
    assert listing(tmp_path) == before


def test_a_file_instead_of_the_folder_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    store = AdapterStore(tmp_path / "file")
    for write in (
        lambda: store.check_writable("a", None),
        lambda: save(store, "a"),
    ):
        with pytest.raises(StorageError, match="Not a directory"):
            write()
    assert store.names() == []


@pytest.mark.slow
def test_threads_that_save_at_the_same_time_get_versions_of_their_own(store):
    with ThreadPoolExecutor(8) as threads:
        saved = list(threads.map(lambda _: save(store), range(80)))
    assert sorted(each.version for each in saved) == store.adapter("mine").versions() == list(range(1, 81))
    assert store.adapter("mine").active() in store.adapter("mine").versions()
    assert {path.name for path in (store.folder / "mine").iterdir()} == {"active", *map(str, range(1, 81))}


def test_stale_files_of_killed_processes_are_deleted(store):
    save(store)
    young = store.folder / ".saving-young"
    left = [store.folder / ".saving-x", store.folder / ".removed-mine", store.folder / "mine" / ".removed-1"]
    for folder in (young, *left):
        folder.mkdir()
        (folder / "adapter_model.safetensors").touch()
    left.append(store.folder / "mine" / ".active-x")
    left[-1].touch()
    for path in left:
        for each in (path, *path.rglob("*")):
            os.utime(each, (1, 1))
    save(store)
    assert not any(path.exists() for path in left)
    assert young.exists()
    assert store.names() == ["mine"]
    assert store.adapter("mine").versions() == [1, 2]


def test_a_disk_error_in_safetensors_is_one_sentence_and_loses_nothing(store):
    """A limit on file sizes stands in for a full disk: safetensors reports it from Rust."""
    save(store)
    before = listing(store.folder)
    script = """
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    Weights.size = 1_000_000
    try:
        store.adapter("mine").save(Weights(), record, activate=True)
    except StorageError as error:
        print(error)
    """
    words, _ = process(script, store.folder.parent).communicate(timeout=60)
    assert words.startswith("Cannot save to ")
    assert "File too large; free space" in words
    assert listing(store.folder) == before


@pytest.fixture
def small_disk(mount_disk):
    return mount_disk("64k")


def test_a_full_disk_is_one_sentence_and_can_be_cleared(small_disk):
    store = AdapterStore(small_disk)
    save(store, content=b"x" * 10_000)
    before = listing(small_disk)
    with pytest.raises(StorageError, match="No space left on device"):
        save(store, content=b"x" * 40_000)
    assert listing(small_disk) == before
    (small_disk / "filler").write_bytes(b"")
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "filler").write_bytes(b"x" * 100_000)
    store.adapter("mine").remove()
    assert store.names() == []


def test_a_read_only_disk_is_one_sentence_before_any_work(small_disk):
    store = AdapterStore(small_disk)
    save(store, content=b"")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for name, out in (("mine", None), ("new", None), ("mine", small_disk / "out")):
        with pytest.raises(StorageError, match=r"Cannot save to .*: Read-only file system"):
            store.check_writable(name, out)
    with pytest.raises(StorageError, match=r"Cannot delete .*: Read-only file system\."):
        store.adapter("mine").remove()
    assert store.adapter("mine").open().version == 1


def test_files_that_could_not_be_deleted_are_named(store, monkeypatch):
    saved = save(store)

    def refuse(folder, ignore_errors=False):
        if not ignore_errors:
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(
        StorageError, match=r"some of its files remain in '.*removed-mine': Permission denied; delete them\.$"
    ):
        store.adapter("mine").remove()
    assert not saved.path.exists()
    assert (store.folder / ".removed-mine" / "1").is_dir()
