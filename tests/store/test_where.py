"""Where versions were made is remembered beside them, and nowhere else."""

import errno
import os
import stat

import pytest
from stored_adapter import HERE, NOWHERE, save, visible

from sebp_edge import AdapterStore


def where_file(store):
    return store.folder / "mine" / "where.json"


def test_where_a_version_was_made_is_remembered_beside_it_and_moves_nowhere(store, tmp_path):
    first = save(store, where=HERE)
    second = save(store, where=NOWHERE)
    save(store)
    assert store.adapter("mine").wheres() == {1: HERE, 2: NOWHERE}
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


def test_where_a_version_was_made_goes_with_it(store):
    for _ in range(6):
        save(store, where=HERE)
    store.adapter("mine").remove(2)
    assert store.adapter("mine").wheres().keys() == {1, 3, 4, 5, 6}
    store.adapter("mine").erase([3], {}, {})
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
def test_a_damaged_memory_of_where_versions_were_made_is_none(store, damage):
    save(store, where=HERE)
    damage(where_file(store))
    assert store.adapter("mine").wheres() == {}
    save(store, where=HERE)
    assert store.adapter("mine").wheres() == {2: HERE}


def test_a_full_disk_loses_at_most_where_a_version_was_made(store, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    first = save(store, where=HERE)
    with monkeypatch.context() as patch:
        patch.setattr("sebp_edge.store.where.write_atomically", full)
        assert save(store, where=HERE).active
        store.adapter(first.name).remember_where(first.version, NOWHERE)
        assert store.adapter("mine").wheres() == {1: HERE}
        store.adapter("mine").remove(1)
    # What was removed is not remembered, whatever it costs.
    assert store.adapter("mine").versions() == [2] and not where_file(store).exists()
