"""The journal: jobs and their numbered events, in SQLite, so that an app that died finds both again.

It holds no text, question, answer, or name of a file, document or folder: `kept` lets through what is listed below.
While a supervisor has it open, no other one can: the lock is the journal's own, and ends with the process.
"""

import json
import os
import secrets
import sqlite3
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from sebp_edge.basics.files import make_private
from sebp_edge.errors import StorageError
from sebp_edge.serve.messages import Refusal

FILE = "serve.sqlite"
_FORMAT = 1
# Of the oldest jobs that have ended, the events go.
MAX_JOBS = 200
# Texts under these names are words of this program, or names that the owner gave to adapters.
_TEXTS = frozenset(
    {"event", "phase", "stage", "split", "part", "method", "dtype", "device", "state", "kind", "code", "error"}
    | {"merge_for", "recipe", "name", "job", "id", "stored", "waits_for"}
)
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


class Journal:
    """The journal in a store's folder.

    Raises:
        Refusal: another supervisor has it.
        StorageError: it cannot be opened, is damaged, or a newer sebp-edge wrote it.
    """

    def __init__(self, folder: Path):
        path = folder / FILE
        try:
            make_private(folder)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._database = sqlite3.connect(path, timeout=0, check_same_thread=False)
            # Exclusive: the lock is taken with the first access, and kept.
            self._database.executescript("PRAGMA locking_mode=EXCLUSIVE; PRAGMA journal_mode=WAL;")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.executescript(f"BEGIN IMMEDIATE; {_LAYOUT} COMMIT;")
            (found,) = self._database.execute("PRAGMA user_version").fetchone()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise Refusal(
                    "store_in_use",
                    "Another server has this store.",
                    "Ask the app that started it, end that, or choose another store.",
                    retry=True,
                ) from None
            raise StorageError(f"The journal {str(path)!r} cannot be opened: {error}.") from error
        except (OSError, sqlite3.DatabaseError) as error:
            raise StorageError(f"The journal {str(path)!r} is damaged or not accessible; delete it.") from error
        if found > _FORMAT:
            raise StorageError(f"A newer sebp-edge wrote the journal {str(path)!r}; update, or choose another store.")
        self._database.execute(f"PRAGMA user_version={_FORMAT}")
        self._secret = self._read_secret()

    def _read_secret(self) -> bytes:
        row = self._database.execute("SELECT value FROM secret").fetchone()
        if row is None:
            row = (secrets.token_bytes(16),)
            self._database.execute("INSERT INTO secret VALUES (?)", row)
            self._database.commit()
        return row[0]

    def digest(self, request: dict) -> bytes:
        """Returns what tells a request from another one; without the journal's secret, it says nothing of either."""
        return blake2b(json.dumps(request, sort_keys=True).encode(), key=self._secret, digest_size=16).digest()

    def jobs(self) -> Iterator[tuple[bytes, dict]]:
        """Yields the digest and the facts of each job, oldest first."""
        for digest, facts in self._database.execute("SELECT digest, facts FROM jobs ORDER BY number"):
            yield digest, json.loads(facts)

    def write_job(self, id: str, digest: bytes, facts: dict) -> None:
        """Writes what is known of a job."""
        self._database.execute(
            "INSERT INTO jobs (id, digest, facts) VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE SET facts = ?3",
            (id, digest, json.dumps(kept(facts))),
        )

    def write_event(self, job: str, number: int, record: dict) -> None:
        """Writes an event of a job."""
        self._database.execute("INSERT INTO events VALUES (?, ?, ?)", (job, number, json.dumps(kept(record))))

    def events(self, job: str, since: int, limit: int) -> list[dict]:
        """Returns the next events of a job after the number `since`."""
        rows = self._database.execute(
            "SELECT record FROM events WHERE job = ? AND number > ? ORDER BY number LIMIT ?", (job, since, limit)
        )
        return [json.loads(record) for (record,) in rows]

    def last_number(self, job: str) -> int:
        """Returns the number of a job's last event; 0 if it has none."""
        return self._database.execute("SELECT max(number) FROM events WHERE job = ?", (job,)).fetchone()[0] or 0

    def forget(self, job: str) -> None:
        """Deletes a job and its events, also from the file's free pages."""
        self._database.execute("PRAGMA secure_delete=ON")
        self._database.execute("DELETE FROM events WHERE job = ?", (job,))
        self._database.execute("DELETE FROM jobs WHERE id = ?", (job,))
        self.commit()
        self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def commit(self) -> None:
        """Makes what was written outlive this process."""
        self._database.commit()

    def close(self) -> None:
        """Commits, and lets others open it."""
        self._database.commit()
        self._database.close()
