"""Adapters on disk: versions, names, file modes; atomic writes, whatever happens to the process or the disk."""

import dataclasses
import errno
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
from stored_adapter import RECORD, FakeAdaptation

from sebp_edge import Folder
from sebp_edge.adapters import salt as salt_module
from sebp_edge.adapters.history import write_history
from sebp_edge.adapters.names import check_name, folder_of, name_of
from sebp_edge.adapters.record import AdapterRecord
from sebp_edge.adapters.saved import save_to
from sebp_edge.adapters.store import AdapterStore
from sebp_edge.adapters.where import Where
from sebp_edge.errors import AdapterError, OptionError, StorageError
from sebp_edge.texts.split_history import SplitHistory

# The beginning of a script that saves into the folder argv[1].
SAVE_SCRIPT = """
import os, resource, signal, sys, time
from pathlib import Path
import numpy
from safetensors.numpy import save_file
from sebp_edge.adapters.record import AdapterRecord
from sebp_edge.adapters.store import AdapterStore
from sebp_edge.errors import StorageError

class Weights:
    size = 1000
    def save(self, folder):
        save_file({"w": numpy.zeros(self.size)}, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text("{}")

record = AdapterRecord(**RECORD)
store = AdapterStore(sys.argv[1])
"""


class Failing(FakeAdaptation):
    """Writes some files, then fails as on a full disk."""

    def save(self, folder):
        super().save(folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def store(tmp_path):
    return AdapterStore(tmp_path / "data")


@pytest.fixture
def record():
    return AdapterRecord(**RECORD)


def process(script, folder, **options):
    script = f"RECORD = {RECORD!r}\n{SAVE_SCRIPT}\n{textwrap.dedent(script)}"
    return subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True, **options)


