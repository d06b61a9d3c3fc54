"""The jobs' stores in the file of a gateway's state: a change is acknowledged once it is there."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rankmesh_agent.store import codec
from rankmesh_agent.store.replies import MAX_REPLIES, RETENTION_SECONDS, RequestId
from rankmesh_agent.store.table import Changes, Table
from rankmesh_agent.wire.errors import DistStoreError

TABLES = """
CREATE TABLE IF NOT EXISTS store (id TEXT PRIMARY KEY, job TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS value (store TEXT, key BLOB, value BLOB NOT NULL, PRIMARY KEY (store, key)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS queued (
    store TEXT, key BLOB, number INTEGER, value BLOB NOT NULL, PRIMARY KEY (store, key, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS reply (
    name BLOB PRIMARY KEY, store TEXT NOT NULL, number INTEGER NOT NULL, frame BLOB NOT NULL, at REAL NOT NULL
) WITHOUT ROWID;
"""


class SQLiteStores:
    """The stores in an SQLite database.

    Args:
        database: the database, with TABLES.
        lock: held during each transaction: other threads use the database, too.
    """

    def __init__(self, database: sqlite3.Connection, lock: threading.RLock) -> None:
        self._database, self._lock = database, lock

    def stores(self) -> dict[str, str]:
        """Return the jobs, by the ids of their stores."""
        with self._lock:
            return dict(self._database.execute("SELECT id, job FROM store"))

    def open(self, store: str, job: str, table: Table) -> SQLiteLog:
        """Fill an empty table with what the database has of a store, and return the log of its changes."""
        with self._lock:
            self._database.execute("INSERT OR IGNORE INTO store VALUES (?, ?)", (store, job))
            values = self._database.execute("SELECT key, value FROM value WHERE store = ?", (store,))
            found = {key.decode(): value for key, value in values}
            queues: dict[str, list[bytes]] = {}
            rows = self._database.execute(
                "SELECT key, value FROM queued WHERE store = ? ORDER BY key, number", (store,)
            )
            for key, value in rows:
                queues.setdefault(key.decode(), []).append(value)
            table.fill(found, queues)
        return SQLiteLog(self._database, self._lock, store)

    def remove(self, store: str) -> None:
        """Remove a store."""
        with transaction(self._database, self._lock) as execute:
            for name in ("value", "queued", "reply"):
                execute(f"DELETE FROM {name} WHERE store = ?", (store,))
            execute("DELETE FROM store WHERE id = ?", (store,))


class SQLiteLog:
    """Log of one table's changes: each is a transaction, with the reply to the request that makes it.

    Args:
        database, lock: see SQLiteStores.
        store: id of the store.

    Attributes:
        request_id: see TableLog.
    """

    def __init__(self, database: sqlite3.Connection, lock: threading.RLock, store: str) -> None:
        self.request_id: RequestId | None = None
        self._database, self._lock, self._store = database, lock, store
        self._replies = 0

    def changed(self, changes: Changes, result: Any) -> None:
        """See TableLog."""
        store = self._store
        with transaction(self._database, self._lock) as execute:
            for key, value in changes.items():
                if value is None:
                    execute("DELETE FROM value WHERE store = ? AND key = ?", (store, key.encode()))
                else:
                    execute("INSERT OR REPLACE INTO value VALUES (?, ?, ?)", (store, key.encode(), value))
            self._keep_reply(execute, self.request_id, result)

    def pushed(self, key: str, value: bytes, *, first: bool) -> None:
        """See TableLog."""
        place = "min(number), 0) - 1" if first else "max(number), 0) + 1"
        arguments = (self._store, key.encode())
        with transaction(self._database, self._lock) as execute:
            execute(
                f"INSERT INTO queued SELECT ?, ?, coalesce({place}, ? FROM queued WHERE store = ? AND key = ?",
                (*arguments, value, *arguments),
            )
            if first and self.request_id is not None:
                execute("DELETE FROM reply WHERE name = ?", (self.request_id.name,))
            else:
                self._keep_reply(execute, self.request_id, None)

    def popped(self, key: str, value: bytes, request_id: RequestId | None) -> None:
        """See TableLog."""
        arguments = (self._store, key.encode())
        with transaction(self._database, self._lock) as execute:
            execute(
                "DELETE FROM queued WHERE store = ? AND key = ? AND number = "
                "(SELECT min(number) FROM queued WHERE store = ? AND key = ?)",
                (*arguments, *arguments),
            )
            self._keep_reply(execute, request_id, value)

    def handed_over(self, value: bytes, request_id: RequestId | None) -> None:
        """See TableLog."""
        with transaction(self._database, self._lock) as execute:
            self._keep_reply(execute, self.request_id, None)
            self._keep_reply(execute, request_id, value)

    def reply(self, request_id: RequestId) -> tuple[int, bytes] | None:
        """See TableLog."""
        with self._lock:
            found: tuple[int, bytes] | None = self._database.execute(
                "SELECT number, frame FROM reply WHERE name = ?", (request_id.name,)
            ).fetchone()
        return found

    def _keep_reply(self, execute: Callable[..., Any], request_id: RequestId | None, result: Any) -> None:
        if request_id is None:
            return
        frame = codec.encode_result(0, result)
        arguments = (request_id.name, self._store, request_id.number, frame, time.time())
        execute("INSERT OR REPLACE INTO reply VALUES (?, ?, ?, ?, ?)", arguments)
        self._replies += 1
        if self._replies > MAX_REPLIES:
            self._replies = 0
            execute("DELETE FROM reply WHERE at < ?", (time.time() - RETENTION_SECONDS,))


@contextlib.contextmanager
def transaction(database: sqlite3.Connection, lock: threading.RLock) -> Iterator[Callable[..., Any]]:
    """Run one transaction; yields the function that executes statements.

    Raises:
        DistStoreError: the database cannot be written; nothing has changed.
    """
    with lock:
        try:
            database.execute("BEGIN")
            yield database.execute
            database.execute("COMMIT")
        except sqlite3.Error as error:
            raise DistStoreError(
                f"the gateway cannot write the file of its state, so nothing has changed: {error}"
            ) from error
        finally:
            if database.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    database.execute("ROLLBACK")
