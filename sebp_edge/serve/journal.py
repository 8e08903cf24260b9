"""The journal: jobs and their numbered events, in SQLite, so that an app that died finds both again.

It holds no text, question, answer, or name of a file, document or folder: `kept` lets through what is listed below.
While a supervisor has it open, no other one can: the lock is the journal's own, and ends with the process.
"""

import json
import os
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from itertools import count
from pathlib import Path

from sebp_edge.basics.files import make_private, storage_errors
from sebp_edge.errors import StorageError
from sebp_edge.serve.messages import Refusal

FILE = "serve.sqlite"
# SQLite's own files beside it.
_ENDINGS = ("", "-wal", "-shm", "-journal")
_FORMAT = 1
# Of the oldest jobs that have ended, the events go.
MAX_JOBS = 200
# Texts under these names are words of this program, or names that the owner gave to adapters.
_TEXTS = frozenset(
    {"event", "phase", "stage", "split", "part", "method", "dtype", "device", "state", "kind", "code", "error"}
    | {"recipe", "name", "job", "id", "stored", "waits_for"}
)
# Until there is space again, so many statements wait in memory.
_MAX_UNWRITTEN = 10_000
_DAMAGED = frozenset({sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_BAD_RECORD = "SELECT 1 FROM events WHERE NOT json_valid(record) OR json_extract(record, '$.number') IS NOT number"
_JOB = "INSERT INTO jobs (id, digest, facts) VALUES (?1, ?2, ?3) ON CONFLICT (id) DO UPDATE SET facts = ?3"
_EVENT = "INSERT INTO events VALUES (?, ?, ?)"
_LAYOUT = """
    CREATE TABLE IF NOT EXISTS jobs (number INTEGER PRIMARY KEY, id TEXT UNIQUE, digest BLOB, facts TEXT);
    CREATE TABLE IF NOT EXISTS events (job TEXT, number INTEGER, record TEXT, PRIMARY KEY (job, number)) WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS secret (value BLOB);
"""


def kept(record: dict) -> dict:
    """Returns what the journal keeps of a message: numbers, and texts that are this program's words."""
    values = {}
    for key, value in record.items():
        if isinstance(value, dict):
            values[key] = kept(value)
        elif isinstance(value, bool | int | float | None) or (isinstance(value, str) and key in _TEXTS):
            values[key] = value
    return values


class Damaged(Exception):
    """The journal cannot be read, and never will be."""


def set_aside(folder: Path) -> StorageError:
    """Renames a damaged journal; returns what is to be told of it."""
    names = (f"{FILE}.damaged{(number and -number) or ''}" for number in count(0) if number != 1)
    name = next(name for name in names if not os.path.lexists(folder / name))
    with storage_errors("Cannot rename the damaged journal in", folder, "; delete it"):
        for ending in _ENDINGS:
            with suppress(FileNotFoundError):
                (folder / f"{FILE}{ending}").rename(folder / f"{name}{ending}")
    problem = StorageError(
        f"The journal was damaged, and is kept as {str(folder / name)!r}: earlier jobs are not listed."
    )
    problem.hint = "Nothing is lost of adapters; `sebp-edge jobs` lists trainings that can go on."
    return problem


class Journal:
    """The journal in a store's folder. Nothing that is written raises an error: see `commit`.

    Attributes:
        problem: why the last commit failed, for example because the disk is full; None if it did not.
    """

    def __init__(self, folder: Path):
        path = folder / FILE
        with storage_errors("Cannot open the journal", path, ""):
            make_private(folder)
            if any((folder / f"{FILE}{ending}").is_symlink() for ending in _ENDINGS):
                raise StorageError(f"The journal {str(path)!r} is a link, which is not followed; delete the link.")
            if path.exists() and not path.is_file():
                raise Damaged("it is no file")
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600))
        self._database = sqlite3.connect(path, timeout=0, check_same_thread=False)
        self._database.text_factory = lambda text: text.decode(errors="replace")
        try:
            self._open()
        except (sqlite3.Error, UnicodeDecodeError, Damaged, StorageError) as error:
            self._database.close()
            if isinstance(error, StorageError):
                raise
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
            if code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise Refusal(
                    "store_in_use",
                    "Another server has this store.",
                    "Ask the app that started it, end that, or choose another store.",
                    retry=True,
                ) from None
            # The file could be opened for writing: what makes the database read-only is in it.
            if code & 0xFF in _DAMAGED or code == sqlite3.SQLITE_READONLY:
                raise Damaged(str(error)) from error
            raise StorageError(f"The journal {str(path)!r} cannot be opened: {error}.") from error
        # By what they are about, statements with their values, in order.
        self._unwritten: dict[tuple, tuple[str, tuple]] = {}
        self._has_deleted = False
        self.problem: StorageError | None = None

    def _open(self) -> None:
        """Takes the lock, and checks everything."""
        # Exclusive: the lock is taken with the first access, and kept.
        self._database.executescript("PRAGMA locking_mode=EXCLUSIVE; PRAGMA journal_mode=WAL; PRAGMA secure_delete=ON;")
        if self._one("PRAGMA quick_check(1)") != "ok":
            raise Damaged("its pages are damaged")
        if self._one("PRAGMA user_version") > _FORMAT:
            raise StorageError("A newer sebp-edge wrote the journal of this store; update, or choose another store.")
        self._database.execute("PRAGMA synchronous=NORMAL")
        self._database.executescript(f"BEGIN IMMEDIATE; {_LAYOUT} PRAGMA user_version={_FORMAT}; COMMIT;")
        self._secret = self._one("SELECT value FROM secret")
        if self._secret is None:
            self._secret = secrets.token_bytes(16)
            self._database.execute("INSERT INTO secret VALUES (?)", (self._secret,))
            self._database.commit()
        if not isinstance(self._secret, bytes) or self._one(_BAD_RECORD):
            raise Damaged("its records are damaged")

    def _one(self, query: str):
        row = self._database.execute(query).fetchone()
        return row and row[0]

    def digest(self, request: dict) -> bytes:
        """Returns what tells a request from another one; without the journal's secret, it says nothing of either."""
        return blake2b(json.dumps(request, sort_keys=True).encode(), key=self._secret, digest_size=16).digest()

    def jobs(self) -> Iterator[tuple[bytes, dict]]:
        """Yields the digest and the facts of each job, oldest first; raises a ValueError if they are damaged."""
        for digest, facts in self._database.execute("SELECT digest, facts FROM jobs ORDER BY number"):
            yield digest, json.loads(facts)

    def write_job(self, id: str, digest: bytes, facts: dict) -> None:
        """Writes what is known of a job, with the next commit."""
        self._unwritten[id, "facts"] = _JOB, (id, digest, json.dumps(kept(facts)))

    def write_event(self, job: str, number: int, record: dict) -> None:
        """Writes an event of a job, with the next commit."""
        self._unwritten[job, number] = _EVENT, (job, number, json.dumps(kept(record)))

    def events(self, job: str, since: int, limit: int) -> list[dict]:
        """Returns the next events of a job after the number `since`, also those that wait for a commit."""
        rows = self._database.execute(
            "SELECT record FROM events WHERE job = ? AND number > ? ORDER BY number LIMIT ?", (job, since, limit)
        )
        waiting = (values for statement, values in self._unwritten.values() if statement == _EVENT)
        records = [record for (record,) in rows]
        records += [record for id, number, record in waiting if id == job and number > since]
        return [json.loads(record) for record in records[:limit]]

    def last_number(self, job: str) -> int:
        """Returns the number of a job's last event; 0 if it has none."""
        return self._database.execute("SELECT max(number) FROM events WHERE job = ?", (job,)).fetchone()[0] or 0

    def forget(self, job: str) -> None:
        """Deletes a job and its events with the next commit, also from the file's free pages."""
        self._unwritten = {about: one for about, one in self._unwritten.items() if about[0] != job}
        self._unwritten[job, "no events"] = "DELETE FROM events WHERE job = ?", (job,)
        self._unwritten[job, "no facts"] = "DELETE FROM jobs WHERE id = ?", (job,)
        self._has_deleted = True

    @property
    def is_behind(self) -> bool:
        """Whether it waits for space, and has so much to write that it takes what matters only."""
        return self.problem is not None and len(self._unwritten) > _MAX_UNWRITTEN

    def commit(self) -> None:
        """Makes what was written outlive this process; `problem` says why it cannot, and the next call tries again."""
        if not (self._unwritten or self._has_deleted):
            return
        try:
            with self._database:
                for statement, values in self._unwritten.values():
                    self._database.execute(statement, values)
            self._unwritten = {}
            if self._has_deleted:
                self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._has_deleted, self.problem = False, None
        except sqlite3.Error as error:
            self.problem = StorageError(f"The journal cannot be written: {error}. It is written once that is possible.")

    def close(self) -> None:
        """Commits, and lets others open it."""
        self.commit()
        with suppress(sqlite3.Error):
            self._database.close()
