"""Keys and values in an SQLite file that several processes use; the file of a FileStore and of ``file://``."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.descriptors import reason
from rankmesh_agent.net.fork import reset_lock
from rankmesh_agent.store.table import Changes, Table, Values
from rankmesh_agent.wire.errors import DistStoreError, StoreTimeoutError

_LOCK_SECONDS = 60.0
"""Time limit for the file's lock: each operation holds it for microseconds."""
_LEAVE_SECONDS = 2.0
_PAUSE_SECONDS = 0.001
_APPLICATION_ID = 0x524D6B76
_SCHEMA = (
    "CREATE TABLE kv (key TEXT PRIMARY KEY, value BLOB NOT NULL)",
    "CREATE TABLE users (now INTEGER NOT NULL, left INTEGER NOT NULL)",
    "INSERT INTO users VALUES (0, 0)",
    f"PRAGMA application_id = {_APPLICATION_ID}",
)

T = TypeVar("T")

_Identity = tuple[int, int] | None


class KeyFile(Table):
    """A connection to the file, a table without queues.

    SQLite is called only while this connection has locked the file (flock) and the path names it. SQLite's own locks do
    not suffice where users remove the file: it finds the journal by the path, so that a connection to a removed file
    would roll the next file's journal back, and write to it.

    Args:
        path: the file; created if needed, in a directory that exists.
    """

    def __init__(self, path: str, *, user: bool = False) -> None:
        super().__init__()
        self.path = os.path.abspath(path)
        self._values = _FileValues(self._rows)  # type: ignore[assignment]
        self._lock_seconds = _LOCK_SECONDS
        self._file: _Identity = None
        self._lock_descriptor: int | None = None
        self._ours = False
        deadline = Deadline(_LOCK_SECONDS)
        while not self._opened(user):  # its last user has removed it meanwhile
            if deadline.expired():
                raise self._unusable(f"other processes have removed it again and again for {deadline.seconds:g} s")
        self._ours = True

    # Differently than in memory

    def values(self, keys: Collection[str]) -> list[bytes] | None:
        with self._transaction("BEGIN"):
            return super().values(keys)

    def change(self, plan: Callable[[Values], tuple[T, Changes]]) -> T:
        with self._transaction():
            result, changes = plan(self._values)
            for key, value in changes.items():
                if value is None:
                    self._rows("DELETE FROM kv WHERE key = ?", key)
                else:
                    self._rows("INSERT OR REPLACE INTO kv VALUES (?, ?)", key, value)
        return result

    # The file

    def remove_if_empty(self) -> None:
        """Remove the file if there is no key left."""
        with self._transaction():
            if not self.count():
                self._remove()

    def leave(self, expected: int) -> None:
        """Count a user less; the last of so many expected users, unless negative, removes the file."""
        self._lock_seconds = _LEAVE_SECONDS
        with self._transaction():
            ((now, left),) = self._rows("SELECT now, left FROM users")
            if now == 1 and 0 <= expected <= left + 1:
                self._remove()
            else:
                self._rows("UPDATE users SET now = now - 1, left = left + 1")

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def reopen_in_child(self) -> None:
        """Open the file anew in a forked child, which must never close the parent's connection."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._database))
        reset_lock(self._lock)
        if self._lock_descriptor is not None:  # another thread of the parent has locked the file
            os.close(self._lock_descriptor)
            self._lock_descriptor = None
        with self._locked():
            self._connect()
            self._set_modes()

    def _opened(self, user: bool) -> bool:
        """Open the file; return whether the path still names it once it is locked."""
        self._file = None
        try:
            with self._locked():
                self._connect()
                try:
                    self._set_modes()
                    with self._transaction():
                        self._prepare(user)
                except BaseException:
                    self._database.close()
                    raise
        except MovedFileError:
            return False
        return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the file, create it if this connection has none yet, and check that the path names it."""
        with self._lock:
            if self._lock_descriptor is not None:
                yield
                return
            descriptor = self._open()
            try:
                self._when_free(lambda: fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB))
                self._file = self._file or _identity(descriptor)
                self._check_in_place()
                self._lock_descriptor = descriptor
                yield
            finally:
                self._lock_descriptor = None
                with contextlib.suppress(OSError):  # closing it would not suffice if a forked child has a copy
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
                os.close(descriptor)

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC
        try:
            try:
                return os.open(self.path, flags)
            except FileNotFoundError:
                if self._file:
                    raise self._removed() from None
                return os.open(self.path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        except FileNotFoundError as error:
            raise self._unusable("its directory does not exist") from error
        except FileExistsError as error:
            raise self._removed() from error  # and created by another user
        except OSError as error:
            raise self._unusable(reason(error)) from error

    def _connect(self) -> None:
        url = f"{Path(self.path).as_uri()}?mode=rw"  # SQLite would create a missing file, readable by other users
        try:
            self._database = sqlite3.connect(url, timeout=0, isolation_level=None, check_same_thread=False, uri=True)
        except sqlite3.Error as error:
            raise self._error(error) from error

    def _set_modes(self) -> None:
        """Choose speed: a killed process leaves a journal, but nothing has to survive a crash of the host.

        The journal stays, too, as the next user of the path's last file takes it for its own, and removes it.
        """
        self._rows("PRAGMA synchronous = OFF")
        self._rows("PRAGMA journal_mode = PERSIST")

    def _prepare(self, user: bool) -> None:
        """Create the tables of an empty file, check that others are of this class, and count the user."""
        if not os.stat(self.path).st_size:
            for statement in _SCHEMA:
                self._rows(statement)
        elif self._rows("PRAGMA application_id") != [(_APPLICATION_ID,)]:
            raise self._foreign()
        if user:
            self._rows("UPDATE users SET now = now + 1")

    def _remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.path}-journal")  # first: without the file, the path's next user has a journal there
        os.unlink(self.path)

    @contextlib.contextmanager
    def _transaction(self, begin: str = "BEGIN EXCLUSIVE") -> Iterator[None]:
        with self._locked():
            self._rows(begin)
            try:
                yield
                self._rows("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise

    def _rows(self, statement: str, *values: Any) -> list[Any]:
        """Execute a statement; return its rows."""
        with self._locked():
            try:
                return self._when_free(lambda: self._database.execute(statement, values).fetchall())
            except sqlite3.Error as error:
                raise self._error(error) from error

    def _when_free(self, function: Callable[[], T]) -> T:
        """Call a function again and again until no other process has locked the file, be it another program."""
        deadline = None
        while True:
            try:
                return function()
            except BlockingIOError:
                pass
            except OSError as error:  # the file system has no locks, say
                raise self._unusable(reason(error)) from error
            except sqlite3.Error as error:
                if _code(error) != sqlite3.SQLITE_BUSY:
                    raise
            deadline = deadline or Deadline(self._lock_seconds)
            if deadline.expired():
                how_long = f"{deadline.seconds:g} s; is one of its users stopped?"
                raise StoreTimeoutError(f"{self.path} was locked for {how_long}")
            time.sleep(_PAUSE_SECONDS)

    def _check_in_place(self) -> None:
        """Raise MovedFileError if the path names no file, or another one."""
        if (identity := _identity(self.path)) != self._file:
            if identity is None:
                raise self._removed()
            raise MovedFileError(f"{self.path} was replaced while it was in use; leave a FileStore's file alone")

    def _error(self, error: sqlite3.Error) -> DistStoreError:
        damaged = _code(error) in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
        if damaged and not self._ours:
            return self._foreign()
        if damaged:
            what = "Stop all users of the file, remove it, and check the disk"
            return DistStoreError(f"{self.path} is damaged: {error}. {what}")
        return self._unusable(_reason(error))

    def _foreign(self) -> ForeignFileError:
        return ForeignFileError(f"{self.path} is no FileStore's file of this version; give another path, or remove it")

    def _removed(self) -> MovedFileError:
        return MovedFileError(f"cannot use {self.path} as a FileStore: it was removed while it was in use")

    def _unusable(self, why: str) -> DistStoreError:
        return DistStoreError(f"cannot use {self.path} as a FileStore: {why}")


class ForeignFileError(DistStoreError):
    """The file has other content."""


class MovedFileError(DistStoreError):
    """The path names no file any more, or another one."""


class _FileValues(Mapping[str, bytes]):
    """All values; ``rows`` executes a statement."""

    def __init__(self, rows: Callable[..., list[Any]]) -> None:
        self._rows = rows

    def __getitem__(self, key: str) -> bytes:
        for (value,) in self._rows("SELECT value FROM kv WHERE key = ?", key):
            return bytes(value)
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return (key for (key,) in self._rows("SELECT key FROM kv"))

    def __len__(self) -> int:
        return int(self._rows("SELECT count(*) FROM kv")[0][0])


def _code(error: sqlite3.Error) -> int:
    """Return SQLite's primary code of an error; 0 for one of the module's own, of a connection that is closed, say."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _reason(error: sqlite3.Error) -> str:
    """Return the reason of an error; that there is no free descriptor, which SQLite hides, with limit and remedy."""
    if _code(error) == sqlite3.SQLITE_CANTOPEN:
        try:
            os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as limit:
            return reason(limit)
    return str(error)


def _identity(path: str | int) -> _Identity:
    """Return the device and the inode of the file at a path or of a descriptor, None without a file."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
