"""The journal of jobs: damaged, it is set aside; a link, or one of a newer sebp-edge, is refused and left."""

import contextlib
import random
import shutil
import sqlite3

from served import Server, refused

from sebp_edge import AdapterStore
from sebp_edge.serve.journal import FILE, Journal
from sebp_edge.serve.served_jobs import ServedJobs

PROTOCOL = 1


def damages(content):
    """Yields what may stand in the journal's place, with a name for each."""
    yield "random bytes", random.randbytes(5000)
    yield "cut in half", content[: len(content) // 2]
    yield "cut within the first page", content[:1000]
    for at in (0, 18, 30, 47, 105, 4100):
        yield f"byte {at} changed", content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]
    for old, new in (
        (b'{"id": "a"', b'{"id": "a'),
        (b'"kind": "adapt"', b'"kind":     [1]'),
        (b'{"job": "a", "number": 1', b'["job", "a", "number", 1'),
        (b'"number": 1', b'"number": 7'),
        (b'"state": "done"', b'"state": "do\xff\x00"'),
    ):
        yield f"{new} in it", content.replace(old, new.ljust(len(old)))
    yield "a folder", None


def test_a_damaged_journal_is_set_aside(tmp_path):
    """Whatever its damage; what was set aside before stays, and what SQLite keeps beside it goes with it."""
    journal = Journal(tmp_path)
    journal.write_job("a", b"x" * 16, {"id": "a", "kind": "adapt", "name": None, "state": "done", "created": 1.5})
    for number in range(1, 60):
        journal.write_event("a", number, {"job": "a", "number": number, "event": {"event": "step", "loss": 2.5}})
    journal.commit()
    journal.close()
    file = tmp_path / FILE
    jobs = ServedJobs.open(tmp_path, AdapterStore(tmp_path).jobs)
    assert ([job.id for job in jobs.all()], jobs.damage) == (["a"], None)
    jobs.journal.close()
    kept = [f"{FILE}.damaged", *(f"{FILE}.damaged-{number}" for number in range(2, 100))]
    for (what, content), name in zip(damages(file.read_bytes()), kept, strict=False):
        shutil.rmtree(file, ignore_errors=True) if content is None else file.write_bytes(content)
        (tmp_path / f"{FILE}-wal").write_bytes(b"not of a new journal")
        if content is None:
            file.unlink()
            (file / "own").mkdir(parents=True)
        jobs = ServedJobs.open(tmp_path, AdapterStore(tmp_path).jobs)
        assert jobs.damage is not None, what
        assert repr(str(tmp_path / name)) in str(jobs.damage) and jobs.all() == [], what
        jobs.journal.close()
        assert (
            (tmp_path / name / "own").is_dir()
            if content is None
            else (tmp_path / name).read_bytes()[4097:] == content[4097:]
        ), what
        jobs = ServedJobs.open(tmp_path, AdapterStore(tmp_path).jobs)
        assert jobs.damage is None, what
        jobs.journal.close()


def test_with_a_damaged_journal_a_server_works_and_says_so(tmp_path):
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / FILE).write_bytes(random.randbytes(5000))
    with Server(warm=True) as server:
        server.initialize(store=str(tmp_path))
        problem = server.call("status")["problem"]
        assert problem["code"] == "storage" and "sebp-edge jobs" in problem["hint"]
        assert "serve.sqlite.damaged" in problem["message"]
        assert server.call("jobs.list") == {"jobs": []} and server.call("adapters.list")["adapters"] == []
        server.call("jobs.start", id="first", params={"texts": ["The ferry."]})
        with Server(warm=True) as other:
            assert refused(other, "initialize", protocol=PROTOCOL, store=str(tmp_path)).code == "store_in_use"


def test_a_journal_that_is_a_link_or_newer_is_refused_and_left(tmp_path):
    folder = tmp_path / "adapters"
    folder.mkdir()
    file = folder / FILE
    with Server(warm=True) as server:
        for target in (tmp_path / "nowhere", tmp_path / "other"):
            file.symlink_to(target)
            error = refused(server, "initialize", protocol=PROTOCOL, store=str(tmp_path))
            assert error.code == "storage" and "is a link" in str(error)
            assert file.is_symlink() and not (tmp_path / "nowhere").exists()
            file.unlink()
            (tmp_path / "other").touch()
        Journal(folder).close()
        with contextlib.closing(sqlite3.connect(file)) as journal:
            journal.execute("PRAGMA user_version=99")
        before = file.read_bytes()
        error = refused(server, "initialize", protocol=PROTOCOL, store=str(tmp_path))
        assert error.code == "storage" and "A newer sebp-edge wrote" in str(error)
        assert file.read_bytes() == before and [path.name for path in folder.iterdir()] == [FILE]
