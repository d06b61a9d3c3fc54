"""The file of a FileStore: a log of records that several processes append, one at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import struct
import time
import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.wire.errors import DistStoreError, StoreTimeoutError

SET, JOIN, LEAVE = b"=", b"+", b"-"
"""Kinds of records: a key has a new value; the file has one user more; one less."""

_MAGIC = b"rankmesh store 2\n"
_ID_BYTES = 15
_START = len(_MAGIC) + _ID_BYTES
_HEAD = struct.Struct("!cIII")  # kind, bytes of the key, bytes of the value, CRC-32 of both
_CRC = struct.Struct("!I")  # of the head
_HEAD_BYTES = _HEAD.size + _CRC.size
_PAUSE_SECONDS = 0.001


class Record(NamedTuple):
    """One change.

    Attributes:
        kind: SET, JOIN or LEAVE.
        key: the key, empty unless the kind is SET.
        value: the key's new value.
    """

    kind: bytes
    key: str = ""
    value: bytes = b""


class Log:
    """One reader and writer of the file, which reads each record once.

    Args:
        path: the file.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._id = b""  # random, written in the file: a replacement of the file may have its inode
        self._end = 0
        self._descriptor = -1

    def has_changed(self) -> bool:
        """Return whether the file has changed since the last read, without waiting for its lock.

        Raises:
            DistStoreError: the file is gone.
        """
        with self._errors():
            return os.stat(self.path).st_size != self._end

    @contextlib.contextmanager
    def locked(self, deadline: Deadline, *, exclusive: bool, create: bool = False) -> Iterator[None]:
        """Lock the file, for reading or for appending, too.

        Args:
            deadline: time limit for the lock.
            exclusive: whether to append, too.
            create: whether to create the file if it does not exist.

        Raises:
            StoreTimeoutError: other users held the lock until the deadline.
            DistStoreError: the file cannot be used.
        """
        with self._errors():
            self._descriptor = self._open_locked(deadline, exclusive, create)
            try:
                yield
            finally:
                os.close(self._descriptor)  # that unlocks it
                self._descriptor = -1

    def read(self) -> list[Record]:
        """Return the records written since the last read.

        Raises:
            DistStoreError: the file is not a FileStore's, not the one that was read before, or damaged.
        """
        size = os.fstat(self._descriptor).st_size
        start = _read(self._descriptor, 0, _START)
        if not (_MAGIC + start[len(_MAGIC) :]).startswith(start):
            raise DistStoreError(f"{self.path} is no FileStore's file of this version; give another path, or remove it")
        if self._end and (start[len(_MAGIC) :] != self._id or size < self._end):
            raise DistStoreError(f"{self.path} was replaced while it was in use; leave a FileStore's file alone")
        if size < _START:  # empty, or its first writer died while it wrote
            return []
        self._id = start[len(_MAGIC) :]
        self._end = max(self._end, _START)
        data = memoryview(_read(self._descriptor, self._end, size - self._end))
        found = []
        for record, length in _records(data):
            if record is None:
                raise DistStoreError(
                    f"{self.path} is damaged at byte {self._end}: its checksum is wrong. Stop all users of the file, "
                    "remove it, and check the disk"
                )
            found.append(record)
            self._end += length
        return found

    def append(self, records: Iterable[Record]) -> None:
        """Write records after the last one read; all of them or none."""
        data = b"".join(map(_encode, records))
        if not self._end:
            self._id = secrets.token_bytes(_ID_BYTES)
            data = _MAGIC + self._id + data
        # Bytes after the last whole record are left of a writer that died while it wrote.
        os.ftruncate(self._descriptor, self._end)
        try:
            _write(self._descriptor, self._end, data)
        except BaseException:
            os.ftruncate(self._descriptor, self._end)
            raise
        self._end += len(data)

    def remove(self) -> None:
        """Remove the file; users that wait for its lock create a new one, or find that it is gone."""
        os.unlink(self.path)

    def _open_locked(self, deadline: Deadline, exclusive: bool, create: bool) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        while True:
            descriptor = os.open(self.path, flags, 0o600)
            try:
                self._lock(descriptor, deadline, exclusive)
                if os.fstat(descriptor).st_nlink:  # else its last user removed it meanwhile
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _lock(self, descriptor: int, deadline: Deadline, exclusive: bool) -> None:
        # A lock of the open file, not of the process: two stores in one process keep each other out, too.
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        while True:
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if deadline.expired():
                    raise StoreTimeoutError(
                        f"{self.path} was locked for {deadline.seconds:g} s; is one of its users stopped?"
                    ) from None
            time.sleep(min(_PAUSE_SECONDS, deadline.remaining()))

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            why = "it was removed while it was in use" if self._id else "its directory does not exist"
            raise DistStoreError(f"cannot use {self.path} as a FileStore: {why}") from error
        except OSError as error:
            if isinstance(error, DistStoreError):  # a StoreTimeoutError is a TimeoutError, and so an OSError
                raise
            raise DistStoreError(f"cannot use {self.path} as a FileStore: {error.strerror}") from error


def _encode(record: Record) -> bytes:
    key = record.key.encode()
    head = _HEAD.pack(record.kind, len(key), len(record.value), zlib.crc32(record.value, zlib.crc32(key)))
    return head + _CRC.pack(zlib.crc32(head)) + key + record.value


def _records(data: memoryview) -> Iterator[tuple[Record | None, int]]:
    """Yield each whole record with its length in bytes; None, and no more, for a damaged one."""
    while len(data) >= _HEAD_BYTES:
        kind, key_bytes, value_bytes, crc = _HEAD.unpack_from(data)
        if zlib.crc32(data[: _HEAD.size]) != _CRC.unpack_from(data, _HEAD.size)[0]:
            yield None, 0
            return
        length = _HEAD_BYTES + key_bytes + value_bytes
        if len(data) < length:
            return
        content = data[_HEAD_BYTES:length]
        if zlib.crc32(content) != crc:
            yield None, 0
            return
        yield Record(kind, bytes(content[:key_bytes]).decode(), bytes(content[key_bytes:])), length
        data = data[length:]


def _read(descriptor: int, at: int, count: int) -> bytes:
    found = bytearray()
    while len(found) < count and (piece := os.pread(descriptor, count - len(found), at + len(found))):
        found += piece
    return bytes(found)


def _write(descriptor: int, at: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        count = os.pwrite(descriptor, rest, at)
        rest, at = rest[count:], at + count
