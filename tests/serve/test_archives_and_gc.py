"""Methods that write, read back and delete versions of adapters, as the command does."""

import shutil

import pytest
from served import Server, refused

from sebp_edge import AdapterStore


@pytest.fixture
def server(tmp_path, store_of_notes):
    shutil.copytree(store_of_notes.folder, tmp_path / "store" / "adapters")
    (tmp_path / "own").mkdir()
    with Server() as server:
        server.initialize(store=str(tmp_path / "store"), folders=[str(tmp_path / "own")])
        yield server


@pytest.mark.slow
def test_a_version_is_written_to_a_file_and_read_back_under_another_name(server, tmp_path, store_of_notes):
    file = str(tmp_path / "own" / "notes.zip")
    written = server.call("adapters.export", name="default", to=file)
    assert (written["name"], written["version"], written["active"]) == ("default", 1, True)
    read = server.call("adapters.import", file=file, name="other")
    assert (read["name"], read["version"], read["active"]) == ("other", 1, False)
    same = {"name", "active", "adapter_path"}
    assert all(read[key] == value for key, value in written.items() if key not in same)
    (shown,) = server.call("adapters.history", name="other")["versions"]
    assert shown == read
    weights = AdapterStore(tmp_path / "store").adapter("other").open(1).weights_hash()
    assert weights == store_of_notes.adapter("default").open(1).weights_hash()
    assert {each["name"] for each in server.call("adapters.documents", name="other", version=1)["documents"]} == {None}
    server.call("adapters.export", name="default", to=f"{file}2", names=True)
    server.call("adapters.import", file=f"{file}2", name="named")
    assert {each["name"] for each in server.call("adapters.documents", name="named", version=1)["documents"]} != {None}


def test_what_is_no_archive_is_in_the_way_or_outside_is_refused_and_nothing_is_changed(server, tmp_path):
    own = tmp_path / "own"
    (own / "damaged.zip").write_bytes(b"PK" * 1000)
    (own / "link.zip").symlink_to("/etc/passwd")
    for method, params, code in (
        ("export", {"name": "nobody", "to": f"{own}/a"}, "adapter"),
        ("export", {"name": "default", "version": 9, "to": f"{own}/a"}, "adapter"),
        ("export", {"name": "default", "to": f"{own}/damaged.zip"}, "invalid_option"),
        ("export", {"name": "default", "to": f"{own}/none/a"}, "storage"),
        ("export", {"name": "default", "to": "/etc/a"}, "folder_not_allowed"),
        ("export", {"name": "default", "to": f"{own}/link.zip"}, "folder_not_allowed"),
        ("export", {"name": "default", "to": "a"}, "invalid_params"),
        ("import", {"file": f"{own}/damaged.zip"}, "adapter"),
        ("import", {"file": f"{own}/none"}, "adapter"),
        ("import", {"file": f"{own}/link.zip"}, "folder_not_allowed"),
        ("import", {"file": "/etc/passwd"}, "folder_not_allowed"),
        ("import", {"file": f"{own}/damaged.zip", "name": ""}, "invalid_params"),
        ("gc", {"keep": 0}, "invalid_option"),
        ("gc", {"keep": 2**60}, "invalid_params"),
        ("gc", {"delete": "yes"}, "invalid_params"),
    ):
        assert refused(server, f"adapters.{method}", **params).code == code, (method, params)
    assert server.call("adapters.list")["adapters"][0]["versions"] == [1]
    assert sorted(path.name for path in own.iterdir()) == ["damaged.zip", "link.zip"]


@pytest.mark.slow
def test_what_is_of_no_use_is_named_and_deleted_only_if_that_is_asked_for(server, tmp_path):
    file = str(tmp_path / "own" / "notes.zip")
    server.call("adapters.export", name="default", to=file)
    for _ in range(4):
        server.call("adapters.import", file=file)
    named = server.call("adapters.gc", keep=1)
    old = [each["version"] for each in named["versions"]]
    assert old == [2, 3, 4] and named["size"] > 1000  # 1 is active, 5 is the newest
    assert server.call("adapters.list")["adapters"][0]["versions"] == [1, 2, 3, 4, 5]
    assert server.call("adapters.gc", keep=1, delete=True) == named
    assert server.call("adapters.list")["adapters"][0]["versions"] == [1, 5]
    assert server.call("adapters.gc", keep=1, delete=True)["versions"] == []
