"""File of a gateway's events, jobs and their stores, which outlives it: an SQLite database.

After SIGKILL the events and jobs in it are at most a moment old, and the stores have all that was acknowledged. After a
loss of power the file is whole, and may lack the last seconds. Joins that wait are not in it: their processes repeat
them.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast, get_args

from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.errors import DistStoreError
from rankmesh_gateway.state.event_log import KEPT_EVENTS, Event, EventKind
from rankmesh_gateway.state.registry import Registry
from rankmesh_gateway.state.saved import SavedEpoch
from rankmesh_gateway.state.store_backend import Rows

_FORMAT, _WITHOUT_STORES = 2, 1
"""Numbers of the layout, the file's ``user_version``: today's, and that of version 0.2."""
_APPLICATION = 0x524D6773
_TABLES = """
CREATE TABLE IF NOT EXISTS event (id INTEGER PRIMARY KEY, kind TEXT NOT NULL, data TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS epoch (
    job TEXT, number INTEGER, data TEXT NOT NULL, PRIMARY KEY (job, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS store (id TEXT, key BLOB, value BLOB NOT NULL, PRIMARY KEY (id, key)) WITHOUT ROWID;
"""
_EPOCHS = "SELECT data FROM epoch"
_PAUSE_SECONDS = 0.05
"""Minimum time between two transactions: a burst of events is one."""
_CLOSE_SECONDS = 5.0

_log = logging.getLogger("rankmesh.gateway")


class RegistryFileError(Exception):
    """The file cannot be opened, is in use by another gateway, or is none of a gateway's; the message says which."""


class RegistryFile:
    """The file, while this process has it: no other gateway can open it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.RLock()
        self._changed = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._warned = False
        try:
            self._database = sqlite3.connect(path, timeout=1.0, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise RegistryFileError(f"cannot open the state file {path}: {error}") from None
        try:
            self._prepare()
        except (sqlite3.Error, ValueError) as error:  # UnicodeDecodeError: of a damaged name
            self._database.close()
            busy = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_BUSY
            reason = "another gateway uses it; give each gateway its own" if busy else error
            raise RegistryFileError(f"cannot use the state file {path}: {reason}") from None
        except BaseException:
            self._database.close()
            raise
        self.stores = SQLiteStores(self._database, self._lock)

    def load(self, registry: Registry) -> None:
        """Add the file's jobs and events to a registry that has none."""
        try:
            rows = self._database.execute("SELECT id, kind, data FROM event ORDER BY id").fetchall()
            epochs = [json_text.read(SavedEpoch, data.encode()) for (data,) in self._database.execute(_EPOCHS)]
            known = get_args(EventKind)
            events = [Event(id, cast(EventKind, kind), data) for id, kind, data in rows if kind in known]
            registry.events.restore(events)
            registry.restore(epochs)
        except Exception as error:  # any: its rows may hold anything
            raise RegistryFileError(f"the state file {self._path} is damaged: {error}; move it away") from None

    def follow(self, registry: Registry) -> None:
        """Write what changes in a registry from now on, in a thread, until ``close``."""
        self._thread = threading.Thread(target=self._follow, args=(registry,), name="rankmesh-state-file", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write the rest and close the file. After ``Registry.close``."""
        self._closing = True
        self._changed.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
        if self._thread is None or not self._thread.is_alive():
            self._database.close()

    def _prepare(self) -> None:
        """Lock the file, check its format, and make its tables in an empty one."""
        execute = self._database.execute
        execute("PRAGMA locking_mode = EXCLUSIVE")
        execute("BEGIN EXCLUSIVE")
        (tables,) = execute("SELECT count(*) FROM sqlite_master").fetchone()
        (application,), (version,) = (
            execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")
        )
        if tables and (application != _APPLICATION or version not in (_FORMAT, _WITHOUT_STORES)):
            what = f"has format {version}, this gateway's is {_FORMAT}" if application == _APPLICATION else "is not one"
            raise RegistryFileError(f"cannot use the state file {self._path}: it {what}; move it away")
        if not tables or version == _WITHOUT_STORES:
            for statement in filter(str.strip, _TABLES.split(";")):
                execute(statement)
            execute(f"PRAGMA application_id = {_APPLICATION}")
            execute(f"PRAGMA user_version = {_FORMAT}")
        execute("COMMIT")
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = NORMAL")  # no fsync at each transaction: it takes longer than all the rest

    def _follow(self, registry: Registry) -> None:
        position = 0
        with registry.events.subscribe(self._changed.set):
            while True:
                closing = self._closing
                self._changed.clear()
                with contextlib.suppress(Exception):  # logged
                    position = self._write(registry, position, everything=closing)
                if closing:
                    return
                self._changed.wait()
                time.sleep(_PAUSE_SECONDS)

    def _write(self, registry: Registry, position: int, *, everything: bool) -> int:
        """Write the events behind a position, and the jobs that they are of; return the position behind them."""
        try:
            events = registry.events.since(position)
            touched = None if everything or not position else {event.job for event in events}
            names, epochs = registry.saved(touched)
            rows = [(job, each.number, json_text.encode(each).decode()) for job, all in epochs.items() for each in all]
            with transaction(self._database, self._lock) as execute:
                many = self._database.executemany
                many("INSERT OR REPLACE INTO event VALUES (?, ?, ?)", [event[:3] for event in events])
                oldest = "SELECT id FROM event ORDER BY id DESC LIMIT ?"
                execute(f"DELETE FROM event WHERE id NOT IN ({oldest})", (KEPT_EVENTS,))
                gone = {name for (name,) in execute("SELECT DISTINCT job FROM epoch")} - names
                many("DELETE FROM epoch WHERE job = ?", [(job,) for job in {*gone, *epochs}])
                many("INSERT INTO epoch VALUES (?, ?, ?)", rows)
        except Exception as error:
            if not self._warned:
                self._warned = True
                _log.warning("the state file %s cannot be written, tried again at each change: %s", self._path, error)
            raise
        self._warned = False
        return events[-1].id if events else position


class SQLiteStores:
    """Backend of the jobs' stores: a table of an SQLite database of one gateway, whose threads share it by the lock."""

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
    """Run one transaction; yields the function that executes statements."""
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
