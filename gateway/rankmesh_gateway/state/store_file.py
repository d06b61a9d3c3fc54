"""The jobs' stores in the file of a gateway's state."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator
from typing import Any

from rankmesh_agent.wire.errors import DistStoreError
from rankmesh_gateway.state.store_backend import Rows

TABLES = """
CREATE TABLE IF NOT EXISTS store (id TEXT, key BLOB, value BLOB NOT NULL, PRIMARY KEY (id, key)) WITHOUT ROWID;
"""


class SQLiteStores:
    """Backend of the jobs' stores: a table of an SQLite database, which one gateway has open.

    Args:
        database: the database, with TABLES.
        lock: held during each transaction: other threads use the database, too.
    """

    def __init__(self, database: sqlite3.Connection, lock: threading.RLock) -> None:
        self._database, self._lock = database, lock

    def load(self) -> dict[str, dict[bytes, bytes]]:
        """See StoreBackend."""
        stores: dict[str, dict[bytes, bytes]] = {}
        with transaction(self._database, self._lock) as execute:
            for store, key, value in execute("SELECT id, key, value FROM store"):
                stores.setdefault(store, {})[key] = value
        return stores

    def write(self, store: str, rows: Rows) -> None:
        """See StoreBackend."""
        with transaction(self._database, self._lock) as execute:
            for key, value in rows.items():
                if value is None:
                    execute("DELETE FROM store WHERE id = ? AND key = ?", (store, key))
                else:
                    execute("INSERT OR REPLACE INTO store VALUES (?, ?, ?)", (store, key, value))

    def remove(self, store: str) -> None:
        """See StoreBackend."""
        with transaction(self._database, self._lock) as execute:
            execute("DELETE FROM store WHERE id = ?", (store,))


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