def listing(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def visible(store):
    """The store's entries apart from its lock, its salt and the highest numbers."""
    return [path for path in store.folder.iterdir() if path.name not in (".lock", ".numbers", ".salt")]


# ----------------------------------------------------------------------------------------------------------- versions


def test_each_save_is_a_new_version_and_the_activated_one_is_opened(store, record):
    saved = [store.adapter("mine").save(FakeAdaptation(), record, activate=number != 2) for number in range(3)]
    assert [each.version for each in saved] == store.adapter("mine").versions() == [1, 2, 3]
    assert store.adapter("mine").active() == 2
    assert store.adapter("mine").open() == dataclasses.replace(saved[1], active=True)
    assert store.adapter("mine").open(3) == saved[2]
    assert not store.adapter("mine").open(1).active
    assert store.names() == ["mine"]
    assert saved[0].path == store.folder / "mine" / "1"


def test_no_version_is_active_until_one_is_activated(store, record):
    store.adapter("mine").save(FakeAdaptation(), record, activate=False)
    assert store.adapter("mine").active() is None
    with pytest.raises(AdapterError, match=r"No version of the adapter 'mine' is active; choose one of \[1\]"):
        store.adapter("mine").open()


def test_a_new_version_has_the_highest_number_even_after_a_removal(store, record):
    for _ in range(3):
        store.adapter("mine").save(FakeAdaptation(), record, activate=True)
    store.adapter("mine").remove(2)
    assert store.adapter("mine").save(FakeAdaptation(), record, activate=True).version == 4


def test_removing_a_version_leaves_the_others_and_removing_all_leaves_nothing(store, record):
    for _ in range(3):
        store.adapter("mine").save(FakeAdaptation(), record, activate=True)
    store.adapter("mine").remove(1)
    assert (store.adapter("mine").versions(), store.adapter("mine").active()) == ([2, 3], 3)
    assert store.adapter("mine").remove(3) == 2
    assert (store.adapter("mine").versions(), store.adapter("mine").active()) == ([2], 2)
    assert store.adapter("mine").remove(2) is None
    assert store.names() == visible(store) == []
    store.adapter("other").save(FakeAdaptation(), record, activate=True)
    store.adapter("other").save(FakeAdaptation(), record, activate=True)
    store.adapter("other").remove()
    assert visible(store) == []


def test_a_version_is_activated_only_after_the_one_that_it_was_compared_with(store, record):
    first, second, third = (store.adapter("mine").save(FakeAdaptation(), record, activate=False) for _ in range(3))
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


def test_the_two_newest_versions_are_compared_by_default(store, record):
    for number in range(1, 4):
        saved = store.adapter("mine").save(FakeAdaptation(), record, activate=number == 1)
        write_history(saved.path, SplitHistory(salt=b"salt"), {})
    store.adapter("mine").remove(2)
    for found in (store.adapter("mine").diff(), store.adapter("mine").diff(new=3), store.adapter("mine").diff(1)):
        assert (found.old, found.new) == (1, 3)
    store.adapter("mine").remove(3)
    with pytest.raises(AdapterError, match=r"'mine' has no version before version 1 to compare it with; it has \[1\]"):
        store.adapter("mine").diff()


# ------------------------------------------------------------------------------------------------------------- where


HERE = Where(
    texts=((Folder("/home/anna/notes", include=("*.md",), exclude=("drafts/",)), Folder("/b")), (Folder("/c"),))
)


def where_file(store):
    return store.folder / "mine" / "where.json"


def test_where_a_version_was_made_is_remembered_beside_it_and_moves_nowhere(store, record, tmp_path):
    first = store.adapter("mine").save(FakeAdaptation(), record, activate=True, where=HERE)
    second = store.adapter("mine").save(FakeAdaptation(), record, activate=True, where=Where())
    store.adapter("mine").save(FakeAdaptation(), record, activate=True)
    assert store.adapter("mine").wheres() == {1: HERE, 2: Where()}
    store.adapter(second.name).remember_where(second.version, HERE)
    assert AdapterStore(tmp_path / "data").adapter("mine").wheres() == {1: HERE, 2: HERE}
    assert stat.S_IMODE(where_file(store).stat().st_mode) == 0o600
    assert not any(b"anna" in path.read_bytes() for path in first.path.rglob("*") if path.is_file())
    store.adapter("mine").export_archive(tmp_path / "moved", 1, with_names=True)
    assert b"anna" not in (tmp_path / "moved").read_bytes()
    other = AdapterStore(tmp_path / "other")
    other.import_archive(tmp_path / "moved")
    assert other.adapter("mine").wheres() == {}
    store.adapter("mine").rename("new name")
    assert store.adapter("new name").wheres().keys() == {1, 2} and store.adapter("mine").wheres() == {}


def test_where_a_version_was_made_goes_with_it(store, record):
    for _ in range(6):
        store.adapter("mine").save(FakeAdaptation(), record, activate=True, where=HERE)
    store.adapter("mine").remove(2)
    assert store.adapter("mine").wheres().keys() == {1, 3, 4, 5, 6}
    store.adapter("mine").erase([3], {})
    assert store.adapter("mine").wheres().keys() == {1, 4, 5, 6}
    store.gc(store.garbage(keep=1))
    assert store.adapter("mine").wheres().keys() == {5, 6}
    store.adapter("mine").remove()
    assert visible(store) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text("{"),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text(path.read_text().replace('"format": 1', '"format": 2')),
        lambda path: path.write_text(path.read_text().replace('"/b"', "7")),
        lambda path: path.write_text(path.read_text().replace('"*.md"', '"*a*a*a*a*a"')),
        lambda path: path.write_text(path.read_text().replace('"1"', '"one"')),
        lambda path: path.write_text(
            '{"format": 1, "versions": {"1": {"texts": ' + "[" * 100_000 + "]" * 100_000 + "}}}"
        ),
        lambda path: path.write_text('{"format": 1, "versions": {"1": null}}'),
        lambda path: (path.unlink(), os.mkfifo(path)),
    ],
)
def test_a_damaged_memory_of_where_versions_were_made_is_none(store, record, damage):
    store.adapter("mine").save(FakeAdaptation(), record, activate=True, where=HERE)
    damage(where_file(store))
    assert store.adapter("mine").wheres() == {}
    store.adapter("mine").save(FakeAdaptation(), record, activate=True, where=HERE)
    assert store.adapter("mine").wheres() == {2: HERE}


