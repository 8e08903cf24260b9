"""Folders that this user may not list: said, and never taken for empty; and folders that only their owner may open."""

import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest
from command import run
from stored_adapter import RECORD, FakeAdaptation

from sebp_edge import AdapterRecord, AdapterStore
from sebp_edge.basics.files import make_private, walk
from sebp_edge.engine.models.catalog import resolve
from sebp_edge.engine.models.files_digest import files_digest
from sebp_edge.engine.models.local_models import find_local_models
from sebp_edge.errors import ModelError, StorageError
from sebp_edge.reading.readers import read_texts
from sebp_edge.store.new_folder import new_folder
from sebp_edge.values.model_reference import ModelReference

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has other rights")

NOT_LISTED = (0o000, 0o300)


@pytest.fixture
def place():
    """A folder, in a test as a user who is not root, since root may list everything."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    folder = Path(tempfile.mkdtemp())
    yield folder
    if is_root:
        os.seteuid(0)
    for name, folders, _ in os.walk(folder):
        for each in folders:
            Path(name, each).chmod(0o700)
    shutil.rmtree(folder)


class Locked(FakeAdaptation):
    """Writes files into a folder that cannot be listed then."""

    def save(self, folder):
        super().save(folder)
        (folder / "templates").chmod(0o300)


@pytest.mark.parametrize("mode", NOT_LISTED)
def test_a_version_is_archived_whole_or_not_at_all(place, mode):
    store = AdapterStore(place)
    saved = store.adapter("mine").save(FakeAdaptation(), AdapterRecord(**RECORD), activate=True)
    (saved.path / "templates").chmod(mode)
    with pytest.raises(StorageError, match=r"Cannot read the version in '.*/mine/1': Permission denied; nothing was"):
        store.adapter("mine").export_archive(place / "archive")
    assert not (place / "archive").exists()
    (saved.path / "templates").chmod(0o700)
    store.adapter("mine").export_archive(place / "archive")


def test_all_files_of_a_version_are_private_wherever_they_are(place):
    saved = AdapterStore(place).adapter("mine").save(Locked(), AdapterRecord(**RECORD), activate=True)
    for path in walk(saved.path):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert (saved.path / "templates" / "chat.jinja").read_bytes() == b"weights"


def test_all_files_of_an_export_are_private_wherever_they_are(place):
    with new_folder(place / "out", "Cannot write to") as temporary:
        (temporary / "inner").mkdir()
        (temporary / "inner" / "weights").write_bytes(b"")
        (temporary / "inner").chmod(0o300)
    for path in walk(place / "out"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("mode", NOT_LISTED)
def test_what_cannot_be_listed_is_no_garbage(place, mode):
    store = AdapterStore(place)
    versions = [store.adapter("mine").save(FakeAdaptation(), AdapterRecord(**RECORD), activate=True) for _ in range(5)]
    (versions[0].path / "templates").chmod(mode)
    left = store.folder / ".removed-1"
    (left / "inner").mkdir(parents=True)
    (left / "inner").chmod(mode)
    assert store.garbage(keep=1).versions == () and store.garbage(keep=1).leftovers == {}
    (versions[0].path / "templates").chmod(0o700)
    assert [one.version for one in store.garbage(keep=1).versions] == [1, 2, 3]


@pytest.mark.parametrize("mode", NOT_LISTED)
def test_a_folder_of_notes_is_left_out_with_the_reason(place, mode):
    (place / "notes" / "locked").mkdir(parents=True)
    (place / "notes" / "a.md").write_text("A note.")
    (place / "notes" / "locked" / "b.md").write_text("Another note.")
    (place / "notes" / "locked").chmod(mode)
    reading = read_texts(place / "notes")
    assert [(item.source, item.reason) for item in reading.left_out] == [
        ("locked/", "cannot be opened: Permission denied")
    ]


@pytest.mark.parametrize("mode", NOT_LISTED)
def test_models_that_cannot_be_listed_are_unlike_each_other(place, mode, monkeypatch):
    for name in ("first", "second"):
        (place / "models" / name).mkdir(parents=True)
        (place / "models" / name / "config.json").write_text(name)
    first, second = (ModelReference(name, "local", str(place / "models" / name)) for name in ("first", "second"))
    assert files_digest(first) != files_digest(second)
    for name in ("first", "second"):
        (place / "models" / name).chmod(mode)
    assert files_digest(first) is files_digest(second) is None
    # They are listed, and whoever opens them learns why they cannot be used.
    found = [str(place / "models" / name) for name in ("first", "second")]
    assert find_local_models([place / "models"])[-2:] == found
    monkeypatch.setenv("HF_HUB_CACHE", found[0])
    assert find_local_models() == found[:1]
    (place / "models" / "first").chmod(0)
    with pytest.raises(ModelError, match="first' cannot be opened: Permission denied"):
        resolve(place / "models" / "first")


def test_a_walk_raises_where_a_pattern_would_find_nothing(place):
    (place / "a" / "b").mkdir(parents=True)
    (place / "a" / "b" / "c").write_text("")
    (place / "link").symlink_to(place / "a")
    assert {str(path.relative_to(place)) for path in walk(place)} == {"a", "a/b", "a/b/c", "link"}
    (place / "a" / "b").chmod(0)
    with pytest.raises(PermissionError):
        list(walk(place))
    with pytest.raises(FileNotFoundError):
        list(walk(place / "nothing"))


# ----------------------------------------------------------------------------------------------------- private folders


@pytest.mark.slow
def test_whatever_is_made_for_adapters_is_private(adapt, own_home):
    """With the usual umask, and from the data and the cache folder on, which are made here."""
    before = os.umask(0o022)
    try:
        assert run(*adapt).exit_code == 0
    finally:
        os.umask(before)
    found = [path for name in ("data", "cache") for path in (own_home / name, *(own_home / name).rglob("*"))]
    assert {"sebp-edge", "where.json", "adapter_model.safetensors", ".lock"} <= {path.name for path in found}
    assert any(path.name.startswith("probes-") for path in found)
    for path in found:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_folders_that_exist_stay_as_they_are(tmp_path):
    (tmp_path / "shared").mkdir(mode=0o755)
    (tmp_path / "shared").chmod(0o755)
    make_private(tmp_path / "shared" / "new" / "inner")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("shared", "shared/new", "shared/new/inner")]
    assert modes == [0o755, 0o700, 0o700]
    make_private(tmp_path / "shared" / "new" / "inner")