def test_a_full_disk_loses_at_most_where_a_version_was_made(store, record, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    first = store.adapter("mine").save(FakeAdaptation(), record, activate=True, where=HERE)
    with monkeypatch.context() as patch:
        patch.setattr("sebp_edge.adapters.where.write_atomically", full)
        assert store.adapter("mine").save(FakeAdaptation(), record, activate=True, where=HERE).active
        store.adapter(first.name).remember_where(first.version, Where())
        assert store.adapter("mine").wheres() == {1: HERE}
        store.adapter("mine").remove(1)
    # What was removed is not remembered, whatever it costs.
    assert store.adapter("mine").versions() == [2] and not where_file(store).exists()


def test_a_missing_adapter_or_version_is_named_with_the_known_ones(store, record):
    with pytest.raises(AdapterError, match="There is no adapter 'mine'; the store is empty"):
        store.adapter("mine").open()
    store.adapter("mine").save(FakeAdaptation(), record, activate=True)
    with pytest.raises(AdapterError, match=r"There is no adapter 'mien'; did you mean 'mine'\?"):
        store.adapter("mien").open()
    adapter = store.adapter("mine")
    for missing in (adapter.open, adapter.remove, adapter.activate):
        with pytest.raises(AdapterError, match=r"'mine' has no version 7; it has \[1\]"):
            missing(7)


def test_an_adapter_is_found_by_name_or_by_folder(store, record, tmp_path, monkeypatch):
    saved = store.adapter("mine").save(FakeAdaptation(), record, activate=True)
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


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '"text"'])
def test_a_damaged_version_is_refused_and_can_be_removed(store, record, content):
    store.adapter("mine").save(FakeAdaptation(), record, activate=True)
    damaged = store.adapter("mine").save(FakeAdaptation(), record, activate=True)
    (damaged.path / "sebp_edge.json").write_text(content)
    with pytest.raises(AdapterError, match="cannot be read"):
        store.adapter("mine").open()
    assert store.adapter("mine").open(1).version == 1
    store.adapter("mine").remove(2)
    assert store.adapter("mine").versions() == [1]


def test_unknown_keys_of_a_record_are_ignored(store, record):
    saved = store.adapter("mine").save(FakeAdaptation(), record, activate=True)
    text = (saved.path / "sebp_edge.json").read_text()
    (saved.path / "sebp_edge.json").write_text(text.replace("{", '{"what_is_this": 1,', 1))
    assert store.adapter("mine").open().record == record


# -------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", ["a", "default", "My-notes_2.1", "x" * 64, "2024", "console", "common.v2"])
def test_a_plain_name_is_the_name_of_its_folder(name):
    assert check_name(name) == folder_of(name) == name_of(name) == name


@pytest.mark.parametrize(
    "name", ["my notes", "日記", "日" * 26, "Anna's: 50% & more?", "é", "a..b", "x.", "a%20b", "CON", "nul", "com1.old"]
)
def test_any_other_name_has_a_folder_that_every_system_allows(store, record, name):
    folder = folder_of(name)
    assert re.fullmatch("[A-Za-z0-9_%-]{1,234}", folder)
    assert not re.match("(con|nul|com1)([.]|$)", folder, re.IGNORECASE)
    assert name_of(folder) == name
    saved = store.adapter(name).save(FakeAdaptation(), record, activate=True)
    assert store.names() == [name]
    assert store.find(name) == saved
    assert saved.path == store.folder / folder / "1"
    store.adapter(name).remove()
    assert visible(store) == []


def test_a_name_is_the_same_however_its_accents_were_typed(store, record):
    store.adapter("cafe\u0301").save(FakeAdaptation(), record, activate=True)
    assert store.names() == ["caf\u00e9"]
    assert store.adapter("cafe\u0301").open().version == store.adapter("caf\u00e9").open().version == 1


@pytest.mark.parametrize("folder", ["%41", "a%20", "a b", "..", "%zz", "%E6", "%2E%2E", "a%2Fb", "x.", "CON", ".salt"])
def test_a_folder_that_the_store_did_not_name_is_no_adapter(store, folder):
    assert name_of(folder) is None


@pytest.mark.parametrize(
    "name",
    [
        *(
            "",
            ".",
            "..",
            "../x",
            "a/b",
            "a\\b",
            "/etc",
            ".hidden",
            "-x",
            "~x",
            "x" * 65,
            "日" * 27,
            " a",
            "a ",
            "a\n",
            "a\0",
            "a\x1b[0m",
            "a\ud800",
        ),
    ],
)
def test_invalid_names_are_refused(store, record, name):
    for use in (check_name, store.adapter, lambda name: store.check_writable(name, None)):
        with pytest.raises(AdapterError, match="Invalid adapter name"):
            use(name)
    assert not store.folder.exists()


# ----------------------------------------------------------------------------------------------------------- contents


def test_the_salt_is_made_once_and_only_its_owner_can_read_it(store):
    salt = store.salt()
    assert len(salt) == 32
    assert store.salt() == AdapterStore(store.folder.parent).salt() == salt
    assert stat.S_IMODE((store.folder / ".salt").stat().st_mode) == 0o600
    assert store.names() == []
    assert AdapterStore(store.folder.parent / "other").salt() != salt


def test_processes_that_need_the_salt_at_the_same_time_get_the_same(tmp_path):
    script = """
    print("ready", flush=True)
    while not Path(sys.argv[1], "go").exists():
        pass
    print(store.salt().decode())
    """
    two = [process(script, tmp_path) for _ in range(2)]
    assert [one.stdout.readline() for one in two] == ["ready\n"] * 2
    (tmp_path / "go").touch()
    first, second = (one.communicate(timeout=60)[0].strip() for one in two)
    assert first == second == AdapterStore(tmp_path).salt().decode()


def test_a_salt_of_another_thread_is_not_replaced(store, monkeypatch):
    """Both find no salt; the other one is faster."""
    write = salt_module.write_atomically

    def write_after_the_other(path, text, **options):
        write(path, "0" * 32)
        write(path, text, **options)

    monkeypatch.setattr(salt_module, "write_atomically", write_after_the_other)
    assert store.salt() == b"0" * 32
    # A disk without hard links.
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(errno.EPERM, "no links")))
    assert AdapterStore(store.folder.parent / "other").salt() == b"0" * 32
    monkeypatch.setattr(salt_module, "write_atomically", write)
    assert len(AdapterStore(store.folder.parent / "third").salt()) == 32


@pytest.mark.parametrize("content", [b"", b"x" * 32, b"0" * 100, b"\xff" * 32])
def test_a_damaged_salt_is_refused_with_what_to_do(store, content):
    store.salt()
    (store.folder / ".salt").write_bytes(content)
    with pytest.raises(StorageError, match=r"\.salt' is damaged, .* restore the file, or delete it"):
        store.salt()


def test_the_judged_states_of_a_version_are_its_own_or_those_beside_it(store, record):
    saved = store.adapter("mine").save(FakeAdaptation(), record, activate=True)
    assert saved.judged_states() == [saved.path]
    folder = saved.path / "judged"
    for number in range(1, 4):
        (folder / str(number)).mkdir(parents=True)
    (folder / "x").mkdir()
    assert saved.judged_states() == [folder / "1", folder / "2", folder / "3"]
    (folder / "1").rmdir()
    with pytest.raises(AdapterError, match=r"A judged state is missing in '.*judged', which has \[2, 3\]"):
        saved.judged_states()


def test_only_the_owner_can_read_it(store, record, tmp_path):
    umask = os.umask(0)
    try:
        saved = store.adapter("mine").save(FakeAdaptation(), record, activate=True)
        out = save_to(FakeAdaptation(), record, tmp_path / "out")
    finally:
        os.umask(umask)
    for folder in (store.folder, out.path):
        for path in (folder, *folder.rglob("*")):
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert (saved.path / "templates" / "chat.jinja").is_file()


def test_the_readme_names_the_base_model_and_the_losses(store, record):
    text = (store.adapter("mine").save(FakeAdaptation(), record, activate=True).path / "README.md").read_text()
    assert text.startswith("---\nbase_model: sebp-edge/tiny\nlibrary_name: peft\n---\n# A LoRA adapter for")
    assert "\nTest loss in nats per token: 3.500 before, 3.100 after.\n" in text
    refit = dataclasses.replace(record, trained_on_all=True, general_loss_before=4.0, general_loss_after=4.125)
    text = (store.adapter("mine").save(FakeAdaptation(), refit, activate=True).path / "README.md").read_text()
    assert (
        "3.100 after, in the judged state; then it was trained on all documents, which was not judged by itself" in text
    )
    assert "Loss on general text in nats per token: 4.000 before, 4.125 after.\n" in text
    full = dataclasses.replace(record, recipe={"name": "full", "method": "full"}, heldout_loss_after=None)
    text = (store.adapter("mine").save(FakeAdaptation(), full, activate=True).path / "README.md").read_text()
    assert "library_name: transformers" in text
    assert "loss" not in text


# ------------------------------------------------------------------------------------------------------ atomic writes


def test_check_writable_leaves_nothing_behind(store, record, tmp_path):
    store.check_writable("mine", None)
    assert list(store.folder.iterdir()) == []
    store.check_writable("mine", tmp_path / "new" / "out")
    assert list((tmp_path / "new").iterdir()) == []
    store.adapter("mine").save(FakeAdaptation(), record, activate=True)
    before = listing(tmp_path)
    store.check_writable("mine", None)
    assert listing(tmp_path) == before


def test_files_of_a_killed_run_block_nothing(store, record):
    """A killed run can leave an adapter's folder with a temporary folder and no version."""
    (store.folder / "mine" / ".saving-xyz").mkdir(parents=True)
    store.check_writable("mine", None)
    assert store.names() == []
    assert store.adapter("mine").save(FakeAdaptation(), record, activate=True).version == 1


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


def test_a_failed_save_changes_nothing(store, record, tmp_path):
    store.adapter("mine").save(FakeAdaptation(), record, activate=True)
    before = listing(tmp_path)
    with pytest.raises(StorageError, match=r"Cannot save to '.*': No space left on device; free space"):
        store.adapter("mine").save(Failing(), record, activate=True)
    with pytest.raises(StorageError, match="No space left"):
        save_to(Failing(), record, tmp_path / "out")
    assert listing(tmp_path) == before
    assert store.adapter("mine").versions() == [1]


def test_a_file_instead_of_the_folder_is_one_sentence(tmp_path, record):
    (tmp_path / "file").touch()
    store = AdapterStore(tmp_path / "file")
    for write in (
        lambda: store.check_writable("a", None),
        lambda: store.adapter("a").save(FakeAdaptation(), record, activate=True),
    ):
        with pytest.raises(StorageError, match="Not a directory"):
            write()
    assert store.names() == []


def test_a_number_that_is_taken_by_a_file_is_skipped(store, record):
    taken = store.adapter("mine").save(FakeAdaptation(b"theirs"), record, activate=True)
    (store.folder / "mine" / "2").write_text("a file of another program")
    assert store.adapter("mine").save(FakeAdaptation(b"ours"), record, activate=True).version == 3
    assert (taken.path / "adapter_model.safetensors").read_bytes() == b"theirs"


def test_processes_that_save_at_the_same_time_get_versions_of_their_own(store):
    script = """
    print("ready", flush=True)
    while not Path(sys.argv[1], "go").exists():
        time.sleep(0.001)
    print(*[store.adapter("mine").save(Weights(), record, activate=True).version for _ in range(5)])
    """
    store.folder.parent.mkdir()
    two = [process(script, store.folder.parent) for _ in range(2)]
    assert [one.stdout.readline() for one in two] == ["ready\n"] * 2
    (store.folder.parent / "go").touch()
    versions = [set(map(int, one.communicate(timeout=60)[0].split())) for one in two]
    assert [one.returncode for one in two] == [0, 0]
    assert versions[0] | versions[1] == set(store.adapter("mine").versions()) == set(range(1, 11))
    assert store.adapter("mine").open().version == store.adapter("mine").active()
    assert {path.name for path in (store.folder / "mine").iterdir()} == {"active", *map(str, range(1, 11))}


def test_threads_that_save_at_the_same_time_get_versions_of_their_own(store, record):
    with ThreadPoolExecutor(8) as threads:
        saved = list(
            threads.map(lambda _: store.adapter("mine").save(FakeAdaptation(), record, activate=True), range(80))
        )
    assert sorted(each.version for each in saved) == store.adapter("mine").versions() == list(range(1, 81))
    assert store.adapter("mine").active() in store.adapter("mine").versions()
    assert {path.name for path in (store.folder / "mine").iterdir()} == {"active", *map(str, range(1, 81))}


def test_stale_files_of_killed_processes_are_deleted(store, record):
    store.adapter("mine").save(FakeAdaptation(), record, activate=True)
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
    store.adapter("mine").save(FakeAdaptation(), record, activate=True)
    assert not any(path.exists() for path in left)
    assert young.exists()
    assert store.names() == ["mine"]
    assert store.adapter("mine").versions() == [1, 2]


def test_a_record_can_name_a_model_folder_that_is_not_utf8(store, record):
    odd = dataclasses.replace(record, base_model="caf\udce9")
    assert (
        store.adapter("mine").save(FakeAdaptation(), odd, activate=True).record
        == store.adapter("mine").open().record
        == odd
    )


def test_a_killed_process_leaves_no_partial_version(store, record):
    store.adapter("mine").save(FakeAdaptation(), record, activate=True)
    script = """
    save = Weights.save
    def killed(self, folder):
        save(self, folder)
        os.kill(os.getpid(), signal.SIGKILL)
    Weights.save = killed
    store.adapter("mine").save(Weights(), record, activate=True)
    """
    one = process(script, store.folder.parent)
    one.communicate(timeout=60)
    assert one.returncode == -signal.SIGKILL
    assert (store.adapter("mine").versions(), store.adapter("mine").active()) == ([1], 1)
    store.check_writable("mine", None)
    assert store.adapter("mine").save(FakeAdaptation(), record, activate=True).version == 2
    (left,) = store.folder.glob(".saving-*")
    for path in (left, *left.iterdir()):
        os.utime(path, (1, 1))  # a recent one may belong to a running save
    store.adapter("mine").remove()
    assert visible(store) == []


def test_a_disk_error_in_safetensors_is_one_sentence_and_loses_nothing(store, record):
    """A limit on file sizes stands in for a full disk: safetensors reports it from Rust."""
    store.adapter("mine").save(FakeAdaptation(), record, activate=True)
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


def test_a_full_disk_is_one_sentence_and_can_be_cleared(small_disk, record):
    store = AdapterStore(small_disk)
    store.adapter("mine").save(FakeAdaptation(b"x" * 10_000), record, activate=True)
    before = listing(small_disk)
    with pytest.raises(StorageError, match="No space left on device"):
        store.adapter("mine").save(FakeAdaptation(b"x" * 40_000), record, activate=True)
    assert listing(small_disk) == before
    (small_disk / "filler").write_bytes(b"")
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "filler").write_bytes(b"x" * 100_000)
    store.adapter("mine").remove()
    assert store.names() == []


def test_a_read_only_disk_is_one_sentence_before_any_work(small_disk, record):
    store = AdapterStore(small_disk)
    store.adapter("mine").save(FakeAdaptation(b""), record, activate=True)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for name, out in (("mine", None), ("new", None), ("mine", small_disk / "out")):
        with pytest.raises(StorageError, match=r"Cannot save to .*: Read-only file system"):
            store.check_writable(name, out)
    with pytest.raises(StorageError, match=r"Cannot delete .*: Read-only file system\."):
        store.adapter("mine").remove()
    assert store.adapter("mine").open().version == 1


def test_files_that_could_not_be_deleted_are_named(store, record, monkeypatch):
    saved = store.adapter("mine").save(FakeAdaptation(), record, activate=True)

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
